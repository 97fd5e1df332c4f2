"""A run: each measurement in turn that is not done yet, with the time that is left."""

import datetime
import time
from collections.abc import Callable

from dsjax.bench.accept.criteria import Checklist
from dsjax.bench.accept.errors import NotTestedError
from dsjax.bench.accept.kinds import KINDS
from dsjax.bench.accept.kinds.kind import Measured, Measurement
from dsjax.bench.accept.results import Result, Results, fingerprint
from dsjax.bench.accept.test_bed import TestBed

_KIND_NAMES = {kind: name for name, kind in KINDS.items()}


async def run_measurements(
    checklist: Checklist,
    bed: TestBed,
    results: Results,
    *,
    fresh: bool,
    say: Callable[[str], None],
    on_result: Callable[[], None],
) -> None:
    """Make every measurement of a checklist that `results` does not hold, and add it there.

    What `results` holds of a measurement that was defined or asked otherwise is forgotten first: it says nothing of this checklist.

    Args:
        checklist: what is measured.
        bed: what with.
        results: what was measured before.
        fresh: measure again what `results` holds.
        say: called with each line that tells the user how far it is.
        on_result: called before the first measurement, and after each.
    """
    marks = {name: fingerprint(_KIND_NAMES[type(one)], one, bed) for name, one in checklist.measurements.items()}
    for name, mark in marks.items():
        if name in results.by_name and results.by_name[name].fingerprint != mark:
            del results.by_name[name]
    on_result()
    todo = [name for name in checklist.measurements if fresh or not results.done(name, marks[name])]
    if len(todo) < len(marks):
        say(f"{len(marks) - len(todo)} of {len(marks)} measurements are done already; --fresh measures them again")
    for number, name in enumerate(todo, 1):
        left = sum(expected(checklist.measurements[other], bed) for other in todo[number - 1 :])
        one = checklist.measurements[name]
        say(f"{number} of {len(todo)}: {one.title} ({name}); {time_text(left)} left")
        results.by_name[name] = await _result(one, marks[name], bed)
        if results.by_name[name].measured is None:
            say(f"  not tested: {results.by_name[name].reason}")
        on_result()


def expected(measurement: Measurement, bed: TestBed) -> float:
    """Seconds that a measurement takes; none where it cannot be made."""
    return 0.0 if measurement.why_not(bed) is not None else measurement.expected_seconds()


def time_text(seconds: float) -> str:
    """A time as people say it."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


async def _result(measurement: Measurement, mark: str, bed: TestBed) -> Result:
    started, zero = datetime.datetime.now(datetime.UTC), time.monotonic()
    reason = measurement.why_not(bed)
    measured: Measured | None = None
    if reason is None:
        try:
            measured = await measurement.measure(bed)
        except NotTestedError as error:
            reason = str(error)
    return Result(
        kind=_KIND_NAMES[type(measurement)],
        title=measurement.title,
        fingerprint=mark,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - zero,
        measured=measured,
        reason=reason or "",
    )
