"""Kill the processes with the experts under load, and hold every answer to that of an undisturbed run.

    python tools/check_expert_loss.py                                  # one process with experts, 200 sessions, killed ten times
    python tools/check_expert_loss.py --processes 3 --at-once 2        # three that share the experts; two at the same moment
    python tools/check_expert_loss.py --processes 0 --losses 0         # both sides in one process, and nothing is killed

A tiny model is served over HTTP with attention and experts apart (`--attention-mesh`, `--expert-mesh`), the experts in processes of their
own. First each request is answered undisturbed. Then every session sends its own request again and again, streamed; half of the prompts
begin alike, and a repeated prompt is found in the prefix cache. At a random moment one of the processes with experts, in turn each of them,
gets SIGKILL, and is started again, as its supervisor would do, after a moment. An answer is lost where its stream ends with an error or
without an end, and wrong where its text is another.

Of each loss a line says: `silence`, the longest time without a token on any stream, from the signal until tokens come again; `gap`, the
seconds that the attention side's `/metrics` has for it, the most of those killed together; `cached`, tokens of prompts that were found in
the prefix cache since the loss before, of those that were found there when each prompt came for the second time, undisturbed; `pages`,
those that hold something of the cache, before and after: those of running requests come and go, so that a fifth may be missing. Each prompt
must be found in the cache as far as it was undisturbed, and no request preempted.

What stands behind `--` are more options of `dsjax serve`, for both sides.

`--json FILE` writes `{"losses": [{"processes", "silence", "gap", "cached", "pages"}], "answers", "lost", "wrong", "cache_lost",
"pages_left", "cached", "expert_metrics"}`. Exits 1 where an answer was lost or wrong, something of the cache has gone, or a page is left.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tools"),
    *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts", "dsjax/engine")),
]
from processes import Processes, free_port
from streaming_sessions import WORDS, Seen, Sessions
from worded_checkpoint import write_worded_checkpoint

EXPERTS = 32
SERVING, ANSWERING = "serving tiny at", "answer at"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="with experts; 0: both sides are in one process")
    parser.add_argument("--attention-mesh", default="dp=2")
    parser.add_argument("--expert-devices", type=int, help="default: four, or two of each process")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=1, help="processes that are killed at the same moment")
    parser.add_argument("--patience", type=float, default=300, help="seconds in which tokens must come again")
    parser.add_argument("--progress", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--logs", type=Path, help="a folder for what each process has printed since it was started last"
    )
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="more options of dsjax serve")
    args = parser.parse_args()
    if args.losses and not args.processes:
        parser.error("--processes 0 has no process that could be killed without the others; give --losses 0")
    if args.at_once > max(1, args.processes):
        parser.error(f"--at-once {args.at_once} of {args.processes} processes")
    args.expert_devices = args.expert_devices or (2 * args.processes if args.processes > 1 else 4)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that processes are gone too
    with tempfile.TemporaryDirectory(prefix="check-expert-loss-") as folder:
        processes = Processes(commands(args, write_worded_checkpoint(Path(folder))), stuck=600)
        try:
            processes.wait_for(0, SERVING, 1800)
            found = asyncio.run(
                Check(patience=args.patience, progress=args.progress, args=args, processes=processes).run()
            )
        except BaseException:
            print(processes.last_words(), file=sys.stderr)
            raise
        finally:
            processes.end()
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                for index, text in enumerate(processes.output):
                    (args.logs / f"process-{index}.log").write_text(text)
    return 1 if any(found[name] for name in ("lost", "wrong", "cache_lost", "pages_left")) else 0


def commands(args: argparse.Namespace, model: Path) -> list[list[str]]:
    """The command of the attention side, and of each process with experts."""
    options = {
        "model": model,
        "served-model-name": "tiny",
        "attention-mesh": args.attention_mesh,
        "expert-mesh": f"ep={args.expert_devices}",
        "redundant-experts": -EXPERTS % args.expert_devices,
        "dtype": "float32",
        "max-num-seqs": -(-args.sessions // 2),
        "max-num-batched-tokens": 128,
        "prefill-chunk": 32,
        "page-size": 4,
        "max-model-len": 128,
        "start-timeout": 300,
        "port": 0,
    }
    base = [sys.executable, "-m", "dsjax.serve", "--batch-invariant", *args.serve]
    base += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    if not args.processes:
        return [base]
    addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(args.processes))
    base += ["--afd-address", addresses]
    of_experts = [[*base, "--afd-role", "expert", "--afd-server-rank", str(rank)] for rank in range(args.processes)]
    return [[*base, "--afd-role", "attention"], *of_experts]


@dataclass(kw_only=True)
class Check(Sessions):
    """The sessions, and what is done to the processes under them.

    cache_lost: what of the cache has gone, in words. found, known: tokens of answered prompts that were in the prefix cache, and that had
    been there when the prompt came undisturbed, in ``once``, by session.
    """

    args: argparse.Namespace
    processes: Processes
    cache_lost: list[str] = field(default_factory=list)
    once: list[int] = field(default_factory=list)
    found: int = 0
    known: int = 0

    def __post_init__(self):
        self.url = re.search(rf"{SERVING} (http://[\d.:]+)", self.processes.output[0]).group(1)
        self.rng = random.Random(self.args.seed)
        self.beginning = " ".join(self.rng.choices(WORDS, k=8))
        self.requests = [self.request(index) for index in range(self.args.sessions)]

    def check_alive(self) -> None:
        """Raise where the attention side has ended."""
        if self.processes.processes[0].poll() is not None:
            raise RuntimeError("the attention side has ended")

    def request(self, index: int) -> dict:
        """Of a session: greedy, drawn with a seed, or with penalties; every second prompt begins like others."""
        prompt = " ".join(self.rng.choices(WORDS, k=self.rng.randint(3, 6)))
        kinds = ({"temperature": 0}, {"temperature": 1, "seed": index}, {"temperature": 0, "repetition_penalty": 1.3})
        tokens = self.rng.randint(max(1, self.args.tokens // 2), self.args.tokens)
        prompt = f"{self.beginning} {prompt}" if index % 2 else prompt
        common = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        # One DP rank has a session's pages.
        common |= {"stream_options": {"include_usage": True}, "prompt_cache_key": f"session-{index}"}
        return common | kinds[index % len(kinds)]

    async def run(self) -> dict:
        """All of it; print a line for each loss."""
        async with self.client() as self.http:
            telling = asyncio.create_task(self.tell_progress())
            expected = await asyncio.gather(*(self.ask(request) for request in self.requests))
            seen = [Seen() for _ in expected]
            again = await asyncio.gather(*map(self.ask, self.requests, seen))
            self.once = [one.usage["prompt_tokens_details"]["cached_tokens"] for one in seen]
            self.say(f"{len(expected)} undisturbed answers, twice; {sum(self.once)} tokens of prompts were cached")
            self.wrong += [index for index, pair in enumerate(zip(expected, again, strict=True)) if len(set(pair)) > 1]
            sessions = [asyncio.create_task(self.session(i, text)) for i, text in enumerate(expected)]
            losses = []
            if not self.args.losses:
                await self.until(lambda: self.have_answered(4 * len(expected)))
            for number in range(self.args.losses):
                await self.until(lambda enough=self.answers + len(expected): self.have_answered(enough))
                losses.append(await self.lose([(number + k) % self.args.processes for k in range(self.args.at_once)]))
                self.say(f"{number + 1}: {json.dumps(losses[-1])}; {self.standing}")
            self.going = False
            await asyncio.gather(*sessions)
            telling.cancel()
            await asyncio.sleep(1)
            async with self.http.get(f"{self.url}/get_load") as answer:
                pages = sum(load["used_pages"] for load in (await answer.json())["ranks"])
            found = {"losses": losses, "answers": self.answers, "lost": len(self.lost), "wrong": len(self.wrong)}
            found |= {"cache_lost": self.cache_lost, "pages_left": pages}
            found["cached"] = [self.found, self.known]
            found["expert_metrics"] = [await self.of_experts(rank) for rank in range(self.args.processes)]
            if self.args.json:
                self.args.json.write_text(json.dumps(found, indent=1) + "\n")
            self.say(json.dumps({name: value for name, value in found.items() if name != "losses"}))
            return found

    async def lose(self, ranks: list[int]) -> dict:
        """Kill processes with experts, and start them again."""
        await asyncio.sleep(self.rng.uniform(1, 4))
        pages, preempted = await self.pages(), await self.metric("vllm:num_preemptions_total")
        before = self.found, self.known
        losses = await self.metric("dsjax_expert_process_losses_total")
        self.doing, began = f"experts' processes {ranks} are lost", time.monotonic()
        for rank in ranks:
            self.processes.processes[1 + rank].kill()
        await asyncio.sleep(self.rng.uniform(0, 1))
        for rank in ranks:
            self.processes.start_again(1 + rank)
        await self.until(lambda: self.have_lost(losses + len(ranks)))
        _, silence = await self.silence(began)
        self.doing = "nothing is lost"
        await self.until(lambda enough=self.answers + len(self.requests): self.have_answered(enough))
        pages_after = await self.pages()
        found = {"processes": ranks, "silence": silence, "gap": round(max(await self.gaps(ranks)), 2)}
        found["cached"] = [self.found - before[0], self.known - before[1]]
        found["pages"] = [pages, pages_after]
        if pages_after < 0.8 * pages:  # those of running requests come and go
            self.cache_lost.append(f"{pages - pages_after} of {pages} pages, when processes {ranks} were lost")
        if await self.metric("vllm:num_preemptions_total") > preempted:
            self.cache_lost.append(f"requests were preempted when processes {ranks} were lost")
        return found

    async def have_answered(self, count: int) -> bool:
        """Whether sessions have so many answers."""
        return self.answers >= count

    async def have_lost(self, count: float) -> bool:
        """Whether the attention side has noticed so many losses, and all processes are connected again."""
        connected = await self.metric("dsjax_expert_process_connected")
        return connected == self.args.processes and await self.metric("dsjax_expert_process_losses_total") >= count

    async def gaps(self, ranks: list[int]) -> list[float]:
        """Of each of these processes with experts the seconds of its last loss."""
        samples = await self.samples("dsjax_expert_process_last_gap_seconds")
        return [value for labels, value in samples if any(f'expert_process="{rank}"' in labels for rank in ranks)]

    def answered(self, index: int, seen: Seen) -> None:
        """Count what of a session's prompt was cached."""
        cached = seen.usage["prompt_tokens_details"]["cached_tokens"]
        self.found, self.known = self.found + cached, self.known + self.once[index]
        if cached < self.once[index]:
            self.cache_lost.append(
                f"session {index}: {cached} of {self.once[index]} tokens of its prompt, {self.doing}"
            )

    async def pages(self) -> float:
        """Pages that hold something: of running requests, or kept for their prefix."""
        return await self.metric("dsjax_rank_pages_used") + await self.metric("dsjax_rank_pages_cached")

    async def of_experts(self, rank: int) -> dict[str, float]:
        """What a process with experts says at its own `/ready` and `/metrics`."""
        url = re.search(r"/metrics at (http://[\d.:]+)", self.processes.output[1 + rank]).group(1)
        async with self.http.get(f"{url}/ready") as answer:
            ready = await answer.json()
        async with self.http.get(f"{url}/metrics") as answer:
            text = await answer.text()
        return ready | {
            name: float(value) for name, value in re.findall(r"^(dsjax_experts_\w+){.*} (\S+)$", text, re.M)
        }


if __name__ == "__main__":
    sys.exit(main())
