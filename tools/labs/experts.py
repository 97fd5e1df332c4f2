"""Kill the processes with the experts under load (AFD), and hold every answer to that of an undisturbed run.

    python tools/lab.py experts                                  # one process with experts, 200 sessions, killed ten times
    python tools/lab.py experts --processes 3 --at-once 2        # three that share the experts; two at the same moment
    python tools/lab.py experts --signal STOP                    # they hang for a moment, and are killed then
    python tools/lab.py experts --attention-processes 2          # attention is a group of two processes
    python tools/lab.py experts --processes 0 --losses 0         # both sides in one process, and nothing is killed

A tiny model is served with attention and experts on meshes of their own (`--attention-mesh`, `--expert-mesh`), the experts in processes
of their own. Each request is answered undisturbed first. Then every session sends its own request again and again, streamed; half of the
prompts begin alike, and a repeated prompt is found in the prefix cache. At a random moment one of the processes with experts, each in
turn, gets the signal, and is killed and started again after a moment, as its supervisor would do. An answer is lost if its stream ends
with an error or without an end, and wrong if its text is another.

A line for each loss says: `silence`, the longest time without a token on any stream, from the signal until tokens come again; `gap`, the
seconds that the attention side's `/metrics` has for it, the most of those killed together; `cached`, tokens of prompts that were found in
the prefix cache since the loss before, of those that were found there undisturbed; `pages`, those that hold something of the cache, before
and after. Pages of running requests come and go, so half may be missing. Each prompt must be found in the cache as far as it was
undisturbed, and no request preempted.

What stands behind `--` are more options of `dsjax serve`, for both sides. `--json FILE` writes `{"losses": [{"processes", "silence", "gap",
"cached", "pages"}], "answers", "lost", "wrong", "cache_lost", "pages_left", "cached", "expert_metrics"}`. Exits with 1 if an answer was
lost or wrong, something of the cache was lost, or a page was left.
"""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import Processes, free_port
from worded_checkpoint import write_worded_checkpoint

from dsjax.bench.serve.records import RequestRecord
from tools.labs.crowd import WORDS, Crowd, add_crowd_options
from tools.labs.servers import serving, tiny_server

EXPERTS = 32


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    add_crowd_options(parser, tokens=32, patience=300)
    parser.add_argument("--processes", type=int, default=1, help="with experts; 0: both sides are in one process")
    parser.add_argument("--attention-mesh", default="dp=2")
    parser.add_argument("--attention-processes", type=int, default=1)
    parser.add_argument("--expert-devices", type=int, help="default: four, or two of each process")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    if not args.processes and (args.losses or args.attention_processes > 1):
        raise SystemExit(
            "error: --processes 0 has both sides in one process: give --losses 0, and no --attention-processes"
        )
    if args.at_once > max(1, args.processes):
        raise SystemExit(f"error: --at-once {args.at_once} of {args.processes} processes")
    args.expert_devices = args.expert_devices or (2 * args.processes if args.processes > 1 else 4)
    with serving(lambda folder: start(args, folder), args.logs) as (processes, url):
        found = asyncio.run(Experts(args, processes, url).run())
    return 1 if any(found[name] for name in ("lost", "wrong", "cache_lost", "pages_left")) else 0


def start(args: argparse.Namespace, folder: Path) -> Processes:
    """Start the attention side, each process with experts, and the attention side's other processes, in this order."""
    options = tiny_server(
        write_worded_checkpoint(folder),
        attention_mesh=args.attention_mesh,
        expert_mesh=f"ep={args.expert_devices}",
        redundant_experts=-EXPERTS % args.expert_devices,
        dtype="float32",
        max_num_seqs=-(-args.sessions // 2),
        max_num_batched_tokens=128,
        prefill_chunk=32,
        max_model_len=128,
        start_timeout=300,
    )
    base = [sys.executable, "-m", "dsjax.serve", *args.serve, *options]
    if not args.processes:
        return Processes([base])
    base += ["--afd-address", ",".join(f"127.0.0.1:{free_port()}" for _ in range(args.processes))]
    experts = [[*base, "--afd-role", "expert", "--afd-server-rank", str(rank)] for rank in range(args.processes)]
    attention, count = [[*base, "--afd-role", "attention"]], args.attention_processes
    if count > 1:
        group = [*attention[0], "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
        attention = [[*group, "--process-id", str(index)] for index in range(count)]
    return Processes([attention[0], *experts, *attention[1:]])


@dataclass(kw_only=True)
class Experts(Crowd):
    """The crowd of a server whose processes with experts are lost and come back.

    Attributes:
        cache_lost: what was lost of the cache, in words.
        once: by session, tokens of its prompt that were in the prefix cache the second time it came undisturbed.
        found_tokens, known_tokens: tokens of answered prompts that were in the cache, and that should have been.
    """

    cache_lost: list[str] = field(default_factory=list)
    once: list[int] = field(default_factory=list)
    found_tokens: int = 0
    known_tokens: int = 0

    def draw_requests(self) -> list[dict]:
        """Draw requests that are greedy, sampled with a seed, or with penalties; every second prompt begins like others."""
        beginning = " ".join(self.rng.choices(WORDS, k=8))
        kinds = [{"temperature": 0}, {"temperature": 1}, {"temperature": 0, "repetition_penalty": 1.3}]
        requests = []
        for index in range(self.args.sessions):
            request = self.request(index, (3, 6), kinds, beginning if index % 2 else "")
            # One DP rank has a session's pages.
            requests.append(request | {"prompt_cache_key": f"session-{index}"})
        return requests

    async def answer_undisturbed(self) -> Sequence[str]:
        """Answer each request twice, to know how much of its prompt is cached the second time."""
        expected = await super().answer_undisturbed()
        again = await self.answer_all()
        self.once = [record.cached_tokens for record in again]
        self.say(f"{len(expected)} undisturbed answers, twice; {sum(self.once)} tokens of prompts were cached")
        pairs = zip(expected, again, strict=True)
        self.wrong += [index for index, (text, record) in enumerate(pairs) if record.text != text]
        return expected

    async def disturb(self) -> None:
        """Kill processes with experts, each in turn, after as many answers as there are sessions."""
        if not self.args.losses:
            await self.answers_come(4 * len(self.requests))
        for number in range(self.args.losses):
            await self.answers_come(len(self.requests))
            ranks = [(number + k) % self.args.processes for k in range(self.args.at_once)]
            self.losses.append(await self.lose(ranks))
            self.say_change(f"loss {number + 1}", self.losses[-1])

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return super().found() | {"cache_lost": self.cache_lost, "cached": [self.found_tokens, self.known_tokens]}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no request is under way."""
        metrics = [await self.expert_metrics(rank) for rank in range(self.args.processes)]
        return await super().found_at_the_end() | {"expert_metrics": metrics}

    async def lose(self, ranks: list[int]) -> dict:
        """Take processes with experts away, and start them again."""
        await asyncio.sleep(self.rng.uniform(1, 4))
        pages, preempted = await self.pages(), await self.metric("vllm:num_preemptions_total")
        found_before, known_before = self.found_tokens, self.known_tokens
        losses = await self.metric("dsjax_expert_process_losses_total")
        self.doing, began = f"experts' processes {ranks} are lost", time.monotonic()
        victims = [self.processes.processes[1 + rank] for rank in ranks]
        for victim in victims:
            victim.send_signal(getattr(signal, f"SIG{self.args.signal}"))
        if self.args.signal == "STOP":
            await self.until(lambda: self.have_lost(losses + len(ranks)))
        await asyncio.sleep(self.rng.uniform(0, 1))
        for rank, victim in zip(ranks, victims, strict=True):
            victim.kill()
            self.processes.start_again(1 + rank)
        await self.until(lambda: self.have_lost(losses + len(ranks), connected=self.args.processes))
        _, silence = await self.silence(began)
        self.doing = "nothing is lost"
        await self.answers_come(len(self.requests))
        pages_after = await self.pages()
        # Pages of running requests come and go.
        if pages_after < pages / 2:
            self.cache_lost.append(f"{pages - pages_after} of {pages} pages, when processes {ranks} were lost")
        if await self.metric("vllm:num_preemptions_total") > preempted:
            self.cache_lost.append(f"requests were preempted when processes {ranks} were lost")
        gap = "dsjax_expert_process_last_gap_seconds"
        gaps = [await self.metric(gap, expert_process=str(rank)) for rank in ranks]
        return {
            "processes": ranks,
            "silence": silence,
            "gap": round(max(gaps), 2),
            "cached": [self.found_tokens - found_before, self.known_tokens - known_before],
            "pages": [pages, pages_after],
        }

    async def answers_come(self, count: int) -> None:
        """Wait until sessions have so many more answers."""
        enough = self.answers + count
        await self.until(lambda: self.answers >= enough)

    async def have_lost(self, count: float, connected: int | None = None) -> bool:
        """Whether the attention side has noticed so many losses, and so many processes are connected."""
        if connected is not None and await self.metric("dsjax_expert_process_connected") != connected:
            return False
        return await self.metric("dsjax_expert_process_losses_total") >= count

    def answered(self, index: int, record: RequestRecord) -> None:
        """Count an answer, and what of its prompt was cached."""
        super().answered(index, record)
        cached = record.cached_tokens
        self.found_tokens += cached
        self.known_tokens += self.once[index]
        if cached < self.once[index]:
            self.cache_lost.append(
                f"session {index}: {cached} of {self.once[index]} tokens of its prompt, {self.doing}"
            )

    async def pages(self) -> float:
        """Pages of running requests, and pages kept for their prefix."""
        return await self.metric("dsjax_rank_pages_used") + await self.metric("dsjax_rank_pages_cached")

    async def expert_metrics(self, rank: int) -> dict[str, float]:
        """A process with experts' own `/ready` and `/metrics`."""
        url = re.search(r"/metrics at (http://[\d.:]+)", self.processes.output[1 + rank]).group(1)
        async with self.http.get(f"{url}/ready") as answer:
            ready = await answer.json()
        async with self.http.get(f"{url}/metrics") as answer:
            text = await answer.text()
        values = re.findall(r"^(dsjax_experts_\w+){.*} (\S+)$", text, re.MULTILINE)
        return ready | {name: float(value) for name, value in values}
