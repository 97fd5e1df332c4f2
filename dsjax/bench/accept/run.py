"""A run: each measurement in turn that is not done yet, with the time that is left."""

import datetime
import time
from collections.abc import Callable

from dsjax.bench.accept.criteria import Checklist
from dsjax.bench.accept.hooks import NotTestedError
from dsjax.bench.accept.kinds.kind import Measurement
from dsjax.bench.accept.results import Result, fingerprint
from dsjax.bench.accept.test_bed import TestBed


async def run_measurements(
    checklist: Checklist,
    bed: TestBed,
    results: dict[str, Result],
    *,
    fresh: bool,
    say: Callable[[str], None],
    on_result: Callable[[], None],
) -> None:
    """Make every measurement of a checklist that `results` does not hold, and add it there.

    What `results` holds of a measurement that was defined or asked otherwise is forgotten first: it says nothing of this checklist.
    fresh: measure again what `results` holds. say: called with each line of progress. on_result: called before the first measurement,
    and after each.
    """
    marks = {name: fingerprint(one, bed) for name, one in checklist.measurements.items()}
    for name, mark in marks.items():
        if name in results and results[name].fingerprint != mark:
            del results[name]
    on_result()
    todo = [name for name in marks if fresh or name not in results or results[name].measured is None]
    if len(todo) < len(marks):
        say(f"{len(marks) - len(todo)} of {len(marks)} measurements are done already; --fresh measures them again")
    for number, name in enumerate(todo, 1):
        left = sum(expected(checklist.measurements[other], bed) for other in todo[number - 1 :])
        one = checklist.measurements[name]
        say(f"{number} of {len(todo)}: {one.title} ({name}); {time_text(left)} left")
        results[name] = await _result(one, marks[name], bed)
        if results[name].measured is None:
            say(f"  not tested: {results[name].reason}")
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
    started, zero = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    reason, measured = measurement.why_not(bed), None
    if reason is None:
        try:
            measured = await measurement.measure(bed)
        except NotTestedError as error:
            reason = str(error)
    return Result(measurement.KIND, measurement.title, mark, started, time.monotonic() - zero, measured, reason or "")
