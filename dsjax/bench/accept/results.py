"""Run the outstanding measurements, save their results in a folder so that a run can resume, and judge the criteria."""

import dataclasses
import datetime
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.bench.accept.criteria import Checklist, Criterion
from dsjax.bench.accept.kinds.kind import Measured, Measurement, Verdict
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.errors import UserError, why_unreadable

FORMAT = "dsjax accept 1"
REPORT = "report.json"
MISSED, NOT_TESTED = 3, 4


@dataclass
class Result:
    """Outcome of one measurement, completed or attempted."""

    kind: str  # the measurement's
    title: str  # the measurement's
    fingerprint: str  # of everything that the values depend on
    started: str  # UTC, ISO 8601
    seconds: float  # duration
    measured: Measured | None  # None if it could not be measured
    reason: str = ""  # why it could not be measured

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        about = {name: value for name, value in vars(self).items() if name != "measured"}
        return about | {"tested": self.measured is not None} | dataclasses.asdict(self.measured or Measured())

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Result":
        """Rebuild a result from the output of `to_json`."""
        measured = None
        if body["tested"]:
            absent = {name: (verdict, why) for name, (verdict, why) in body["absent"].items()}
            measured = Measured(dict(body["values"]), absent, list(body["notes"]), body["samples"])
        names = [f.name for f in dataclasses.fields(cls) if f.name != "measured"]
        return cls(measured=measured, **{name: body[name] for name in names})


def read_results(folder: Path, base_url: str, *, fresh: bool) -> dict[str, Result]:
    """Return the results saved in a folder, by measurement name. fresh: ignore another server's report instead of raising.

    Raises:
        UserError: the report cannot be read, or belongs to another server.
    """
    path = folder / REPORT
    if not path.exists():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict):
            raise ValueError("it is no report of dsjax accept")
        if body.get("format") != FORMAT:
            raise ValueError(f"its format is {body.get('format')!r}, expected {FORMAT!r}")
        results = {name: Result.from_json(result) for name, result in body["measurements"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot go on from {path}: {why_unreadable(error)}; give another --results") from error
    if body["base_url"] == base_url:
        return results
    if fresh:
        return {}
    raise UserError(
        f"{path} has results of {body['base_url']}, and --base-url is {base_url}; give another --results, or --fresh"
    )


def fingerprint(measurement: Measurement, bed: TestBed) -> str:
    """Return a hash of everything a measurement's values depend on: fields, server, request options, hooks and files."""
    o = bed.server.options
    server_options = [o.endpoint, o.ignore_eos, o.extra_body, o.temperature, o.prompt_form, o.request_timeout]
    parts = {
        "kind": measurement.KIND,
        "fields": dataclasses.asdict(measurement),
        "server": [bed.server.url, bed.server.facts.model, *server_options],
        "others": measurement.depends_on(bed),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Judged:
    """A criterion with its verdict."""

    criterion: Criterion
    verdict: Verdict
    value: float | None = None  # None if not measured
    reason: str = ""  # why the value is None

    @property
    def grade(self) -> str | None:
        """Grade (`warning` or `failing`) of a missed value; None if it violates neither bound or was not missed."""
        return None if self.verdict != "missed" or self.value is None else self.criterion.grade(self.value)

    @property
    def said(self) -> str:
        """The verdict with its grade and reason, for a console."""
        return self.verdict + (f" ({self.grade})" if self.grade else "") + (f": {self.reason}" if self.reason else "")


def judge(criterion: Criterion, result: Result | None) -> Judged:
    """Judge a criterion by its measurement's result. result: None if not measured yet."""
    if result is None or result.measured is None:
        return Judged(criterion, "not tested", reason="not measured yet" if result is None else result.reason)
    value = result.measured.values.get(criterion.value)
    if value is None:
        verdict, why = result.measured.absent.get(criterion.value, ("not tested", "the measurement gave no such value"))
        return Judged(criterion, verdict, reason=why)
    return Judged(criterion, "met" if criterion.is_met_by(value) else "missed", value)


def worst(judged: Iterable[Judged]) -> Verdict:
    """Return the worst verdict: missed, then not tested, then met."""
    verdicts = {item.verdict for item in judged}
    return next((verdict for verdict in ("missed", "not tested") if verdict in verdicts), "met")


def exit_status(judged: Sequence[Judged]) -> int:
    """Return 0 if all are met, 3 if one is missed, 4 if none is missed but one is not tested."""
    return {"met": 0, "missed": MISSED, "not tested": NOT_TESTED}[worst(judged)]


async def run_measurements(
    checklist: Checklist,
    bed: TestBed,
    results: dict[str, Result],
    *,
    fresh: bool,
    say: Callable[[str], None],
    on_result: Callable[[], None],
) -> None:
    """Run every measurement of a checklist that `results` lacks, and add its result.

    First drop results of measurements whose definition, server or options have changed. fresh: repeat measurements that have results.
    say: called with each line of progress. on_result: called before the first measurement, and after each.
    """
    marks = {name: fingerprint(measurement, bed) for name, measurement in checklist.measurements.items()}
    for name, mark in marks.items():
        if name in results and results[name].fingerprint != mark:
            del results[name]
    on_result()
    todo = [name for name in marks if fresh or name not in results or results[name].measured is None]
    if len(todo) < len(marks):
        say(f"{len(marks) - len(todo)} of {len(marks)} measurements are done already; --fresh measures them again")
    for number, name in enumerate(todo, 1):
        left = sum(expected(checklist.measurements[other], bed) for other in todo[number - 1 :])
        measurement = checklist.measurements[name]
        say(f"{number} of {len(todo)}: {measurement.title} ({name}); {time_text(left)} left")
        results[name] = await _result(measurement, marks[name], bed)
        if results[name].measured is None:
            say(f"  not tested: {results[name].reason}")
        on_result()


def expected(measurement: Measurement, bed: TestBed) -> float:
    """Return the estimated seconds of a measurement; 0 if it cannot run."""
    return 0.0 if measurement.why_not(bed) is not None else measurement.expected_seconds()


def time_text(seconds: float) -> str:
    """Format a duration, such as `1 h 5 min`, `2 min 3 s` or `4 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


async def _result(measurement: Measurement, mark: str, bed: TestBed) -> Result:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    zero = time.monotonic()
    reason = measurement.why_not(bed)
    measured = None
    if reason is None:
        try:
            measured = await measurement.measure(bed)
        except NotTestedError as error:
            reason = str(error)
    return Result(measurement.KIND, measurement.title, mark, started, time.monotonic() - zero, measured, reason or "")
