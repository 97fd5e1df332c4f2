"""`Checklist`: measurements and criteria, from `configs/acceptance/`, a user's file, or the predictions of `dsjax plan recipe`."""

import dataclasses
import fnmatch
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from dsjax.bench.accept.kinds import KINDS
from dsjax.bench.accept.kinds.kind import Measurement
from dsjax.bench.accept.kinds.load import LoadMeasurement
from dsjax.errors import UserError, check_fields
from dsjax.options import OptionError
from dsjax.toml_files import convert, read_toml
from sharding.mesh import MeshSpec

_BOUNDS = {
    "below": ("<", operator.lt),
    "at_most": ("≤", operator.le),
    "above": (">", operator.gt),
    "at_least": ("≥", operator.ge),
    "between": ("", lambda value, bound: bound[0] <= value <= bound[1]),
}


@dataclass(frozen=True)
class Criterion:
    """A bound on one value of a measurement."""

    id: str
    measurement: str  # name of the measurement
    value_name: str  # name of its value
    unit: str  # of the value
    kind: str  # `below`, `at_most`, `above`, `at_least` or `between`
    bound: float | tuple[float, float]  # one number, or two for `between`
    source: str  # of the bound
    warning: float | None = None  # further bound that grades a missed value; None if the plan has none
    failing: float | None = None  # likewise
    note: str = ""  # caveat for the report

    def is_met_by(self, value: float) -> bool:
        """Whether a value is within the bound."""
        return _BOUNDS[self.kind][1](value, self.bound)

    def grade(self, value: float) -> str | None:
        """Return the worse of the grades `failing` and `warning` whose bound a value violates; None if it violates neither."""
        is_beyond = operator.lt if self.kind in ("above", "at_least") else operator.gt
        limits = {"failing": self.failing, "warning": self.warning}
        return next((name for name, limit in limits.items() if limit is not None and is_beyond(value, limit)), None)

    @property
    def bound_text(self) -> str:
        """The bound as a report shows it."""
        if not isinstance(self.bound, tuple):
            return f"{_BOUNDS[self.kind][0]} {figure(self.bound, self.unit)}"
        least, most = self.bound
        return figure(most, self.unit) if least == most else f"{figure(least, '')} to {figure(most, self.unit)}"


def figure(value: float, unit: str) -> str:
    """A number with its unit, three or four significant digits."""
    shown = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


@dataclass(frozen=True)
class Checklist:
    """The measurements and criteria of a file, in file order."""

    name: str
    description: str
    measurements: Mapping[str, Measurement]
    criteria: Sequence[Criterion]

    @property
    def hooks(self) -> list[str]:
        """Hook names that the fault measurements use."""
        return list(dict.fromkeys(m.hook for m in self.measurements.values() if hasattr(m, "hook")))

    def selected(self, only: str | None) -> "Checklist":
        """Return the part that `--only` selects: criteria, or measurements with all their criteria. Raises `OptionError`: no match."""
        if only is None:
            return self
        ids = {c.id for c in self.criteria}
        names = set(self.measurements)
        ids_to_keep, whole = set(), set()
        for word in (part.strip() for part in only.split(",")):
            named = fnmatch.filter(ids, word), fnmatch.filter(names, word)
            if not any(named):
                measurements = ", ".join(self.measurements)
                raise OptionError(
                    f"--only has {word!r}, which names no criterion and no measurement; measurements: {measurements}"
                )
            ids_to_keep.update(named[0])
            whole.update(named[1])
        chosen = [c for c in self.criteria if c.id in ids_to_keep or c.measurement in whole]
        needed = whole | {c.measurement for c in chosen}
        measurements = {name: m for name, m in self.measurements.items() if name in needed}
        return dataclasses.replace(self, measurements=measurements, criteria=chosen)


_Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class _Criterion(msgspec.Struct, forbid_unknown_fields=True):
    """A `[[criteria]]` table, with exactly one bound."""

    id: str
    measurement: str
    value: str
    source: str
    below: _Number | None = None
    at_most: _Number | None = None
    above: _Number | None = None
    at_least: _Number | None = None
    between: tuple[_Number, _Number] | None = None
    warning: _Number | None = None
    failing: _Number | None = None
    note: str = ""


class _File(msgspec.Struct):
    name: str
    description: str
    measurements: Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1)]
    criteria: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def load_checklist(name_or_path: str, *, quick: bool = False) -> Checklist:
    """Load a bundled checklist (such as `h20-32`) or a TOML file. quick: use each measurement's `quick` values.

    Raises:
        UserError: no such file; not TOML; a missing or unknown field; a wrong type; no measurements or criteria; a repeated id.
    """
    where = f"criteria {name_or_path!r}"
    file = convert(where, read_toml("criteria", "acceptance", name_or_path), _File)
    measurements = {name: _measurement(where, name, table, quick) for name, table in file.measurements.items()}
    criteria = [_criterion(where, k, table, measurements) for k, table in enumerate(file.criteria, 1)]
    ids = [c.id for c in criteria]
    if twice := sorted({criterion_id for criterion_id in ids if ids.count(criterion_id) > 1}):
        raise UserError(f"{where}: several criteria are called {', '.join(twice)}; give each a name of its own")
    return Checklist(file.name, file.description, measurements, criteria)


def _measurement(where: str, name: str, table: dict[str, Any], quick: bool) -> Measurement:
    where = f"{where}: measurement {name}"
    if table.get("kind") not in list(KINDS):
        raise UserError(f"{where}: kind is {table.get('kind')!r}, expected one of {', '.join(KINDS)}")
    kind = KINDS[table["kind"]]
    short = table.get("quick", {})
    if not isinstance(short, dict):
        raise UserError(f"{where}: quick is {short!r}, expected a table of fields that are shorter with --quick")
    fields = {key: value for key, value in table.items() if key not in ("kind", "quick")} | {"name": name}
    check_fields(f"{where}: quick", short, [field.name for field in dataclasses.fields(kind)], ())
    # Convert both, so that a mistake in `quick` is reported without --quick too.
    return [convert(where, values, kind) for values in (fields, fields | short)][quick]


def _criterion(where: str, number: int, table: dict[str, Any], measurements: Mapping[str, Measurement]) -> Criterion:
    where = f"{where}: criterion {table.get('id', number)}"
    parsed = convert(where, table, _Criterion)
    bounds = {name: bound for name in _BOUNDS if (bound := getattr(parsed, name)) is not None}
    if len(bounds) != 1:
        raise UserError(f"{where}: found {' and '.join(bounds) or 'no bound'}, expected one of {', '.join(_BOUNDS)}")
    if parsed.measurement not in measurements:
        raise UserError(f"{where}: there is no measurement {parsed.measurement!r}; there are {', '.join(measurements)}")
    units = measurements[parsed.measurement].UNITS
    if parsed.value not in units:
        raise UserError(f"{where}: {parsed.measurement} gives no {parsed.value!r}; it gives {', '.join(units)}")
    if parsed.between and parsed.between[0] > parsed.between[1]:
        raise UserError(f"{where}: between is {parsed.between!r}, expected the smaller number first")
    [(kind, bound)] = bounds.items()
    others = {name: getattr(parsed, name) for name in ("source", "warning", "failing", "note")}
    return Criterion(parsed.id, parsed.measurement, parsed.value, units[parsed.value], kind, bound, **others)


_STAYS, _LEAST_SECONDS = {False: 20, True: 3}, {False: 300.0, True: 30.0}
"""Length of the load, with `--quick` (True) and without: multiple of a request's predicted latency, and minimum in seconds."""
_KEPT_UP = 0.9
"""Required share of the offered rate; below 1 because requests in flight at the end are not counted."""


def predicted_checklist(recipe: Mapping[str, Any], *, quick: bool = False) -> Checklist:
    """Return criteria of a recipe (`dsjax.plan.recipe.read_recipe`): rate, TPOT and TTFT of its workload within the predicted intervals.

    If the recipe names no load, use as many sessions as its batches hold. Rate and TPOT have the 90 % intervals of blind predictions,
    TTFT has the interval of the plan's assumptions.

    Raises:
        UserError: the recipe assumes prefix hits or request classes, which the load does not generate.
    """
    work, expected, held = recipe["workload"], recipe["expected"], recipe["calibrated"]
    if work["prefix_hit"] or work["classes"]:
        raise UserError("--recipe has prefix hits or classes of requests, and the load has neither; plan without them")
    rate = work["requests_per_s"] or 0.0
    output = round(work["output_tokens"])
    most = expected["batch_per_dp_rank"] * MeshSpec.parse(expected["mesh"]).dp_size * expected["instances"]
    sessions = 0 if rate else max(1, round(work["concurrency"] or most))
    stay = expected["ttft_s"]["value"] + output * expected["tpot_s"]["value"]
    load = LoadMeasurement(
        name="load",
        title=f"{rate:g} requests a second" if rate else f"{sessions} sessions at once",
        sessions=sessions,
        request_rate=rate,
        seconds=max(_LEAST_SECONDS[quick], _STAYS[quick] * stay),
        input_tokens=round(work["input_tokens"]),
        output_tokens=output,
        spread=0.0,
    )
    blind = "dsjax plan: 90 % interval by {predictions} blind predictions ({by})"
    bounds = {
        "output_tokens_per_s": (held["output_tokens_per_s"], blind.format_map(held["output_tokens_per_s"])),
        "tpot_p50": (held["tpot_s"], blind.format_map(held["tpot_s"])),
        "ttft_mean": (expected["ttft_s"], "dsjax plan: interval of its assumptions, steady state"),
    }
    criteria = [
        Criterion(name, "load", name, load.UNITS[name], "between", (figure["low"], figure["high"]), source)
        for name, (figure, source) in bounds.items()
    ]
    if rate:
        least = _KEPT_UP * rate * output
        name = "output_tokens_per_s"
        criteria[0] = Criterion(name, "load", name, "tokens/s", "at_least", least, "nine tenths of the offered rate")
    criteria.append(Criterion("error_share", "load", "error_share", "", "at_most", 0.0, "every request is answered"))
    about = f"What dsjax plan predicted for {expected['instances']} × {expected['mesh']} of {recipe['model']} on {recipe['cluster']}"
    return Checklist(f"{recipe['model']} on {recipe['cluster']}", about, {"load": load}, criteria)
