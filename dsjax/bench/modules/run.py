"""A run: cases one after another, each made, timed and dropped; an interrupt ends it with what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax

from dsjax.bench.modules.case import ModuleCase, ModuleRow
from dsjax.bench.modules.ceilings import Ceilings
from dsjax.bench.modules.setting import Setting, free_memory
from dsjax.bench.modules.timing import Budget
from dsjax.bench.processes import Agree, alone
from dsjax.hosts.rendezvous import GroupError

MEMORY_SHARE = 0.5
"""Share of the free memory that a case may take: while weights are made they exist twice."""
_TOO_LARGE = "the device's memory does not hold it"


@dataclass(frozen=True)
class Skipped:
    """A case that was not timed, and why."""

    case: ModuleCase
    reason: str


@dataclass
class ModuleResults:
    """What a run found. failure: what went wrong in another process, or on the way to it, and ended the run."""

    rows: list[ModuleRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    interrupted: bool = False
    failure: Exception | None = None

    @property
    def partial(self) -> bool:
        """Whether there are cases that it did not come to."""
        return self.interrupted or self.failure is not None


def run_cases(
    setting: Setting,
    cases: Iterable[ModuleCase],
    ceilings: Ceilings,
    budget: Budget,
    row_limit: float,
    on_start: Callable[[ModuleCase], None] = lambda case: None,
    agree: Agree = alone,
) -> ModuleResults:
    """Time each case in turn. Ctrl-C ends the run; what was done is returned.

    row_limit: seconds that one application may take at the device's ceilings. agree: of the processes that have the same shared cases;
    the others of a case are this process's own.
    """
    found = ModuleResults()
    try:
        for case in cases:
            on_start(case)
            ask = agree if case.shared else alone
            try:
                outcome = _outcome(setting, case, ceilings, budget, row_limit, ask)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                if ask is not alone or not _is_of_memory(error):
                    raise
                outcome = _TOO_LARGE
            if isinstance(outcome, ModuleRow):
                found.rows.append(outcome)
            else:
                found.skipped.append(Skipped(case, outcome))
    except KeyboardInterrupt:
        found.interrupted = True
    except (GroupError, jax.errors.JaxRuntimeError) as error:
        if agree is alone:
            raise
        found.failure = error
    return found


def _outcome(
    setting: Setting, case: ModuleCase, ceilings: Ceilings, budget: Budget, row_limit: float, agree: Agree
) -> ModuleRow | str:
    """What was measured; or why it cannot be, the same in all processes that agree."""
    reason = _first(agree("possible", why_not(setting, case, ceilings, row_limit)))
    if reason:
        return reason
    prepared = None
    try:
        prepared = case.build()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
    reason = _first(agree("built", None if prepared else _TOO_LARGE))
    if reason:
        return reason
    prepared.agree = agree
    prepared.warm_up(budget)
    return ModuleRow(case, prepared.take(budget), prepared.in_device_loop)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def why_not(setting: Setting, case: ModuleCase, ceilings: Ceilings, row_limit: float) -> str | None:
    """A line that says why a case cannot be timed here; None if it can."""
    free = free_memory(setting.step.mesh.devices.flat[0])
    if case.memory > MEMORY_SHARE * free:
        return f"needs {case.memory / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    least = max(case.work.flops / ceilings.flops, case.work.bytes / ceilings.bandwidth)
    if least > row_limit:
        return f"takes at least {least:.0f} s at the device's ceilings, more than --row-limit {row_limit:g}"
    return None
