"""`dsjax bench step`: time of a decode step by part of the model. It imports JAX only when it runs."""

from __future__ import annotations

import dataclasses
import glob
import gzip
import json
import re
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dsjax.cli.options import options_of
from dsjax.cli.output import report_console, write_json
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.options import Checked, check_place, option
from dsjax.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from dsjax.llm import LLM

SCOPES = ("mla_project", "cache_write", "attend", "mla_output", "router", "experts", "mlp", "head")
_OTHERS = "norms, residuals, embedding"
_COLLECTIVE = re.compile(r"all[-_]gather|reduce[-_]scatter|all[-_]to[-_]all|all[-_]reduce|collective")
_TRACED = 5
"""Number of steps that the profiler traces."""
_BLOCK = 1_048_573
"""Number of random values that `fill` repeats over the cache: a prime, so that no two pages are equal."""


@dataclass(frozen=True)
class StepOptions(Checked):
    """Options of the step to time, named as in `vllm bench latency`."""

    batch_size: int = option(32, "Number of requests per DP rank.", least=1)
    input_len: int = option(160, "Number of prompt tokens per request.", least=1)
    ranks: int | None = option(None, "Number of DP ranks that have requests. Default: all.", least=1)
    num_iters_warmup: int = option(3, "Number of warm-up steps, which are not counted.", least=0)
    num_iters: int = option(30, "Number of timed steps.", least=1)
    json_file: str | None = option(None, "Also write JSON to this file; - for standard output.", flag="--json")


@options_of(title=lambda kind: None, args=EngineArgs, options=StepOptions)
def step(args: EngineArgs, options: StepOptions) -> None:
    """Time the engine's decode step, and show the time of each part of the model, measured with JAX's profiler.

    The cache has random content. On emulated devices, an operation's time includes waiting for a core, so read the shares. Collectives are
    listed separately, because most of their time is waiting for the last device. `dsjax bench modules` shows what the device can reach for
    each part.
    """
    check_place("--json", options.json_file)
    from dsjax.checkpoint.hub import resolve_config
    from dsjax.config import load_config
    from dsjax.engine.device.mesh_executor import MeshExecutor
    from dsjax.llm import LLM

    rows = options.batch_size
    steps = options.num_iters_warmup + options.num_iters + _TRACED
    config = load_config(resolve_config(args.model))
    page_size, tokens = args.page_size_of(config), options.input_len + steps + 1
    if tokens > (positions := args.max_model_len or config.max_position_embeddings):
        raise UserError(
            f"--input-len and {steps + 1} decoded tokens take {tokens} positions, expected at most {positions}"
        )
    pages = -(-tokens // page_size)
    sizes = {"max_num_seqs": rows, "cache_tokens": rows * pages * page_size}
    llm = LLM(**dataclasses.asdict(dataclasses.replace(args, **sizes)))
    if type(llm.executor) is not MeshExecutor:
        raise UserError("dsjax bench step times one mesh of one process without stages (pp); give such a --mesh")
    ranks = llm.executor.limits.num_ranks
    busy_ranks = min(options.ranks or ranks, ranks)
    run, text = decode_step(llm, rows, options.input_len, pages, busy_ranks)
    times = measure(run, options.num_iters_warmup, options.num_iters)
    parts = part_seconds(trace(run), scopes_of(text))
    llm.shutdown()
    body = {"mesh": args.mesh, "batch_size": rows, "ranks": busy_ranks, "input_len": options.input_len, **times}
    body["part_seconds"] = parts
    show(body, report_console(stderr=options.json_file == "-"))
    if options.json_file:
        write_json(options.json_file, body)


def show(body: dict[str, Any], console: Console) -> None:
    """Print the step's times and a table of its parts."""
    console.print(
        f"{body['mesh']}, {body['batch_size']} requests on each of {body['ranks']} ranks, {body['input_len']} tokens before: "
        f"{body['seconds'] * 1e3:.2f} ms a step (median), {body['processor_seconds'] * 1e3:.2f} ms of processors; "
        f"threads waited {body['thread_waits']:.0f} times",
        highlight=False,
    )
    parts = body["part_seconds"]
    total = sum(parts.values())
    rows = [(part, f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}") for part, seconds in parts.items()]
    console.print(table(None, ("<part", "ms", "share"), rows))


def decode_step(llm: LLM, rows: int, context: int, pages: int, busy_ranks: int) -> tuple[Callable[[], None], str]:
    """Return a function that runs a decode step of full rows on `busy_ranks` ranks, and the program's text.

    Each step adds a token of context. pages: of each request, for all steps.
    """
    from dsjax.engine.contract.commands import Admission, PageChange, RankStep, Sampling, Step, int32s
    from dsjax.engine.device.buckets import Rectangle

    executor = llm.executor
    executor.buckets = dataclasses.replace(executor.buckets, decode=(rows,))
    limits = executor.limits
    tokens = np.random.default_rng(0).integers(3, llm.config.vocab_size, rows).tolist()
    sampling = Sampling(num_prompt_tokens=context + 1, seed=0)
    admissions = [Admission(slot, context, token, sampling) for slot, token in enumerate(tokens)]
    # Page 0 is the null page.
    tables = [PageChange(slot, first=0, pages=_numbers(1, slot, pages)) for slot in range(rows)]
    if limits.window_columns:
        # The window reaches from the page before the context's last token to the last page. Its ring buffer follows the other columns.
        window = range(max(0, context // limits.page_size - 1), pages)
        for slot in range(rows):
            window_pages = _numbers(limits.pages_per_rank + 1, slot, len(window))
            for index, page in zip(window, window_pages, strict=True):
                column = limits.max_pages + index % limits.window_columns
                tables.append(PageChange(slot, first=column, pages=[page]))
    fill(llm)
    position_limit = pages * limits.page_size
    decodes = int32s(value for slot in range(rows) for value in (slot, position_limit))
    rank_step = partial(RankStep, prefills=[], guides=[])
    idle = [rank_step([], [], int32s(()))] * (limits.num_ranks - busy_ranks)
    first_step = Step([rank_step(admissions, tables, decodes)] * busy_ranks + idle)
    later_step = Step([rank_step([], [], decodes)] * busy_ranks + idle)
    executor.collect(executor.launch(first_step))
    # The last two arguments are `scored` and `reports` of `lower_step`.
    program = executor.programs.get("step", executor.programs.shape(Rectangle(rows, 1), None), False, False)
    return lambda: executor.collect(executor.launch(later_step)), program.as_text()


def _numbers(first: int, slot: int, count: int) -> list[int]:
    """Return the page numbers of a slot, if each slot has `count` pages and the first slot's begin with `first`."""
    return list(range(first + slot * count, first + (slot + 1) * count))


def fill(llm: LLM) -> None:
    """Fill the cache with positive random values, so that what is chosen among its entries lies anywhere, as in a real context."""
    import jax
    import jax.numpy as jnp

    executor = llm.executor
    rng = np.random.default_rng(0)
    dtypes = {name: dtype for group in executor.model.cache_groups for name, (_, dtype) in group.arrays.items()}

    def filled(array: jax.Array, dtype: np.dtype) -> jax.Array:
        block = (0.5 + rng.random(_BLOCK, np.float32)).astype(dtype).view(array.dtype)
        repeat = jax.jit(lambda block: jnp.resize(block, array.shape), out_shardings=array.sharding)
        return repeat(block)

    cache = {name: filled(array, dtypes[name]) for name, array in executor.state.cache.items()}
    executor.state = dataclasses.replace(executor.state, cache=cache)


def measure(run: Callable[[], None], warm_up: int, steps: int) -> dict[str, float]:
    """Return a step's median wall seconds, mean CPU seconds, and mean number of times that the process's threads went to sleep."""
    for _ in range(warm_up):
        run()
    times = []
    cpu_start = time.process_time()
    waits_start = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(steps):
        step_start = time.perf_counter()
        run()
        times.append(time.perf_counter() - step_start)
    return {
        "seconds": statistics.median(times),
        "processor_seconds": (time.process_time() - cpu_start) / steps,
        "thread_waits": (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits_start) / steps,
    }


def trace(run: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the profiler's events for `_TRACED` steps."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(_TRACED):
                run()
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def scopes_of(text: str) -> dict[str, str]:
    """Map operation names to parts of the model, using the metadata in a compiled program's text."""
    scopes_by_name = {}
    for name, path in re.findall(r'%([\w.\-]+) = [^\n]*?metadata=\{op_name="([^"]*)"', text):
        scopes = [scope for part in path.split("/") for scope in SCOPES if part.startswith(scope)]
        scopes_by_name[name] = scopes[0] if scopes else _OTHERS
    return scopes_by_name


def part_seconds(events: list[dict[str, Any]], scopes: dict[str, str]) -> dict[str, float]:
    """Return each part's seconds per step, longest first. Loops are excluded because the trace also has the operations in their bodies."""
    total: Counter = Counter()
    for event in events:
        name = event["name"]
        if name in scopes and not re.match(r"while|call|conditional", name):
            total["collectives" if _COLLECTIVE.match(name) else scopes[name]] += event["dur"]
    return {part: microseconds / _TRACED / 1e6 for part, microseconds in total.most_common()}
