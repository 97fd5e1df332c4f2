"""Sessions that stream one request each from a server again and again, and hold every answer to the first: for tools that disturb it."""

import asyncio
import itertools
import json
import re
import time
from dataclasses import dataclass, field

import aiohttp

WORDS = [
    "def",
    "return",
    "the",
    "queue",
    "of",
    "pages",
    "for",
    "a",
    "host",
    "that",
    "is",
    "gone",
    "and",
    "comes",
    "back",
    "(",
    ")",
    ":",
    "in",
    "if",
    "not",
]
"""The words that prompts are made of."""


@dataclass
class Seen:
    """What has come of an answer: the response's status, events with text, when the last came, and the usage where it was asked for."""

    status: int | None = None
    events: int = 0
    last: float | None = None
    usage: dict | None = None


@dataclass
class Sessions:
    """The sessions. What is lost or wrong is printed at once, with the reason.

    Attributes:
        patience: seconds in which something must have happened. progress: seconds between two lines that say how far it is.
        requests: bodies for ``/v1/completions``, one of each session. http: assigned before any is sent.
        arrivals: when tokens came, on any stream. doing: what is done to the server now, for messages.
    """

    patience: float
    progress: float
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    doing: str = "answering undisturbed"
    answers: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    going: bool = True
    http: aiohttp.ClientSession | None = None

    def client(self) -> aiohttp.ClientSession:
        """A client whose connections are as many as it takes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.patience)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    def check_alive(self) -> None:
        """Raise where the server has ended."""

    def answered(self, index: int, seen: Seen) -> None:
        """Take notice of a session's answer."""

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the start before it."""
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    @property
    def standing(self) -> str:
        """What came of the requests so far."""
        return f"{self.answers} answers, {len(self.lost)} lost, {len(self.wrong)} wrong"

    async def tell_progress(self) -> None:
        """Say again and again how far it is."""
        while True:
            before = len(self.arrivals)
            await asyncio.sleep(self.progress)
            rate = (len(self.arrivals) - before) / self.progress
            self.say(f"{self.standing}; {rate:.1f} events a second; {self.doing}")

    async def session(self, index: int, expected: str) -> None:
        """Send one request again and again."""
        for number in itertools.count(1):
            if not self.going:
                return
            began, seen = time.monotonic(), Seen()
            try:
                text = await self.ask(self.requests[index], seen)
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                now = time.monotonic()
                last = "none" if seen.last is None else f"the last {now - seen.last:.1f} s ago"
                self.lost.append(
                    f"session {index}, its request {number}: {type(error).__name__}: {error}; status {seen.status}, sent "
                    f"{now - began:.1f} s ago, {seen.events} events, {last}; while {self.doing}; {self.requests[index]}"
                )
                self.say(f"LOST: {self.lost[-1]}")
                await asyncio.sleep(1)
                continue
            self.answers += 1
            self.answered(index, seen)
            if text != expected:
                self.wrong.append(index)
                at = next((at for at, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), "the end")
                self.say(
                    f"WRONG: session {index}, its request {number}, from character {at} on, after {time.monotonic() - began:.1f} s, while "
                    f"{self.doing}: {text!r} instead of {expected!r}; {self.requests[index]}"
                )

    async def ask(self, request: dict, seen: Seen | None = None) -> str:
        """The text of a stream that ends as it should. seen: is told what comes."""
        text, done, seen = "", False, seen or Seen()
        async with self.http.post(f"{self.url}/v1/completions", json=request) as answer:
            seen.status = answer.status
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            async for line in answer.content:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise RuntimeError(data)
                    seen.usage = event.get("usage")
                    if not event["choices"]:
                        continue
                    seen.events, seen.last = seen.events + 1, time.monotonic()
                    self.arrivals.append(seen.last)
                    text += event["choices"][0]["text"]
        if not done:
            raise RuntimeError("the stream has no end")
        return text

    async def silence(self, since: float) -> tuple[float, float]:
        """When the longest time without a token since then began, on any stream, and its seconds; first waits for a token."""
        count = len(self.arrivals)
        await self.until(lambda: self.has_more(count))
        times = [since, *(at for at in self.arrivals if at > since)]
        began, ended = max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])
        return began, round(ended - began, 2)

    async def has_more(self, count: int) -> bool:
        """Whether more tokens have come."""
        return len(self.arrivals) > count

    async def metric(self, name: str) -> float:
        """A metric's samples, added up."""
        return sum(value for _, value in await self.samples(name))

    async def samples(self, name: str) -> list[tuple[str, float]]:
        """A metric's samples: labels and value."""
        async with self.http.get(f"{self.url}/metrics", params={"name[]": name}) as answer:
            text = await answer.text()
        rows = re.findall(rf"^{name}({{.*}})? (\S+)$", text, re.MULTILINE)
        return [(labels, float(value)) for labels, value in rows]

    async def until(self, condition) -> float:
        """Wait; give for how long."""
        began = time.monotonic()
        while not await condition():
            if time.monotonic() - began > self.patience:
                raise RuntimeError(f"nothing has changed within {self.patience} s (--patience)")
            self.check_alive()
            await asyncio.sleep(0.1)
        return round(time.monotonic() - began, 2)
