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
    fingerprint: str  # see `fingerprint_of`
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
        server = body["base_url"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot go on from {path}: {why_unreadable(error)}; give another --results") from error
    if server == base_url:
        return results
    if fresh:
        return {}
    raise UserError(f"{path} has results of {server}, and --base-url is {base_url}; give another --results, or --fresh")


def fingerprint_of(measurement: Measurement, bed: TestBed) -> str:
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
        """`failing` or `warning`: the worse of the criterion's further bounds that a missed value violates; otherwise None."""
        return None if self.verdict != "missed" or self.value is None else self.criterion.grade(self.value)

    @property
    def verdict_text(self) -> str:
        """The verdict with its grade and reason, for the console."""
        return self.verdict + (f" ({self.grade})" if self.grade else "") + (f": {self.reason}" if self.reason else "")


def judge(criterion: Criterion, result: Result | None) -> Judged:
    """Compare a measurement's value with a criterion's bound. result: of the measurement; None if not measured yet."""
    if result is None or result.measured is None:
        return Judged(criterion, "not tested", reason="not measured yet" if result is None else result.reason)
    value = result.measured.values.get(criterion.value_name)
    if value is None:
        unexplained = "not tested", "the measurement gave no such value"
        verdict, why = result.measured.absent.get(criterion.value_name, unexplained)
        return Judged(criterion, verdict, reason=why)
    return Judged(criterion, "met" if criterion.is_met_by(value) else "missed", value)


def worst(judged: Iterable[Judged]) -> Verdict:
    """Return the worst verdict: missed, then not tested, then met."""
    verdicts = {item.verdict for item in judged}
    return next((verdict for verdict in ("missed", "not tested") if verdict in verdicts), "met")


def exit_status(judged: Sequence[Judged]) -> int:
    """Return 0 if all criteria are met, 3 if one is missed, 4 if none is missed but one is not tested."""
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
    """Run every measurement of a checklist that `results` lacks or has without values, and put its result there.

    First drop results whose fingerprint has changed. fresh: run the measurements that have values too.
    say: called with each line of progress. on_result: called before the first measurement, and after each.
    """
    fingerprints = {name: fingerprint_of(measurement, bed) for name, measurement in checklist.measurements.items()}
    for name, fingerprint in fingerprints.items():
        if name in results and results[name].fingerprint != fingerprint:
            del results[name]
    on_result()
    todo = [name for name in fingerprints if fresh or name not in results or results[name].measured is None]
    if done := len(fingerprints) - len(todo):
        say(f"{done} of {len(fingerprints)} measurements are done already; --fresh measures them again")
    for number, name in enumerate(todo, 1):
        left = sum(expected_seconds(checklist.measurements[other], bed) for other in todo[number - 1 :])
        measurement = checklist.measurements[name]
        say(f"{number} of {len(todo)}: {measurement.title} ({name}); {time_text(left)} left")
        results[name] = await _attempt(measurement, fingerprints[name], bed)
        if results[name].measured is None:
            say(f"  not tested: {results[name].reason}")
        on_result()


def expected_seconds(measurement: Measurement, bed: TestBed) -> float:
    """Return the estimated duration of a measurement; 0 if it cannot run."""
    return 0.0 if measurement.why_not(bed) is not None else measurement.expected_seconds()


def time_text(seconds: float) -> str:
    """Format a duration, such as `1 h 5 min`, `2 min 3 s` or `4 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


async def _attempt(measurement: Measurement, fingerprint: str, bed: TestBed) -> Result:
    """Run a measurement, or say why it cannot run."""
    started, start = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    measured, reason = None, measurement.why_not(bed)
    if reason is None:
        try:
            measured = await measurement.measure(bed)
        except NotTestedError as error:
            reason = str(error)
    seconds = time.monotonic() - start
    return Result(measurement.KIND, measurement.title, fingerprint, started, seconds, measured, reason or "")
