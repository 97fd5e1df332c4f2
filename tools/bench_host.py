"""What lies between two steps: the gap in which the device waits, the host's work, and what a step takes beside its program.

python tools/bench_host.py --requests 256 --mesh dp=1 dp=32
python tools/bench_host.py --requests 1024 --host-only
python tools/bench_host.py --put --mesh dp=1 dp=32      # what sending a step's inputs costs, beside jax.device_put

The gap runs from the end of a step on all devices to the start of the next one; with two steps in flight it is 0 as long as the
next one was enqueued before. Asynchronous scheduling and `--no-async-scheduling` take turns in one run, on the demo. `bare` is the
time of the same program launched again and again with nothing around it. Host times are the thread's own, the least over the
repeats of the mean over steps, without any device.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from functools import partial

PROMPT, OUTPUT, PAGE = 64, 200, 16


def measure_host(requests: int, ranks: int, prefix_caching: bool) -> dict[str, float]:
    """Mean seconds of planning, writing and entering a step while all requests decode."""
    from dsjax.engine.contract.executor import RankResults, RowResult
    from dsjax.engine.contract.sampling_params import SamplingParams
    from dsjax.engine.schedule.request import Request
    from dsjax.engine.schedule.scheduler import Scheduler
    from dsjax.engine.schedule.scheduler_config import SchedulerConfig
    from dsjax.engine.schedule.step_writer import StepWriter

    rows = -(-requests // ranks)
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * (PROMPT + PAGE),
        prefill_chunk=PROMPT + PAGE,
        max_prefill_rows=rows,
        page_size=PAGE,
        pages_per_rank=2 + rows * (2 + (PROMPT + OUTPUT) // PAGE) * 102 // 100,
        max_model_len=PROMPT + PAGE + OUTPUT,
        prefix_caching=prefix_caching,
    )
    scheduler, writer = Scheduler(config, ranks), StepWriter(ranks, PAGE)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0)
    for index in range(requests):
        prompt = [index] * (PROMPT + index % PAGE)
        scheduler.add(Request(str(index), prompt, len(prompt), params, OUTPUT, 0, frozenset([2])))
    seconds: list[tuple[float, float, float]] = []
    under_way = []
    while scheduler.num_unfinished == requests:
        began = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        writer.write(plan)
        written = time.thread_time()
        under_way.append(plan)
        if len(under_way) < 2:
            continue
        oldest = under_way.pop(0)
        results = [
            RankResults(
                [RowResult((5,)) for _ in rank.decodes],
                [RowResult((5,) if row.sampled else ()) for row in rank.prefills],
            )
            for rank in oldest.ranks
        ]
        computed = time.thread_time()
        scheduler.update(oldest, results)
        entered = time.thread_time()
        if all(not rank.prefills for rank in plan.ranks):
            seconds.append((planned - began, written - planned, entered - computed))
    columns = [statistics.mean(column) for column in zip(*seconds, strict=True)]
    return dict(zip(("plan", "write", "enter"), columns, strict=True))


def print_host(requests: int, ranks: list[int], repeats: int) -> None:
    """Host times with the prefix cache and without."""
    from dsjax.serve.server import tune_interpreter

    tune_interpreter()
    print(f"{requests} running requests, milliseconds of the host a step, all of it while the device computes")
    for count in ranks:
        for prefix_caching in (True, False):
            found = [measure_host(requests, count, prefix_caching) for _ in range(repeats)]
            least = min(found, key=lambda each: sum(each.values()))
            parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in least.items())
            together = 1e3 * sum(least.values())
            print(
                f"{count:>3} ranks, prefix cache {'on ' if prefix_caching else 'off'}: {parts}, together {together:.2f}"
            )


def measure_gaps(mesh: str, requests: int, rounds: int, steps: int) -> None:
    """Gaps, periods and the bare program, by turns. Runs in a process of its own."""
    import jax

    from dsjax import LLM, SamplingParams
    from dsjax.engine.contract.commands import Step
    from dsjax.engine.core import EngineCore

    llm = LLM(mesh=mesh, max_model_len=512, max_num_seqs=-(-requests // _ranks(mesh)), enable_prefix_caching=True)
    executor, found = llm.executor, {True: [], False: []}
    done: list = []
    collect = executor.collect

    def watched(pending):
        if isinstance(pending.command, Step):
            executor.wait(pending)
            done.append(pending)
        return collect(pending)

    executor.collect = watched
    for _ in range(rounds + 1):  # the first one compiles
        for asynchronous in (True, False):
            core = EngineCore(executor, llm.args.scheduler_config(executor.limits), async_scheduling=asynchronous)
            llm.engine.core = core
            params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
            done.clear()
            prompts = [{"prompt_token_ids": [2 + i % 4000] * 8} for i in range(requests)]
            llm.generate(prompts, params)
            decodes = [p for p in done if not any(rank.prefills for rank in p.command.ranks)][2:-2]
            gaps = [max(0.0, b.started - a.ended) for a, b in itertools.pairwise(decodes)]
            periods = [b.ended - a.ended for a, b in itertools.pairwise(decodes)]
            found[asynchronous].append((statistics.median(gaps), statistics.median(periods)))
    shape = decodes[-1].kept.outcomes[0].shape
    command = executor.programs.step(shape)
    packed = jax.device_put(_inputs(executor, decodes[-1]), executor.programs.rows)
    bare = []
    for _ in range(20):  # with one row's inputs again and again: the same work, and nothing around it
        began = time.monotonic()
        executor.device.state, _, found_tokens, *_ = command(executor.params, executor.state, packed)
        jax.block_until_ready(found_tokens)
        bare.append(time.monotonic() - began)
    for name, asynchronous in (("asynchronous", True), ("synchronous", False)):
        gaps, periods = zip(*found[asynchronous][1:], strict=True)
        print(
            f"{mesh:>8}, {requests} running, {name:>12}: gap {1e3 * statistics.median(gaps):7.3f} ms, "
            f"period {1e3 * statistics.median(periods):8.2f} ms, bare program {1e3 * statistics.median(bare):8.2f} ms",
            flush=True,
        )


def measure_put(mesh: str, repeats: int) -> None:
    """Sending one step's rows to the devices of each DP rank, as the engine does it and by ``jax.device_put``. A process of its own."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(mesh)
    emulate_devices(spec.num_devices)

    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from sharding.arrays import RepeatedPut

    rows = NamedSharding(spec.arrange(jax.devices()[: spec.num_devices]), P(spec.batch_axes))
    packed = np.zeros((spec.dp_size, 64), np.int32)
    ways = {"jax.device_put": lambda: jax.device_put(packed, rows), "the engine": partial(RepeatedPut(rows), packed)}
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):
        for name, put in ways.items():
            began = time.thread_time()
            for _ in range(100):
                put()
            least[name] = min(least[name], (time.thread_time() - began) / 100)
    told = ", ".join(f"{name} {1e6 * seconds:.0f} µs" for name, seconds in least.items())
    print(f"{mesh:>8}, a step's rows sent to the devices: {told}", flush=True)


def _inputs(executor, pending):
    """The packed rows of a step that has been computed."""
    from dsjax.engine.device.launch_rows import pack_launch

    outcome, ranks = pending.kept.outcomes[0], len(pending.command.ranks)
    packed = pack_launch(pending.command, outcome.launch, outcome.shape, [[] for _ in range(ranks)], [{}] * ranks)
    rows = outcome.shape.decode_rows[0]
    packed[:, rows : 2 * rows] = (
        512  # the rows have come to their limits; what lies beyond goes to page 0, which nobody reads
    )
    return packed


def _ranks(mesh: str) -> int:
    from sharding.mesh import MeshSpec

    return MeshSpec.parse(mesh).dp_size


def main() -> None:
    """Each mesh in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--mesh", nargs="+", default=["dp=1", "dp=32"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64, help="tokens of each request")
    parser.add_argument("--host-only", action="store_true", help="the scheduler alone, without any device")
    parser.add_argument("--put", action="store_true", help="sending a step's inputs alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child and arguments.put:
        measure_put(arguments.child, arguments.repeats)
        return
    if arguments.child:
        measure_gaps(arguments.child, arguments.requests, arguments.rounds, arguments.steps)
        return
    if not arguments.put:
        print_host(arguments.requests, arguments.ranks, arguments.repeats)
    if arguments.host_only:
        return
    for mesh in arguments.mesh:
        command = [sys.executable, __file__, "--child", mesh, "--requests", str(arguments.requests)]
        command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        command += ["--repeats", str(arguments.repeats), *["--put"] * arguments.put]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
