"""Where the time of a decode step goes, by part of the model.

    python tools/profile_step.py --mesh dp=1 --rows 32 --context 160
    python tools/profile_step.py --mesh dp=32 --rows 8 --context 160
    python tools/profile_step.py --mesh dp=32 --rows 1 --ranks 1     # one user
    python tools/profile_step.py --mesh dp=1 --rows 32 --constant-placement      # what tables of places that are data cost
    python tools/profile_step.py --mesh dp=1 --rows 32 --compiler-options        # what the engine's options of the compiler save and cost

Runs the engine's own compiled step under JAX's profiler and adds up the operations' times by the named scope they come
from. The context grows by one token a step, as in decoding. On emulated devices more threads than cores run, and an
operation's time includes waiting for a core; the shares are then what to read, and collectives are shown apart because
most of their time is waiting for the last device.

Beside each part of a V3 model stands the time that its weights, its cache and its multiply-adds take at these cores' own rates, and the
share of the part's time that the larger of reading and multiplying is. Both rates are measured in the run: that of multiplying on a
matrix that the caches hold, that of reading on as many bytes as the whole step reads. Nothing can be faster than either.

With ``--constant-placement`` nothing is profiled: the step runs by turns with another one that differs in one thing, the places of
the experts, which are constants of that program. Where nothing is redundant, this difference is what tables that balancing could
change cost those who do not use it. With ``--compiler-options`` the other step is compiled with XLA's own options.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import gzip
import json
import re
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.config import ModelConfig
from dsjax.engine.device.process import cache_folder
from dsjax.kernels.table import choose_kernels
from dsjax.model.mla_costs import mla_cost, weight_values
from dsjax.model.parameter_counts import parameter_counts
from sharding.emulation import emulate_devices
from sharding.mesh import MeshSpec

SCOPES = ("mla_project", "cache_write", "attend", "mla_output", "router", "experts", "mlp", "head")
COLLECTIVE = re.compile(r"all[-_]gather|reduce[-_]scatter|all[-_]to[-_]all|all[-_]reduce|collective")
WARM, TRACED = 3, 5


def main() -> None:
    """Profile one step and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32, help="requests of each DP rank")
    parser.add_argument("--context", type=int, default=160, help="tokens before the one that is decoded")
    parser.add_argument("--ranks", type=int, help="DP ranks that have requests; default: all")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dispatch", default="auto")
    parser.add_argument(
        "--constant-placement", action="store_true", help="compare with a step that has places as constants"
    )
    parser.add_argument(
        "--compiler-options", action="store_true", help="compare with a step that is compiled with XLA's own options"
    )
    args = parser.parse_args()
    emulate_devices(MeshSpec.parse(args.mesh).num_devices)

    from dsjax import LLM  # after the devices are set

    pages = (args.context + WARM + args.steps + TRACED) // 16 + 1
    llm = LLM(
        args.model, mesh=args.mesh, dispatch=args.dispatch, max_num_seqs=args.rows, cache_tokens=args.rows * pages * 16
    )
    llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(args.rows,))
    run, text = decode_step(llm, args.rows, args.context, pages, args.ranks)
    if args.constant_placement:
        compare_placements(llm, run, args.rows, args.steps)
        return
    if args.compiler_options:
        compare_options(llm, run, args.rows, args.steps)
        return
    seconds, processor, waits = measure(run, args.steps)
    print(
        f"{args.mesh}, {args.rows} rows a rank at context {args.context}: {seconds * 1e3:.2f} ms a step (median of {args.steps})"
    )
    print(f"processor time {processor * 1e3:.2f} ms a step; threads waited {waits:.0f} times")
    work = step_work(
        llm.config, args.rows * (llm.executor.limits.num_ranks if args.ranks is None else args.ranks), args.context
    )
    print_table(trace(run), scopes_of(text), work, *own_rates(sum(read for _, read in work.values())))


def decode_step(llm, rows: int, context: int, pages: int, ranks: int | None):
    """A function that runs one decode step of full rows on so many ranks, and the program's text."""
    from dsjax.engine.contract.commands import Admission, PageChange, RankStep, Sampling, Step, int32s
    from dsjax.engine.device.buckets import Rectangle

    executor = llm.executor
    tokens = np.random.default_rng(0).integers(3, llm.config.vocab_size, rows).tolist()
    sampling, decodes = Sampling(context + 1, 0), int32s(value for slot in range(rows) for value in (slot, pages * 16))
    admissions = [Admission(slot, context, token, sampling) for slot, token in enumerate(tokens)]
    tables = [PageChange(slot, 0, list(range(1 + slot * pages, 1 + (slot + 1) * pages))) for slot in range(rows)]
    admitted, following = RankStep(admissions, tables, decodes, [], []), RankStep([], [], decodes, [], [])
    busy = executor.limits.num_ranks if ranks is None else ranks
    idle = [RankStep([], [], int32s(()), [], [])] * (executor.limits.num_ranks - busy)
    commands = [Step([rank] * busy + idle) for rank in (admitted, following)]

    def run() -> None:
        executor.collect(executor.launch(commands.pop(0) if len(commands) > 1 else commands[0]))

    program = executor.programs.get("step", executor.programs.shape(Rectangle(rows, 1), None), False)
    return run, program.as_text()


def compare_placements(llm, run, rows: int, steps: int) -> None:
    """Steps with the places of experts as data and as constants, by turns; prints both medians, and that of the pairs' differences."""
    import jax

    from dsjax.engine.device import step_programs
    from dsjax.engine.device.buckets import Rectangle

    executor = llm.executor
    programs = executor.programs
    shape = programs.shape(Rectangle(rows, 1), None)
    tables, compute = executor.model.placement.tables, step_programs.compute

    def with_constants(step, params, state, packed, *given):
        places = type(state.copies)(*map(jax.numpy.asarray, tables))
        found, *others = compute(step, params, dataclasses.replace(state, copies=places), packed, *given)
        return dataclasses.replace(found, copies=state.copies), *others

    try:
        step_programs.compute = with_constants
        constant = programs.lower_step(shape).compile()
    finally:
        step_programs.compute = compute
    print(f"{llm.args.mesh}, {rows} rows a rank, tables {tables.physical_EC.shape} wide; {steps} steps each, by turns")
    compare(llm, run, steps, {"places as data": programs.get("step", shape, False), "as constants": constant})


def compare_options(llm, run, rows: int, steps: int) -> None:
    """Compile the step as the engine does and with XLA's own options, and run both by turns."""
    from dsjax.engine.device.buckets import Rectangle
    from dsjax.engine.device.compiler_options import compiler_options
    from dsjax.engine.device.process import without_compile_cache

    programs, forms = llm.executor.programs, {}
    for name, options in (("the engine's options", compiler_options("cpu", sums=False)), ("XLA's own", {})):
        lowered = programs.lower_step(programs.shape(Rectangle(rows, 1), None))
        start = time.process_time()
        with without_compile_cache():
            forms[name] = lowered.compile(compiler_options=options)
        print(
            f"{llm.args.mesh}, {rows} rows a rank: compiled with {name} in {time.process_time() - start:.2f} s of a processor"
        )
    compare(llm, run, steps, forms)


def compare(llm, run, steps: int, forms: dict) -> None:
    """Run two forms of the step's program by turns; print both medians, and that of the pairs' differences."""
    programs = llm.executor.programs
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for turn in range(WARM + steps):
        for name in list(forms)[:: 1 if turn % 2 else -1]:  # who comes first changes
            (key,) = [key for key in programs.compiled if key[0] == "step"]
            programs.store.compiled[key] = forms[name]
            start, processor = time.perf_counter(), time.process_time()
            run()
            if turn >= WARM:
                times[name].append((time.perf_counter() - start, time.process_time() - processor))
    one, other = forms
    for place, kind in enumerate(("a step", "its processor time")):
        first, second = (np.array([pair[place] for pair in times[name]]) * 1e3 for name in forms)
        low, median, high = np.quantile(first - second, (0.25, 0.5, 0.75))
        print(
            f"{kind}: {np.median(first):.2f} ms with {one}, {np.median(second):.2f} with {other}; difference of a pair "
            f"{median:+.3f} ms (half of them {low:+.2f} to {high:+.2f})"
        )


def measure(run, steps: int) -> tuple[float, float, float]:
    """Median wall seconds, mean processor seconds, and how often threads of the process went to sleep, of a step."""
    for _ in range(WARM):
        run()
    times, processor, waits = [], time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(steps):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
    return statistics.median(times), (time.process_time() - processor) / steps, waits / steps


def trace(run) -> list[dict]:
    """The profiler's events of a few steps."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(TRACED):
                run()
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def scopes_of(text: str) -> dict[str, str]:
    """Operation name → part of the model, from the metadata in a compiled program's text."""
    found = {}
    for name, path in re.findall(r'%([\w.\-]+) = [^\n]*?metadata=\{op_name="([^"]*)"', text):
        scopes = [scope for part in path.split("/") for scope in SCOPES if part.startswith(scope)]
        found[name] = scopes[0] if scopes else "norms, residuals, embedding"
    return found


def step_work(config: ModelConfig, rows: int, context: int) -> dict[str, tuple[float, float]]:
    """Multiply-adds, and bytes of weights and cache read once, of a decode step's parts, all in float32; none where attention is sparse.

    rows: of all ranks together; each attends to `context` positions in an absorbed form. Of the experts those are read that so many
    tokens choose on average, if each chooses at random.
    """
    if config.index_topk is not None:
        return {}
    layers, experts = config.num_hidden_layers, config.n_routed_experts
    attention = mla_cost(
        config,
        "A_CC_ME",
        rows=rows,
        chunk=1,
        context=context,
        weight_itemsize=4,
        cache_itemsize=4,
        activation_itemsize=4,
    )
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    output = heads * config.v_head_dim * config.hidden_size
    absorbed = heads * rank * (config.qk_nope_head_dim + config.v_head_dim)
    project = weight_values(config, "A_CC_ME") - output - absorbed
    counts, chosen = parameter_counts(config), config.num_experts_per_tok
    read = experts * (1 - (1 - chosen / experts) ** rows)
    mlps = config.num_dense_layers * counts["dense_mlp"] + config.num_moe_layers * counts["shared_experts"]
    router, head = config.num_moe_layers * counts["router"], config.vocab_size * config.hidden_size
    values = {
        "mla_project": layers * project,
        "mla_output": layers * output,
        "mlp": mlps,
        "router": router,
        "head": head,
    }
    work = {part: (float(rows * count), 4.0 * count) for part, count in values.items()}
    cache = attention.attention_flops / 2 + rows * absorbed, attention.cache_read_bytes + 4 * absorbed
    work["attend"] = layers * cache[0], layers * cache[1]
    routed = config.num_moe_layers * counts["expert"]
    work["experts"] = routed * rows * chosen, 4.0 * routed * read
    return work


def own_rates(step_bytes: float) -> tuple[float, float]:
    """Multiply-adds and bytes a second of these cores: with a matrix in the caches, and reading as many bytes as a step does."""
    import jax
    import jax.numpy as jnp

    kernels = choose_kernels("native", "cpu", np.dtype(np.float32), devices=1, cache=cache_folder() / "native")
    rows, matrix = jnp.ones((96, 512)), jnp.ones((1, 512, 512))
    product = jax.jit(lambda rows, matrix: kernels.native.dense(matrix, None, jnp.int32(0), rows))
    multiplying = least_seconds(lambda: jax.block_until_ready(product(rows, matrix)))
    array = np.zeros(max(int(step_bytes), 1 << 20) // 8, np.uint64)
    parts = np.array_split(array, kernels.native.threads)
    with ThreadPoolExecutor(len(parts)) as pool:
        reading = least_seconds(lambda: list(pool.map(np.max, parts)))
    return rows.size * 512 / multiplying, array.nbytes / reading


def least_seconds(run: Callable[[], object], repeats: int = 50) -> float:
    """Seconds of the fastest call."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def print_table(
    events: list[dict],
    scopes: dict[str, str],
    work: dict[str, tuple[float, float]],
    multiply_rate: float,
    read_rate: float,
) -> None:
    """Time and share of each part, and what the cores' rates allow; loops are left out: the trace has their bodies' operations too."""
    total: Counter = Counter()
    for event in events:
        name = event["name"]
        if name in scopes and not re.match(r"while|call|conditional", name):
            total["collectives" if COLLECTIVE.match(name) else scopes[name]] += event["dur"]
    everything = sum(total.values())
    table = Table(
        title=f"these cores: {multiply_rate / 1e9:.0f} G multiply-adds a second, {read_rate / 1e9:.1f} GB/s read of a step's bytes"
    )
    for column in ("part", "ms", "share", "multiplying, ms", "reading, ms", "of the larger"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, microseconds in total.most_common():
        line = [part, f"{microseconds / TRACED / 1e3:.2f}", f"{microseconds / everything:.1%}"]
        if part in work:
            least = work[part][0] / multiply_rate, work[part][1] / read_rate
            line += [f"{seconds * 1e3:.3f}" for seconds in least]
            line.append(f"{max(least) * TRACED * 1e6 / microseconds:.0%}")
        table.add_row(*line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
