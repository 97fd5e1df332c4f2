"""A crowd of clients that stream from a server while a lab disturbs it, and hold every answer to that of an undisturbed run."""

import argparse
import asyncio
import itertools
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from processes import Processes

from dsjax.bench.serve.client import Client, open_session
from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.top.reading import Exposition
from tools.labs.servers import MODEL

_TEXT = "def return the queue of pages for a host that is gone and comes back ( ) : in if not"
WORDS = _TEXT.split()
"""The words of the prompts."""
_LISTED_BEFORE = ("losses", "leaves")


def add_crowd_options(parser: argparse.ArgumentParser, *, tokens: int, patience: float) -> None:
    """The options of labs that have a crowd. tokens, patience: the defaults of these two."""
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=tokens, help="of an answer, at most")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=1, help="processes that are taken at the same moment")
    parser.add_argument("--patience", type=float, default=patience, help="seconds to wait for a change or an answer")
    parser.add_argument("--progress", type=float, default=15, help="seconds between two lines of progress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a folder for the output of each process since its last start")
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="more options of dsjax serve")


@dataclass
class Crowd(ABC):
    """Sessions that send one request each, again and again, and what is done to the processes that serve them.

    Process 0 has the HTTP server and is never taken. Lost and wrong answers are printed at once, with the reason.

    Attributes:
        url: of the server. requests: fields of `/v1/completions`, one request of each session.
        http: set before any request is sent.
        records: of all requests that were sent; those under way grow. doing: what is done to the server now, for messages.
        losses: what came of each loss.
    """

    args: argparse.Namespace
    processes: Processes
    url: str
    http: aiohttp.ClientSession | None = None
    requests: list[dict] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    doing: str = "answering undisturbed"
    answers: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    losses: list[dict] = field(default_factory=list)
    going: bool = True

    def __post_init__(self):
        self.rng = random.Random(self.args.seed)
        self.requests = self.draw_requests()

    @abstractmethod
    def draw_requests(self) -> list[dict]:
        """Draw a request for each session."""

    @abstractmethod
    async def disturb(self) -> None:
        """Take processes away, and add what came of it to `losses`."""

    async def answer_undisturbed(self) -> Sequence[str]:
        """Answer each request before anything is taken away. Later answers are compared with these texts."""
        return [record.text for record in await self.answer_all()]

    def answered(self, index: int, record: RequestRecord) -> None:
        """Count an answer of a session."""
        self.answers += 1

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return {"losses": self.losses, "answers": self.answers, "lost": len(self.lost), "wrong": len(self.wrong)}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no request is under way."""
        async with self.http.get(f"{self.url}/get_load") as answer:
            pages = sum(load["used_pages"] for load in (await answer.json())["ranks"])
        return self.found() | {"pages_left": pages}

    async def run(self) -> dict[str, object]:
        """Run the sessions and disturb them; give what was found."""
        self.say(f"the server is {self.url}")
        async with open_session(None) as self.http:
            progress = asyncio.create_task(self.say_progress())
            expected = await self.answer_undisturbed()
            sessions = [asyncio.create_task(self.session(*pair)) for pair in enumerate(expected)]
            await self.disturb()
            self.going = False
            await asyncio.gather(*sessions)
            progress.cancel()
            await asyncio.sleep(1)
            found = await self.found_at_the_end()
        self.write(found)
        self.say(json.dumps({name: value for name, value in found.items() if name not in _LISTED_BEFORE}))
        return found

    def write(self, found: dict[str, object]) -> None:
        """Write the file of `--json`."""
        if self.args.json:
            self.args.json.write_text(json.dumps(found, indent=1) + "\n")

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def say_change(self, name: str, change: dict) -> None:
        """Print a change of the mesh and write what is known."""
        self.say(f"{name}: {json.dumps(change)}; {self.standing}")
        self.write(self.found())

    @property
    def standing(self) -> str:
        """What came of the requests so far."""
        return f"{self.answers} answers, {len(self.lost)} lost, {len(self.wrong)} wrong"

    async def say_progress(self) -> None:
        """Print progress, again and again."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(self.args.progress)
            rate = len(self.arrivals(began)) / self.args.progress
            self.say(f"{self.standing}; {rate:.1f} events a second; {self.doing}")

    def request(self, index: int, words: tuple[int, int], kinds: Sequence[dict], beginning: str = "") -> dict:
        """Draw a request. words: fewest and most of its own prompt. kinds: ways to sample, one for each session in turn."""
        prompt = " ".join([*beginning.split(), *self.rng.choices(WORDS, k=self.rng.randint(*words))])
        tokens = self.rng.randint(max(1, self.args.tokens // 2), self.args.tokens)
        common = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        kind = kinds[index % len(kinds)]
        return common | kind | ({"seed": index} if kind["temperature"] else {})

    async def session(self, index: int, expected: str) -> None:
        """Send one request again and again."""
        request = self.requests[index]
        for number in itertools.count(1):
            if not self.going:
                return
            began, record = time.monotonic(), await self.send(request)
            if record.error is not None:
                now, came = time.monotonic(), record.chunk_times
                last = f"the last {now - came[-1]:.1f} s ago" if came else "none"
                self.lost.append(
                    f"session {index}, its request {number}: {record.error}; sent {now - began:.1f} s ago, "
                    f"{len(came)} events, {last}; while {self.doing}; {request}"
                )
                self.say(f"LOST: {self.lost[-1]}")
                await asyncio.sleep(1)
                continue
            self.answered(index, record)
            if record.text != expected:
                self.wrong.append(index)
                self.say(
                    f"WRONG: session {index}, its request {number}, after {time.monotonic() - began:.1f} s, while {self.doing}: "
                    f"{record.text!r} instead of {expected!r}; {request}"
                )

    async def send(self, request: dict) -> RequestRecord:
        """What came of a request; its error is in the record."""
        more = {name: value for name, value in request.items() if name not in ("prompt", "max_tokens")}
        options = ServerOptions(temperature=None, extra_body=json.dumps(more), request_timeout=self.args.patience)
        client = Client(self.http, self.url, MODEL, options, clock=time.monotonic)
        asked = BenchRequest(request["prompt"], 0, request["max_tokens"])
        return await client.send(asked, on_start=self.records.append)

    async def answer_all(self) -> list[RequestRecord]:
        """An answer to each request.

        Raises:
            RuntimeError: one is not answered.
        """
        records = await asyncio.gather(*map(self.send, self.requests))
        if errors := [record.error for record in records if record.error is not None]:
            raise RuntimeError(f"{len(errors)} requests are not answered: {errors[0]}")
        return records

    def arrivals(self, since: float) -> list[float]:
        """Times after a moment at which tokens came, on any stream, in order."""
        return sorted(at for record in self.records for at in record.chunk_times if at > since)

    async def silence(self, since: float) -> tuple[float, float]:
        """When the longest time without a token since then began, on any stream, and its seconds. Waits for a token first."""
        now = time.monotonic()
        await self.until(lambda: bool(self.arrivals(now)))
        times = [since, *self.arrivals(since)]
        began, ended = max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])
        return began, round(ended - began, 2)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return (await self.scrape(name)).total(name, **labels)

    async def scrape(self, name: str) -> Exposition:
        """A metric's samples."""
        async with self.http.get(f"{self.url}/metrics", params={"name[]": name}) as answer:
            return Exposition(await answer.text())

    async def until(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait for something.

        Raises:
            RuntimeError: it has not happened within `--patience`, or process 0 has ended.
        """
        began = time.monotonic()
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            if time.monotonic() - began > self.args.patience:
                raise RuntimeError(f"nothing has changed within {self.args.patience} s (--patience)")
            if self.processes.processes[0].poll() is not None:
                raise RuntimeError("process 0, which serves, has ended")
            await asyncio.sleep(0.1)

    def ended(self, index: int) -> bool:
        """Whether a process has ended."""
        return self.processes.processes[index].poll() is not None
