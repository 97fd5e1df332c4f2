"""What the server itself costs: processor time of each streamed token, over a device that answers at once.

    python tools/bench_frontend.py --streams 256 --tokens 64
    python tools/bench_frontend.py --endpoint chat --profile cpu.txt
    python tools/bench_frontend.py --api-server-count 2 --step-ms 0

The real server, engine and scheduler, over an executor that sleeps for a step and then gives every row the same token; the client is a
process of its own. Processor time is read, so that what else runs on the machine counts little: of the event loop's thread (text,
JSON, HTTP), of all the server's threads, and of the client. Beside them stands `LLMEngine` alone on the same work, as
`LLM.generate` runs it. Given is the least over the rounds. And counted are the steps of a round: requests that come one after another
take some more than those that are all there from the start.

With `--api-server-count` the server is as many front ends and the engine's process, whose times are told apart: with cores enough,
events a second are bounded by the busiest of them.
"""

import argparse
import asyncio
import cProfile
import multiprocessing
import os
import pstats
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.bench.serve.client import Client, Target, open_session, run
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.records import BenchRequest
from dsjax.config import load_config
from dsjax.engine.async_engine import AsyncEngine
from dsjax.engine.contract.commands import TOKEN_MADE, Command, Step
from dsjax.engine.contract.executor import ExecutorCounts, ExecutorLimits, RankResults, RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.engine import EngineParts, LLMEngine
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.front_ends.engine_server import EngineServer
from dsjax.serve.front_ends.shared_engine import SharedEngine
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.server import Server, bind, bind_shared
from dsjax.serve.serving import Serving

MODELS = Path(__file__).parents[1] / "configs" / "models"
PROMPT = "The quick brown fox jumps over the lazy dog, and nobody knows why. "


class SleepingExecutor:
    """Sleeps for a step, then gives every row `token_id`."""

    max_in_flight = 1

    def __init__(self, args: argparse.Namespace, vocab_size: int, token_id: int, step_seconds: float):
        rows = -(-args.streams // args.ranks)
        self.limits = ExecutorLimits(rows, rows, 64, 16, 2 + rows * 32, args.ranks, 512, vocab_size)
        self._made, self._nothing = RowResult((token_id,)), RowResult()
        self._seconds = step_seconds
        self.steps = 0

    def launch(self, command: Command) -> Command:
        """Nothing to launch."""
        self.steps += isinstance(command, Step)
        return command

    def wait(self, command: Command) -> None:
        """Take a step's time."""
        if isinstance(command, Step):
            time.sleep(self._seconds)

    def collect(self, command: Command) -> list[RankResults]:
        """A token for every row that makes one."""
        return [
            RankResults(
                [self._made] * (len(rank.decodes) // 8),
                [self._made if row.next_token == TOKEN_MADE else self._nothing for row in rank.prefills],
            )
            for rank in command.ranks
        ]

    def counts(self) -> ExecutorCounts:
        """No padding, no compilation, no experts."""
        return ExecutorCounts()

    def shutdown(self) -> None:
        """Nothing to free."""


def make_parts(args: argparse.Namespace, step_seconds: float) -> EngineParts:
    """An engine that writes " the the the"."""
    config = load_config(args.model)
    tokenizer = Tokenizer.from_directory(MODELS / args.model)
    token_id = tokenizer.encode(" the", add_special_tokens=False)[0]
    executor = SleepingExecutor(args, config.vocab_size, token_id, step_seconds)
    limits = executor.limits
    scheduler = SchedulerConfig.from_limits(limits, max_num_batched_tokens=64 + limits.max_rows_decode)
    return EngineParts(executor, tokenizer, scheduler, eos_token_ids=())


def offline(args: argparse.Namespace) -> tuple[float, int]:
    """Processor seconds a token of `LLMEngine` alone, and its steps."""
    engine = LLMEngine(make_parts(args, 0.0))
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    began = time.thread_time()
    for index in range(args.streams):
        engine.add_request(str(index), f"{index}: {PROMPT}", params)
    while engine.has_unfinished():
        engine.step()
    return (time.thread_time() - began) / (args.streams * args.tokens), engine.core.executor.steps


def serve(args: argparse.Namespace, listeners: list[socket.socket], answers: Connection) -> None:
    """Serve until killed; tell, whenever asked, how many steps there were, and the processor times of the event loop's thread, the process
    and its front ends."""
    metrics = Metrics("demo", args.ranks, 512)
    parts, several = make_parts(args, args.step_ms / 1e3), len(listeners) > 1
    kind = SharedEngine if several else AsyncEngine
    serving = Serving(kind(parts), ("demo",), "demo", 512, ServeOptions(), metrics=metrics)
    how = {"shutdown_timeout": 1.0, "log_level": args.log_level, "on_ready": lambda: answers.send("ready")}
    server = EngineServer.over(serving, parts, listeners, **how) if several else Server(serving, **how)
    profile = cProfile.Profile(time.thread_time) if args.profile else None

    def tell() -> None:
        question = answers.recv()
        if question == "end":
            server.handle_exit(15, None)
        elif profile is not None:
            (profile.enable if question == "begin" else profile.disable)()
        links = serving.front_ends.links if several else ()
        answers.send(
            (
                parts.core.executor.steps,
                time.thread_time(),
                time.process_time(),
                *(_processor_seconds(link.process.pid) for link in links),
            )
        )

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_reader(answers.fileno(), tell)
        await type(server).startup(server, sockets)

    server.startup = startup
    server.serve_behind() if several else server.serve_on(listeners[0])
    if profile is not None:
        with open(args.profile, "w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)


def _processor_seconds(pid: int) -> float:
    """Read how long another process has computed; Linux counts in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(args: argparse.Namespace, url: str) -> tuple[float, float]:
    """Stream all requests at once; give the client's processor seconds, and the seconds that passed."""
    async with open_session(None) as session:
        client = Client(session, Target(url, args.endpoint, "demo", ignore_eos=True))
        requests = [BenchRequest(f"{index}: {PROMPT}", 20, args.tokens) for index in range(args.streams)]
        began, started = time.process_time(), time.perf_counter()
        result = await run_load(client, requests, [0.0] * args.streams, None)
    errors = [record.error for record in result.records if record.error is not None]
    if errors:
        sys.exit(f"{len(errors)} of {args.streams} requests failed: {errors[0]}")
    return time.process_time() - began, time.perf_counter() - started


def online(args: argparse.Namespace) -> list[tuple[float, ...]]:
    """For each round: seconds that passed; processor seconds of the client; steps; processor seconds of the event loop's thread, its
    process, each front end."""
    count = args.api_server_count
    listeners = bind_shared("127.0.0.1", 0, count) if count > 1 else [bind("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    spawn = multiprocessing.get_context("fork")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(args, listeners, there))
    server.start()
    here.recv()
    found = []
    for number in range(args.rounds + 1):
        before = _ask(here, "begin")
        client, passed = run(load(args, url))
        after = _ask(here, "pause")
        if number:  # the first one warms up
            found.append((passed, client, *(b - a for a, b in zip(before, after, strict=True))))
    _ask(here, "end")
    server.join(10)
    return found


def _ask(answers: Connection, question: str) -> tuple[float, ...]:
    answers.send(question)
    return answers.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a bundled model with a tokenizer; its weights are not read")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=60.0, help="what the device takes for a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-server-count", type=int, default=1, help="front ends, as of dsjax serve")
    parser.add_argument("--log-level", default="info")
    parser.add_argument(
        "--profile", metavar="FILE", help="write cProfile's table of the event loop's thread; distorts the times"
    )
    args = parser.parse_args()
    # The server is forked: it must not share what offline has filled.
    rounds = online(args)
    tokens = args.streams * args.tokens
    steps = sorted(each[2] for each in rounds)
    passed, client, _, loop, server, *front_ends = (min(column) / tokens * 1e6 for column in zip(*rounds, strict=True))
    alone, steps_alone = min(offline(args) for _ in range(args.rounds))
    print(f"{args.streams} streams of {args.tokens} tokens over {args.ranks} ranks, /v1/{args.endpoint}")
    print("processor time, microseconds a token:")
    print(
        f"  server {server:6.1f}, of it the event loop {loop:.1f}; LLMEngine alone {alone * 1e6:.1f}; client {client:.1f}"
    )
    print(
        f"steps of a round: {steps[0]} to {steps[-1]}, the median {statistics.median(steps):g}; LLMEngine alone {steps_alone}"
    )
    if front_ends:
        whole = sum(front_ends)
        print(f"  front ends together {whole:.1f}; of each {', '.join(f'{each:.1f}' for each in front_ends)}")
        for count in sorted({1, 2, args.api_server_count, 8}):
            bound = 1e6 / max(whole / count, server)
            print(f"  with a core for each process, {count} front ends: at most {bound:,.0f} events/s")
    print(f"events a second, as measured with the client on the same cores: {1e6 / passed:,.0f}")


if __name__ == "__main__":
    main()
