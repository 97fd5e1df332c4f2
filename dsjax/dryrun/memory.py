"""Exact device memory of a running step, and the largest step that fits, both from compiling the step rather than estimating."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs, TooLarge
from dsjax.dryrun.compilation import CompiledExchange, CompiledStep, compile_step
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.expert_programs import staging_bytes
from dsjax.model.parameters import component, device_bytes
from dsjax.model.step import ModelStep
from sharding.host_memory import on_device

_MOST_ROWS = 1 << 16
"""Maximum rows per DP rank in the search for the largest batch."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device."""

    weights: dict[str, int]  # by component
    cache: int  # pages of its DP rank
    # other data that stays on the device between steps: page tables, sampling parameters, token counts, expert placement and, with
    # speculative decoding, drafts and one byte per cache slot
    state: int
    inputs: int  # packed integers of the step's rows
    arguments: int  # of the step's main program, as the compiler counts; including cache and state
    outputs: int  # likewise; including cache and state, which are aliased
    aliased: int  # likewise
    temporaries: int  # likewise
    drafting: int = 0  # non-aliased outputs and temporaries of the draft program; 0 without one
    staging: int = 0  # buffer for experts that move while serving; 0 if experts do not move
    moving: int = 0  # temporaries and non-aliased outputs of the programs that move experts
    host: int = 0  # each device's weights in host memory, not counted in any other field
    windows: int = 0  # the part of `cache` in window pages

    @classmethod
    def of(cls, compiled: CompiledStep) -> DeviceMemory:
        """Return the memory of a compiled step."""
        stats = compiled.main.compiled.memory_analysis()
        host = sum(
            array.size * array.dtype.itemsize for array in compiled.params.values() if not on_device(array.sharding)
        )
        groups = (group for group in compiled.step.cache_groups if group.table == "window")
        windows = {name: compiled.state.cache[name] for group in groups for name in group.arrays}
        return cls(
            weights=device_bytes(compiled.params),
            cache=sum(device_bytes(compiled.state.cache).values()),
            state=state_bytes(compiled.state),
            inputs=4 * compiled.shape.packed_width,
            # The CPU backend has a single memory and counts host arguments among the others.
            arguments=stats.argument_size_in_bytes - (0 if stats.host_argument_size_in_bytes else host),
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            drafting=compiled.drafts.added_bytes if compiled.drafts else 0,
            staging=staging_bytes(compiled.step) if compiled.exchange else 0,
            moving=compiled.exchange.temporaries if compiled.exchange else 0,
            host=host,
            windows=sum(device_bytes(windows).values()),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on a device."""
        return sum(self.weights.values())

    @property
    def persistent(self) -> int:
        """Bytes on the device when a step begins, whether or not its program reads them."""
        return self.weight_bytes + self.cache + self.state + self.inputs + self.staging

    @property
    def total(self) -> int:
        """Peak bytes on the device: weights, cache, state, inputs and staging, plus the most that any one program adds."""
        added = max(self.outputs - self.aliased + self.temporaries, self.drafting, self.moving)
        return max(self.arguments + self.staging, self.persistent) + added


def state_bytes(state: DeviceState) -> int:
    """Return the bytes on each device of the state between steps, without the cache."""
    arrays = jax.tree.leaves(dataclasses.replace(state, cache={}))
    return sum(device_bytes({str(index): array for index, array in enumerate(arrays)}).values())


def parameters_by_component(step: ModelStep) -> dict[str, int]:
    """Return the parameter count of each component: one copy of each logical expert, without block scales and derived parameters."""
    parameters: dict[str, int] = {}
    physical, logical = step.placement.n_physical, step.config.n_routed_experts
    for path, info in step.table.infos.items():
        if not info.count:
            continue
        name = component(path)
        count = info.count
        if name == "routed experts":
            count = count // physical * logical
        parameters[name] = parameters.get(name, 0) + count
    return parameters


@dataclass(frozen=True)
class Fit:
    """Maximum sizes that fit into ``room`` bytes of a device; 0 if not even one fits."""

    room: int
    batch: int  # rows per DP rank at the requested context
    context: int  # tokens per row at the requested batch, in whole pages, at most the model's positions
    cache_tokens: int  # cache slots per DP rank, with a step of the requested batch and context
    compilations: int  # number of steps compiled for the search


def fit(
    args: DryRunArgs,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    memory_bytes: int,
    exchange: CompiledExchange | None = None,
) -> Fit:
    """Search for the largest batch, context and cache independently, with all else from ``args``, in the memory that the engine may use.

    exchange: the already compiled programs that move experts.
    """
    room = int(memory_bytes * args.engine.gpu_memory_utilization)
    compilations = 0
    page = args.engine.page_size_of(config)

    def total(changed: DryRunArgs) -> float:
        nonlocal compilations
        compilations += 1
        try:
            return DeviceMemory.of(compile_step(changed, config, mesh, exchange)).total
        except TooLarge:
            return math.inf

    def with_context(pages: int) -> float:
        return total(dataclasses.replace(args, batch=args.rows, context=pages * page))

    def with_cache(pages: int) -> float:
        return total(dataclasses.replace(args, engine=dataclasses.replace(args.engine, cache_tokens=pages * page)))

    pages = -(-args.row_tokens // page)
    positions = config.max_position_embeddings
    needed = args.rows * pages
    shortest = -(-max(rectangle.chunk for rectangle in (args.decode, args.prefill) if rectangle) // page)
    fitting = (
        largest(lambda rows: total(dataclasses.replace(args, batch=rows)), room, args.rows, most=most, least=least)
        for least, most in reversed(_alike(args.engine.speculation))
    )
    batch = next(filter(None, fitting), 0)
    context = largest(with_context, room, max(pages, shortest), least=shortest, most=positions // page)
    cache = largest(with_cache, room, needed, most=1 << 28)
    return Fit(room, batch, context * page, cache * page, compilations)


def _alike(speculation: SpeculativeConfig | None) -> list[tuple[int, int]]:
    """Return ranges of batch sizes with the same drafts per row, ascending. A larger batch with fewer drafts may need less memory."""
    ranges = speculation.num_speculative_tokens_per_batch_size if speculation else None
    if ranges is None or speculation.measures:
        return [(1, _MOST_ROWS)]
    return [(low, high) for low, high, _ in ranges[:-1]] + [(ranges[-1][0], _MOST_ROWS)]


def largest(size: Callable[[int], float], room: float, start: int, *, most: int, least: int = 1) -> int:
    """Return the largest ``n`` from ``least`` to ``most`` with ``size(n) <= room``; 0 if there is none.

    ``size`` must not decrease with ``n``. If it is linear, like memory, linear extrapolation from the last two sizes finds the
    answer at once and one more call confirms it; otherwise bisection bounds the number of calls.
    """
    low, high = least - 1, most + 1
    tried = []
    guess = min(max(start, least), most)
    calls = 0
    while high - low > 1:
        needed = size(guess)
        calls += 1
        if needed <= room:
            low = guess
        else:
            high = guess
        if math.isfinite(needed):
            tried = [*tried[-1:], (guess, needed)]
        guess = _next_guess(tried, room, low, high, start) if calls < 8 else (low + high) // 2
    return low if low >= least else 0


def _next_guess(tried: list[tuple[int, float]], room: float, low: int, high: int, start: int) -> int:
    """Return a number between `low`, which fits, and `high`, which does not. tried: the last one or two numbers with their sizes."""
    guess = (low + high) // 2
    if len(tried) == 2 and tried[0][1] != tried[1][1]:
        (first, first_size), (second, second_size) = tried
        guess = math.floor(first + (room - first_size) * (second - first) / (second_size - first_size))
        # If the guess is already known to fit, test the next size, to show that it does not.
        guess = low + 1 if guess == low else guess
    elif len(tried) == 1 and tried[0][1] <= room:
        guess = 2 * start
    return min(max(guess, low + 1), high - 1)
