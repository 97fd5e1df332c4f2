"""Two processes, a core each: one for prompts and one for tokens, against two that do both, behind Dynamo's frontend at equal load.

    HOME=/root DYNAMO/bin/python tools/bench_separated.py --json FILE         # with the Python that has NVIDIA Dynamo

Prompts are long, and come at random moments (Poisson, the same ones for both deployments) at `--load` of what two aggregated engines could
do by the times of lone steps, which are measured first. The frontend sends a request to each aggregated worker in turn. For both there
are the median and the 99th percentile of the time to the first token (TTFT) and between two tokens (ITL), as clients see them; and beside
them those of the planner's simulation (`dsjax/plan/simulation`: the engine's own scheduler on virtual time, a step's seconds linear in its
prompt tokens and its decodes), with the same requests. Frontend and client run wherever the kernel puts them, beside the workers.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dsjax" / "dynamo")]
from deployment import Frontend, Worker, wait_until

from dsjax.bench.serve.client import Client, Target, open_session
from dsjax.bench.serve.records import BenchRequest
from dsjax.plan.simulation.load import Asked
from dsjax.plan.simulation.service import Decoder, Served, SimulatedEngine

BEGAN = time.monotonic()
STEP_TOKENS = 256
"""Most tokens of prompts that a step computes, in the workers and in the simulation."""
SIDES = {"aggregated": ("agg", "agg"), "separated": ("prefill", "decode")}


def say(what: str) -> None:
    """How far it is, with the seconds since the command began."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {what}", flush=True)


@dataclass(frozen=True)
class LinearPrices:
    """Seconds of a step of one rank: as much for each prompt token, for a step with decodes, and for each of them."""

    prompt_token: float
    step: float
    decode: float

    def seconds(self, ranks) -> float:
        """How long a step takes that computes this."""
        (work,) = ranks
        return self.prompt_token * work.prompts + (self.step + self.decode * work.decodes if work.decodes else 0.0)


class Deployment:
    """Two workers, each on a core of its own, and the frontend."""

    def __init__(self, folder: Path, kind: str, args: argparse.Namespace):
        cores = sorted(os.sched_getaffinity(0))[:2]
        length = args.prompt_tokens + args.output_tokens
        sizes = ["--model", args.model, "--mesh", "dp=1", "--max-model-len", str(length + 64), "--max-num-seqs", "16"]
        sizes += ["--max-num-batched-tokens", str(STEP_TOKENS), "--prefill-chunk", str(STEP_TOKENS)]
        sizes += ["--transfer-host", "127.0.0.1"]
        self.model, self.frontend, self.workers = args.model, Frontend(folder, "round-robin"), []
        for index, mode in enumerate(SIDES[kind]):
            worker = Worker(folder, f"{kind}-{index}", *sizes, "--disaggregation-mode", mode)
            os.sched_setaffinity(worker.process.pid, {cores[index % len(cores)]})
            self.workers.append(worker)

    def wait(self, seconds: float) -> None:
        """Until requests can come.

        Raises:
            SystemExit: they cannot after so many seconds.
        """
        try:
            wait_until(lambda: all(worker.is_ready for worker in self.workers), seconds, "the workers are ready")
            wait_until(lambda: self.frontend.num_workers() == 2, seconds, "the frontend knows both")
            wait_until(lambda: self.frontend.serves(self.model), seconds, "a request is answered")
        except AssertionError as error:
            logs = "\n".join(
                f"{one.log.name}:\n{one.log.read_text()[-2000:]}" for one in (self.frontend, *self.workers)
            )
            raise SystemExit(f"{error}; --start-seconds is how long it may take\n{logs}") from None

    def end(self) -> None:
        """Leave nothing behind."""
        for process in (self.frontend, *self.workers):
            process.process.kill()
            process.process.wait()


def draw(args: argparse.Namespace, count: int, seed: int) -> list[BenchRequest]:
    """Prompts that nobody has cached, within a fifth of the mean length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(int(0.8 * args.prompt_tokens), int(1.2 * args.prompt_tokens) + 1, count)
    most = args.prompt_tokens + 64  # of which the workers are told
    return [
        BenchRequest(rng.integers(16, 250, min(n, most)).tolist(), int(min(n, most)), args.output_tokens)
        for n in lengths
    ]


async def send_all(client: Client, requests: list[BenchRequest], arrivals: list[float]):
    """Each at its moment; the records."""
    zero = time.perf_counter()

    async def one(request, arrival):
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - zero)))
        return await client.send(request, arrival=arrival)

    records = await asyncio.gather(*[one(*pair) for pair in zip(requests, arrivals, strict=True)])
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records


async def measure(url: str, args: argparse.Namespace, rate: float | None):
    """Prices of lone steps, where no rate is given; and the records of the load."""
    async with open_session(None) as session:
        client = Client(session, Target(url, "completions", args.model, ignore_eos=True, timeout=600.0))
        warm = draw(args, 4, args.seed + 1)
        await send_all(client, warm, [0.0] * len(warm))
        prices = None
        if rate is None:
            lone = [(await send_all(client, [one], [0.0]))[0] for one in draw(args, 6, args.seed + 2)]
            eight = await send_all(client, [BenchRequest([20 + i] * 17, 17, 64) for i in range(16)], [0.0] * 16)
            prompt = statistics.median(record.ttft / record.prompt_tokens for record in lone)
            one = statistics.median(gap for record in lone for gap in record.itls)
            many = statistics.median(gap for record in eight for gap in record.itls)  # two workers with eight each
            each = max(0.0, (many - one) / 7)
            prices = LinearPrices(prompt, max(1e-4, one - each), each)
            # A request's share of a worker with eight others beside: its prompt, and an eighth of its steps.
            seconds = prompt * args.prompt_tokens + args.output_tokens * (prices.step / 8 + each)
            rate = 2 * args.load / seconds
            say(f"lone steps: {prices}; {rate:.3g} requests/s")
        gaps = np.random.default_rng(args.seed).exponential(1 / rate, args.requests)
        arrivals = np.cumsum(gaps).tolist()
        requests = draw(args, args.requests, args.seed)
        say(f"{args.requests} requests in about {arrivals[-1]:.0f} s")
        return prices, rate, arrivals, requests, await send_all(client, requests, arrivals)


def play(kind: str, prices: LinearPrices, requests, arrivals, transfer: float = 0.0):
    """TTFT and ITL of the same requests in the planner's simulation."""
    sizes = {"seqs": 16, "step_tokens": STEP_TOKENS, "cache_tokens": 1 << 20, "longest": 1 << 16, "sharing": False}
    engines = [
        SimulatedEngine(prices, 1, one_token=kind == "separated", **sizes) for _ in range(2 - (kind == "separated"))
    ]
    decoders = [Decoder(prices, 1, seqs=16)] if kind == "separated" else []
    until, made, moving = {}, [], []
    events = [(arrival, index) for index, arrival in enumerate(arrivals)]

    def begin(one, now):
        if one not in until and not one.idle:
            until[one] = now + one.begin(now)

    while events or until or moving:
        times = [events[0][0] if events else math.inf, min(until.values(), default=math.inf)]
        times.append(min((when for when, _ in moving), default=math.inf))
        now = min(times)
        if now == times[0]:
            _, index = events.pop(0)
            request = requests[index]
            served = Served(index, Asked(now, request.prompt_tokens, 0, request.output_tokens), now)
            own = engines[index % len(engines)]
            own.add(served, now)
            begin(own, now)
        elif now == times[1]:
            one = min(until, key=until.get)
            del until[one]
            done = one.end(now)
            if decoders and one in engines:
                moving += [(now + transfer, served) for served in done]
            else:
                made += done
            begin(one, now)
        else:
            entry = min(moving, key=lambda pair: pair[0])
            moving.remove(entry)
            decoders[0].add(entry[1], now)
            begin(decoders[0], now)
    gaps = [(seconds, count) for one in decoders or engines for _, seconds, count in one.gaps]
    itl = np.repeat([seconds for seconds, _ in gaps], [count for _, count in gaps])
    return [served.ttft for served in made], itl.tolist()


def row(ttft, itl) -> dict[str, float]:
    """Milliseconds."""
    found = {f"{name} P{q}": float(np.percentile(v, q)) for name, v in (("TTFT", ttft), ("ITL", itl)) for q in (50, 99)}
    return {name: 1e3 * value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--load", type=float, default=0.4, help="share of what two aggregated engines could do")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="in which the workers must be ready")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    console, found, prices, rate = Console(width=120), {}, None, None
    for kind in SIDES:
        with tempfile.TemporaryDirectory(prefix="dsjax-bench-") as folder:
            deployment = None
            try:
                say(f"starting {kind}: two workers and the frontend")
                deployment = Deployment(Path(folder), kind, args)
                deployment.wait(args.start_seconds)
                say("they are ready")
                own, rate, arrivals, requests, records = asyncio.run(measure(deployment.frontend.url, args, rate))
                prices = prices or own
            finally:
                if deployment is not None:
                    deployment.end()
        found[kind] = row([r.ttft for r in records], [gap for r in records for gap in r.itls])
        found[f"{kind}, simulated"] = row(*play(kind, prices, requests, arrivals))
    table = Table(
        "", *found["aggregated"], title=f"ms, {args.requests} prompts of {args.prompt_tokens} tokens, {rate:.3g}/s"
    )
    for kind, values in found.items():
        table.add_row(kind, *(f"{value:,.1f}" for value in values.values()))
    console.print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rate": rate, "ms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
