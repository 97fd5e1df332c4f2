"""Kill the processes with the experts under load, and hold every answer to that of an undisturbed run.

    python tools/check_expert_loss.py                                  # one process with experts, 200 sessions, killed ten times
    python tools/check_expert_loss.py --processes 3 --at-once 2        # three that share the experts; two at the same moment
    python tools/check_expert_loss.py --attention-processes 2          # attention is a group of two processes
    python tools/check_expert_loss.py --processes 0 --losses 0         # both sides in one process, and nothing is killed

A tiny model is served over HTTP with attention and experts apart (`--attention-mesh`, `--expert-mesh`), the experts in processes of their
own. First each request is answered undisturbed. Then every session sends its own request again and again, streamed; half of the prompts
begin alike, and a repeated prompt is found in the prefix cache. At a random moment one of the processes with experts, in turn each of them,
gets SIGKILL, and is started again, as its supervisor would do, after a moment. An answer is lost where its stream ends with an error or
without an end, and wrong where its text is another.

Of each loss a line says: `silence`, the longest time without a token on any stream, from the signal until tokens come again; `gap`, the
seconds that the attention side's `/metrics` has for it, the most of those killed together; `cached`, tokens of prompts that were found in
the prefix cache since the loss before, of those that were found there when each prompt came for the second time, undisturbed; `pages`,
those that hold something of the cache, before and after: those of running requests come and go, so that half may be missing. Each prompt
must be found in the cache as far as it was undisturbed, and no request preempted.

What stands behind `--` are more options of `dsjax serve`, for both sides.

`--json FILE` writes `{"losses": [{"processes", "silence", "gap", "cached", "pages"}], "answers", "lost", "wrong", "cache_lost",
"pages_left", "cached", "expert_metrics"}`. Exits 1 where an answer was lost or wrong, something of the cache has gone, or a page is left.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from loss_check import LossCheck, exit_on_sigterm, flags_of, loss_parser, run_check
from processes import Processes, free_port
from streaming_sessions import WORDS, Seen
from worded_checkpoint import write_worded_checkpoint

EXPERTS = 32


def main() -> int:
    """Run what was asked for."""
    parser = loss_parser(__doc__, tokens=32, patience=300)
    parser.add_argument("--processes", type=int, default=1, help="with experts; 0: both sides are in one process")
    parser.add_argument("--attention-mesh", default="dp=2")
    parser.add_argument("--attention-processes", type=int, default=1)
    parser.add_argument("--expert-devices", type=int, help="default: four, or two of each process")
    args = parser.parse_args()
    if args.losses and not args.processes:
        parser.error("--processes 0 has no process that could be killed without the others; give --losses 0")
    if args.at_once > max(1, args.processes):
        parser.error(f"--at-once {args.at_once} of {args.processes} processes")
    if args.attention_processes > 1 and not args.processes:
        parser.error("--processes 0 has both sides in one process; give --attention-processes 1")
    args.expert_devices = args.expert_devices or (2 * args.processes if args.processes > 1 else 4)
    exit_on_sigterm()
    found = run_check(
        lambda folder: Processes(commands(args, write_worded_checkpoint(folder)), stuck=600),
        lambda processes: Check(patience=args.patience, progress=args.progress, args=args, processes=processes),
        args.logs,
    )
    return 1 if any(found[name] for name in ("lost", "wrong", "cache_lost", "pages_left")) else 0


def commands(args: argparse.Namespace, model: Path) -> list[list[str]]:
    """The command of the attention side, of each process with experts, and of the attention side's other processes."""
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
    base = [sys.executable, "-m", "dsjax.serve", "--batch-invariant", *args.serve, *flags_of(options)]
    if not args.processes:
        return [base]
    addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(args.processes))
    base += ["--afd-address", addresses]
    of_experts = [[*base, "--afd-role", "expert", "--afd-server-rank", str(rank)] for rank in range(args.processes)]
    of_attention, count = [[*base, "--afd-role", "attention"]], args.attention_processes
    if count > 1:
        group = [*of_attention[0], "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
        of_attention = [[*group, "--process-id", str(index)] for index in range(count)]
    return [of_attention[0], *of_experts, *of_attention[1:]]


@dataclass(kw_only=True)
class Check(LossCheck):
    """The sessions, and what is done to the processes under them.

    cache_lost: what of the cache has gone, in words. once: by session, tokens of its prompt that were in the prefix cache when it came
    undisturbed for the second time. found_tokens, known_tokens: of all answered prompts, those that were there, and those that should be.
    """

    cache_lost: list[str] = field(default_factory=list)
    once: list[int] = field(default_factory=list)
    found_tokens: int = 0
    known_tokens: int = 0

    def draw_requests(self) -> list[dict]:
        """Draw requests that are greedy, drawn with a seed, or with penalties; every second prompt begins like others."""
        beginning = " ".join(self.rng.choices(WORDS, k=8))
        kinds = [{"temperature": 0}, {"temperature": 1}, {"temperature": 0, "repetition_penalty": 1.3}]
        requests = []
        for index in range(self.args.sessions):
            request = self.request(index, (3, 6), kinds, beginning if index % 2 else "")
            # One DP rank has a session's pages.
            request |= {"stream_options": {"include_usage": True}, "prompt_cache_key": f"session-{index}"}
            requests.append(request | ({"seed": index} if request["temperature"] else {}))
        return requests

    async def answer_undisturbed(self) -> Sequence[str]:
        """Have each request answered twice, to know how much of its prompt is cached the second time."""
        expected = await super().answer_undisturbed()
        seen = [Seen() for _ in expected]
        again = await asyncio.gather(*map(self.ask, self.requests, seen))
        self.once = [one.usage["prompt_tokens_details"]["cached_tokens"] for one in seen]
        self.say(f"{len(expected)} undisturbed answers, twice; {sum(self.once)} tokens of prompts were cached")
        self.wrong += [index for index, pair in enumerate(zip(expected, again, strict=True)) if len(set(pair)) > 1]
        return expected

    async def disturb(self) -> None:
        """Kill processes with experts, in turn each of them, whenever as many answers have come as there are sessions."""
        sessions = len(self.requests)
        if not self.args.losses:
            await self.until(lambda: self.have_answered(4 * sessions))
        for number in range(self.args.losses):
            await self.until(lambda enough=self.answers + sessions: self.have_answered(enough))
            ranks = [(number + k) % self.args.processes for k in range(self.args.at_once)]
            self.losses.append(await self.lose(ranks))
            self.say(f"{number + 1}: {json.dumps(self.losses[-1])}; {self.standing}")

    def found(self) -> dict[str, object]:
        """What is known so far."""
        return super().found() | {"cache_lost": self.cache_lost, "cached": [self.found_tokens, self.known_tokens]}

    async def found_at_the_end(self) -> dict[str, object]:
        """What is known when no session has a request under way."""
        of_experts = [await self.of_experts(rank) for rank in range(self.args.processes)]
        return await super().found_at_the_end() | {"expert_metrics": of_experts}

    async def lose(self, ranks: list[int]) -> dict:
        """Kill processes with experts, and start them again."""
        await asyncio.sleep(self.rng.uniform(1, 4))
        pages, preempted = await self.pages(), await self.metric("vllm:num_preemptions_total")
        before = self.found_tokens, self.known_tokens
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
        found["cached"] = [self.found_tokens - before[0], self.known_tokens - before[1]]
        found["pages"] = [pages, pages_after]
        # Those of running requests come and go.
        if pages_after < pages / 2:
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
        """Read how many seconds the last loss of each of these processes took."""
        samples = await self.samples("dsjax_expert_process_last_gap_seconds")
        return [value for labels, value in samples if any(f'expert_process="{rank}"' in labels for rank in ranks)]

    def answered(self, index: int, seen: Seen) -> None:
        """Count what of a session's prompt was cached."""
        cached = seen.usage["prompt_tokens_details"]["cached_tokens"]
        self.found_tokens += cached
        self.known_tokens += self.once[index]
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
