"""How much fits: the largest batch, context and cache, each found by compiling the step, not by a rule of thumb."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs, TooLarge
from dsjax.dryrun.compilation import CompiledExchange, compile_step
from dsjax.dryrun.memory import DeviceMemory


@dataclass(frozen=True)
class Fit:
    """What fits into ``room`` bytes of a device; 0 where not even one does.

    batch: rows of a DP rank at the asked context. context: tokens of each row at the asked batch, in whole pages, at most the
    model's positions. cache_tokens: slots of a DP rank's cache beside a step of the asked batch and context.
    compilations: how many programs it took.
    """

    room: int
    batch: int
    context: int
    cache_tokens: int
    compilations: int


def fit(
    args: DryRunArgs,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    memory_bytes: int,
    exchange: CompiledExchange | None = None,
) -> Fit:
    """Search each of the three by itself, all else as ``args`` ask, within the share of memory that the engine would use.

    exchange: the programs that move experts, compiled before.
    """
    room, compilations = int(memory_bytes * args.engine.gpu_memory_utilization), 0
    page = args.engine.page_size

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

    pages, positions = -(-args.row_tokens // page), config.max_position_embeddings
    needed = args.rows * pages
    shortest = -(-args.chunk // page)
    batch = largest(lambda rows: total(dataclasses.replace(args, batch=rows)), room, args.rows, most=1 << 16)
    context = largest(with_context, room, max(pages, shortest), least=shortest, most=positions // page)
    cache = largest(with_cache, room, needed, most=1 << 28)
    return Fit(room, batch, context * page, cache * page, compilations)


def largest(size: Callable[[int], float], room: float, start: int, *, most: int, least: int = 1) -> int:
    """The largest ``n`` from ``least`` to ``most`` with ``size(n) <= room``; 0 where there is none.

    ``size`` must not fall as ``n`` grows. Where it grows evenly, as memory does, the line through the last two sizes hits the
    answer at once and one more call confirms it; halving what is left open bounds the calls where it does not.
    """
    low, high, known = least - 1, most + 1, []
    guess, calls = min(max(start, least), most), 0
    while high - low > 1:
        found = size(guess)
        calls += 1
        if found <= room:
            low = guess
        else:
            high = guess
        if math.isfinite(found):
            known = [*known[-1:], (guess, found)]
        guess = _next(known, room, low, high, start, straight=calls < 8)
    return low if low >= least else 0


def _next(known: list[tuple[int, float]], room: float, low: int, high: int, start: int, *, straight: bool) -> int:
    guess = (low + high) // 2
    if straight and len(known) == 2 and known[0][1] != known[1][1]:
        (n, size), (m, other) = known
        guess = math.floor(n + (room - size) * (m - n) / (other - size))
        # On the side that fits: what has to be shown is that one more does not.
        guess = low + 1 if guess == low else guess
    elif straight and len(known) < 2 and known and known[0][1] <= room:
        guess = 2 * start
    return min(max(guess, low + 1), high - 1)
