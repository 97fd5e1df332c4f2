"""Build, time and release one case after another. Ctrl-C ends the run and keeps the results so far."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from dsjax.bench.modules.setting import Ceilings, Setting, free_memory
from dsjax.bench.modules.timing import TOO_NOISY, Budget, PreparedCase, Times
from dsjax.bench.processes import Agree, Results, alone

Sizes = Mapping[str, int | float | str]

MEMORY_SHARE = 0.5
"""Share of the free memory that a case may take: weights exist twice while they are created."""
_TOO_LARGE = "the device's memory does not hold it"


@dataclass(frozen=True)
class ModuleWork:
    """FLOPs (a multiply-add is two) and memory traffic in bytes of one application, counting each weight and value once."""

    flops: float
    weight_bytes: float
    other_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes of one application."""
        return self.weight_bytes + self.other_bytes


@dataclass(frozen=True)
class ModuleCase:
    """A module at one size.

    shared: runs on a mesh, in all processes of a group together; else on one device, in process 0 alone.
    """

    module: str  # its name in the tables and in `--only`
    variant: str  # of implementation or input
    sizes: Sizes  # lookup keys of the row (tokens, rows, chunk, context, experts)
    work: ModuleWork
    memory: int  # bytes that timing it needs
    build: Callable[[], PreparedCase]  # compiles it, with inputs on the device
    shared: bool = False

    @property
    def title(self) -> str:
        """The name that a progress bar shows."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.module} {self.variant} {sizes}".replace("  ", " ")


@dataclass(frozen=True)
class ModuleRow:
    """A timed case."""

    case: ModuleCase
    times: Times
    in_device_loop: bool

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        work = self.case.work
        return {
            "module": self.case.module,
            "variant": self.case.variant,
            "sizes": dict(self.case.sizes),
            "flops": work.flops,
            "weight_bytes": work.weight_bytes,
            "other_bytes": work.other_bytes,
            "in_device_loop": self.in_device_loop,
            **self.times.to_json(),
        }


def run_cases(
    setting: Setting,
    cases: Iterable[ModuleCase],
    ceilings: Ceilings,
    budget: Budget,
    row_limit: float,
    agree: Agree = alone,
) -> Results:
    """Time each case in turn; after Ctrl-C, return the results so far.

    row_limit: maximum seconds of one application at the device's ceilings. agree: over the processes that have the same shared cases;
    this process times the other cases alone.
    """
    results = Results()
    with results.collecting(agree):
        for case in cases:
            case_agree = agree if case.shared else alone
            try:
                outcome = _outcome(setting, case, ceilings, budget, row_limit, case_agree)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                if case_agree is not alone or not _is_out_of_memory(error):
                    raise
                outcome = _TOO_LARGE
            if isinstance(outcome, ModuleRow):
                results.rows.append(outcome)
            else:
                results.skipped.append((case, outcome))
    return results


def _outcome(
    setting: Setting, case: ModuleCase, ceilings: Ceilings, budget: Budget, row_limit: float, agree: Agree
) -> ModuleRow | str:
    """Measure a case, or say why it cannot be measured, the same in all processes that agree."""
    if reason := _first(agree("possible", why_not(setting, case, ceilings, row_limit))):
        return reason
    prepared = None
    try:
        prepared = case.build()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
    if reason := _first(agree("built", None if prepared else _TOO_LARGE)):
        return reason
    prepared.agree = agree
    prepared.warm_up(budget)
    times = prepared.take(budget)
    return TOO_NOISY if times is None else ModuleRow(case, times, prepared.in_device_loop)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def why_not(setting: Setting, case: ModuleCase, ceilings: Ceilings, row_limit: float) -> str | None:
    """Return one line that says why a case cannot be timed here; None if it can."""
    free = free_memory(setting.step.mesh.devices.flat[0])
    if case.memory > MEMORY_SHARE * free:
        return f"needs {case.memory / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    least = max(case.work.flops / ceilings.flops_per_s, case.work.bytes / ceilings.bytes_per_s)
    if least > row_limit:
        return f"takes at least {least:.0f} s at the device's ceilings, more than --row-limit {row_limit:g}"
    return None
