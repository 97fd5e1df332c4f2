"""A run: cases one after another, each made, timed and dropped; an interrupt ends it with what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax

from dsjax.bench.modules.case import Case, Row
from dsjax.bench.modules.ceilings import Ceilings
from dsjax.bench.modules.setting import Setting, free_memory
from dsjax.bench.modules.timing import Budget

MEMORY_SHARE = 0.5
"""Of the free memory, what a case may take: while weights are made they exist twice."""


@dataclass(frozen=True)
class Skipped:
    """A case that was not timed, and why."""

    case: Case
    reason: str


@dataclass
class Found:
    """What a run found."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    interrupted: bool = False


def run_cases(
    setting: Setting,
    cases: Iterable[Case],
    ceilings: Ceilings,
    budget: Budget,
    row_limit: float,
    on_start: Callable[[Case], None] = lambda case: None,
) -> Found:
    """Time each case in turn. Ctrl-C ends the run; what was done is returned.

    row_limit: seconds that one application may take at the device's ceilings.
    """
    found = Found()
    try:
        for case in cases:
            on_start(case)
            reason = why_not(setting, case, ceilings, row_limit)
            if reason:
                found.skipped.append(Skipped(case, reason))
                continue
            try:
                prepared = case.build()
                prepared.warm_up(budget)
                found.rows.append(Row(case, prepared.take(budget), prepared.in_device_loop))
                del prepared
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
                    raise
                found.skipped.append(Skipped(case, "the device's memory does not hold it"))
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def why_not(setting: Setting, case: Case, ceilings: Ceilings, row_limit: float) -> str | None:
    """A line that says why a case cannot be timed here; None if it can."""
    free = free_memory(setting.step.mesh.devices.flat[0])
    if case.memory > MEMORY_SHARE * free:
        return f"needs {case.memory / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    least = max(case.work.flops / ceilings.flops, case.work.bytes / ceilings.bandwidth)
    if least > row_limit:
        return f"takes at least {least:.0f} s at the device's ceilings, more than --row-limit {row_limit:g}"
    return None
