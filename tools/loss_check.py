"""What the tools have in common that take processes away from a server under load, and hold every answer to that of an undisturbed run.

`check_host_loss.py` takes processes of a mesh, `check_expert_loss.py` those that have the experts. Both serve a tiny model in processes of
their own, have each request answered undisturbed, then send all of them again and again while processes go and come back.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tools"),
    *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts", "dsjax/engine")),
]
from processes import Processes
from streaming_sessions import WORDS, Sessions

SERVING = "serving tiny at"
"""What process 0 says, with its address, when it is ready; ``tiny`` is the name that the model is served under."""
_LISTED_BY_ITSELF = ("losses", "leaves")


def loss_parser(description: str, *, tokens: int, patience: float) -> argparse.ArgumentParser:
    """The options that these tools share. tokens, patience: the defaults of these two."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=tokens, help="of an answer, at most")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=1, help="processes that are taken at the same moment")
    parser.add_argument(
        "--patience", type=float, default=patience, help="seconds in which what is waited for must have happened"
    )
    parser.add_argument("--progress", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--logs", type=Path, help="a folder for what each process has printed since it was started last"
    )
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="more options of dsjax serve")
    return parser


def exit_on_sigterm() -> None:
    """Let SIGTERM end this tool as an error does, so that its processes are gone too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def flags_of(options: dict[str, object]) -> list[str]:
    """Options as words of a command line."""
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def run_check(
    start: Callable[[Path], Processes], make: Callable[[Processes], "LossCheck"], logs: Path | None
) -> dict[str, object]:
    """Start processes, run a check on them, end them, and give what was found.

    start: is given a folder that lasts as long as they do. logs: a folder for what they have printed.
    """
    with tempfile.TemporaryDirectory(prefix="check-loss-") as folder:
        processes = start(Path(folder))
        try:
            processes.wait_for(0, SERVING, 1800)
            return asyncio.run(make(processes).run())
        except BaseException:
            print(processes.last_words(), file=sys.stderr)
            raise
        finally:
            processes.end()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for index, text in enumerate(processes.output):
                    (logs / f"process-{index}.log").write_text(text)


@dataclass(kw_only=True)
class LossCheck(Sessions, ABC):
    """The sessions, and what is done to the processes under them; process 0 has HTTP, and is never taken.

    losses: what each loss was like.
    """

    args: argparse.Namespace
    processes: Processes
    losses: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.url = re.search(rf"{SERVING} (http://[\d.:]+)", self.processes.output[0]).group(1)
        self.rng = random.Random(self.args.seed)
        self.requests = self.draw_requests()

    @abstractmethod
    def draw_requests(self) -> list[dict]:
        """Draw a request for each session."""

    @abstractmethod
    async def disturb(self) -> None:
        """Take processes away under the sessions, and note what came of it in `losses`."""

    async def answer_undisturbed(self) -> Sequence[str]:
        """Have each request answered before anything is done: the texts that all later answers are held to."""
        return await asyncio.gather(*map(self.ask, self.requests))

    def beside(self) -> list[asyncio.Task]:
        """Start what else runs as long as the sessions do."""
        return []

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return {"losses": self.losses, "answers": self.answers, "lost": len(self.lost), "wrong": len(self.wrong)}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no session has a request under way."""
        async with self.http.get(f"{self.url}/get_load") as answer:
            pages = sum(load["used_pages"] for load in (await answer.json())["ranks"])
        return self.found() | {"pages_left": pages}

    async def run(self) -> dict[str, object]:
        """Run all of it, printing a line for each loss."""
        async with self.client() as self.http:
            telling = asyncio.create_task(self.tell_progress())
            expected = await self.answer_undisturbed()
            sessions = [asyncio.create_task(self.session(i, text)) for i, text in enumerate(expected)] + self.beside()
            await self.disturb()
            self.going = False
            await asyncio.gather(*sessions)
            telling.cancel()
            await asyncio.sleep(1)
            found = await self.found_at_the_end()
            self.write(found)
            self.say(json.dumps({name: value for name, value in found.items() if name not in _LISTED_BY_ITSELF}))
            return found

    def write(self, found: dict[str, object]) -> None:
        """Write what was found to the file that was asked for."""
        if self.args.json:
            self.args.json.write_text(json.dumps(found, indent=1) + "\n")

    def check_alive(self) -> None:
        """Raise where process 0 has ended."""
        if self.processes.processes[0].poll() is not None:
            raise RuntimeError("process 0, which serves, has ended")

    def request(self, index: int, words: tuple[int, int], kinds: Sequence[dict], beginning: str = "") -> dict:
        """Draw a session's request. words: fewest and most of its own prompt. kinds: ways to sample, one session after the other."""
        prompt = " ".join(self.rng.choices(WORDS, k=self.rng.randint(*words)))
        tokens = self.rng.randint(max(1, self.args.tokens // 2), self.args.tokens)
        prompt = f"{beginning} {prompt}" if beginning else prompt
        common = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        return common | kinds[index % len(kinds)]
