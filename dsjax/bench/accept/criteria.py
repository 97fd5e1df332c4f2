"""`Checklist`: measurements and the criteria that are held against them, from `configs/acceptance/` or a file of the user's."""

import dataclasses
import fnmatch
import importlib.resources
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from dsjax.bench.accept.kinds import KINDS
from dsjax.bench.accept.kinds.kind import Measurement
from dsjax.errors import UserError, check_fields, why_unreadable
from dsjax.options import OptionError

_BOUNDS = {
    "below": lambda value, bound: value < bound,
    "at_most": lambda value, bound: value <= bound,
    "above": lambda value, bound: value > bound,
    "at_least": lambda value, bound: value >= bound,
    "between": lambda value, bound: bound[0] <= value <= bound[1],
}
_SIGNS = {"below": "<", "at_most": "≤", "above": ">", "at_least": "≥"}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Criterion:
    """A value and the bound that it is held against.

    Attributes:
        id: its name.
        measurement, value: which value of which measurement.
        unit: the value's.
        kind, bound: `below`, `at_most`, `above`, `at_least` a number, or `between` two.
        source: where the bound is from.
        warning, failing: bounds beyond which a missed value is called so; None where the plan has none.
        note: what a reader must know.
    """

    id: str
    measurement: str
    value: str
    unit: str
    kind: str
    bound: float | tuple[float, float]
    source: str
    warning: float | None = None
    failing: float | None = None
    note: str = ""

    def is_met_by(self, value: float) -> bool:
        """Whether a value is within the bound."""
        return _BOUNDS[self.kind](value, self.bound)

    def grade(self, value: float) -> str | None:
        """`failing` or `warning` of a value that is beyond that bound; None of any other."""
        for name in ("failing", "warning"):
            limit = getattr(self, name)
            if limit is not None and (value < limit if self.kind in ("above", "at_least") else value > limit):
                return name
        return None

    @property
    def bound_text(self) -> str:
        """The bound as a report shows it."""
        if isinstance(self.bound, tuple):
            if self.bound[0] == self.bound[1]:
                return figure(self.bound[0], self.unit)
            return f"{figure(self.bound[0], '')} to {figure(self.bound[1], self.unit)}"
        return f"{_SIGNS[self.kind]} {figure(self.bound, self.unit)}"


def figure(value: float, unit: str) -> str:
    """A number with its unit, three or four significant digits."""
    shown = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()


@dataclass(frozen=True)
class Checklist:
    """Everything that a file asks for, in its order."""

    name: str
    description: str
    measurements: Mapping[str, Measurement]
    criteria: Sequence[Criterion]

    @property
    def hooks(self) -> list[str]:
        """Names of the hooks that its faults have."""
        return list(dict.fromkeys(m.hook for m in self.measurements.values() if hasattr(m, "hook")))

    def selected(self, only: str | None) -> "Checklist":
        """The part of it that `--only` names: criteria, or measurements with all of theirs.

        Raises:
            OptionError: a word names nothing.
        """
        if only is None:
            return self
        kept: set[str] = set()
        alone: set[str] = set()
        for word in (part.strip() for part in only.split(",")):
            criteria = {c.id for c in self.criteria if fnmatch.fnmatchcase(c.id, word)}
            whole = {name for name in self.measurements if fnmatch.fnmatchcase(name, word)}
            if not criteria and not whole:
                near = ", ".join(self.measurements)
                raise OptionError(
                    f"--only has {word!r}, which names no criterion and no measurement; measurements: {near}"
                )
            kept |= criteria | {c.id for c in self.criteria if c.measurement in whole}
            alone |= whole
        chosen = [c for c in self.criteria if c.id in kept]
        names = alone | {c.measurement for c in chosen}
        measurements = {name: m for name, m in self.measurements.items() if name in names}
        return dataclasses.replace(self, measurements=measurements, criteria=chosen)


def bundled_checklists() -> tuple[str, ...]:
    """Names that `load_checklist` knows: the files of `configs/acceptance`."""
    folder = importlib.resources.files("configs") / "acceptance"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_checklist(name_or_path: str, *, quick: bool = False) -> Checklist:
    """A bundled name (`h20-32`) or a TOML file. quick: with each measurement's `quick` values.

    Raises:
        UserError: no such file; not TOML; something in it that is missing, unknown, or of the wrong kind.
    """
    if name_or_path in bundled_checklists():
        file = importlib.resources.files("configs") / "acceptance" / f"{name_or_path}.toml"
        text = file.read_text(encoding="utf-8")
    else:
        try:
            text = Path(os.path.expanduser(name_or_path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"no criteria {name_or_path!r} ({why_unreadable(error)}); expected a TOML file, or one of "
                f"{', '.join(bundled_checklists())}"
            ) from error
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"criteria {name_or_path!r} is not valid TOML: {error}") from error
    where = f"criteria {name_or_path!r}"
    fields = ("name", "description", "measurements", "criteria")
    check_fields(where, body, fields, fields)
    if not isinstance(body["measurements"], dict) or not isinstance(body["criteria"], list):
        raise UserError(f"{where}: expected tables [measurements.NAME] and [[criteria]]")
    if not body["measurements"]:
        raise UserError(
            f"{where}: it has no measurement, so that nothing could be missed; add a table [measurements.NAME]"
        )
    if not body["criteria"]:
        raise UserError(f"{where}: it has no criterion, so that nothing could be missed; add a table [[criteria]]")
    measurements = {name: _measurement(where, name, one, quick) for name, one in body["measurements"].items()}
    criteria = [_criterion(where, k, one, measurements) for k, one in enumerate(body["criteria"], 1)]
    twice = {c.id for c in criteria if sum(other.id == c.id for other in criteria) > 1}
    if twice:
        raise UserError(f"{where}: several criteria are called {', '.join(sorted(twice))}; give each a name of its own")
    return Checklist(str(body["name"]), str(body["description"]), measurements, criteria)


def _measurement(where: str, name: str, table: Any, quick: bool) -> Measurement:
    where = f"{where}: measurement {name}"
    if not isinstance(table, dict) or table.get("kind") not in list(KINDS):
        found = table.get("kind") if isinstance(table, dict) else table
        raise UserError(f"{where}: kind is {found!r}, expected one of {', '.join(KINDS)}")
    kind = KINDS[table["kind"]]
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "name"}
    given = {key: value for key, value in table.items() if key not in ("kind", "quick")}
    short = table.get("quick", {})
    if not isinstance(short, dict):
        raise UserError(f"{where}: quick is {short!r}, expected a table of fields that are shorter with --quick")
    for values in (given, short):
        for key, value in values.items():
            if key in fields:
                _check_type(where, key, value, hints[key])
    required = [key for key, field in fields.items() if field.default is dataclasses.MISSING]
    check_fields(where, given, fields, required)
    check_fields(f"{where}: quick", short, fields, ())
    made = [
        kind(name=name, **values) for values in (given, given | short)
    ]  # both, so that a mistake in quick shows at once
    return made[quick]


def _check_type(where: str, key: str, value: Any, hint: type) -> None:
    wanted = (int, float) if hint is float else (hint,)
    if isinstance(value, bool) != (hint is bool) or not isinstance(value, wanted):
        raise UserError(f"{where}: {key} is {value!r}, expected {_WORDS[hint]}")
    if hint in (int, float) and not (0 <= value < math.inf):
        raise UserError(f"{where}: {key} is {value!r}, expected 0 or more")


def _criterion(where: str, number: int, table: Any, measurements: Mapping[str, Measurement]) -> Criterion:
    if not isinstance(table, dict):
        raise UserError(f"{where}: criterion {number} is {table!r}, expected a table")
    where = f"{where}: criterion {table.get('id', number)}"
    required = ("id", "measurement", "value", "source")
    check_fields(where, table, (*required, *_BOUNDS, "warning", "failing", "note"), required)
    for name in (*required, "note"):
        if not isinstance(table.get(name, ""), str):
            raise UserError(f"{where}: {name} is {table[name]!r}, expected text")
    bounds = [name for name in _BOUNDS if name in table]
    if len(bounds) != 1:
        raise UserError(f"{where}: found {' and '.join(bounds) or 'no bound'}, expected one of {', '.join(_BOUNDS)}")
    measurement = measurements.get(table["measurement"])
    if measurement is None:
        raise UserError(
            f"{where}: there is no measurement {table['measurement']!r}; there are {', '.join(measurements)}"
        )
    if table["value"] not in measurement.UNITS:
        raise UserError(
            f"{where}: {table['measurement']} gives no {table['value']!r}; it gives {', '.join(measurement.UNITS)}"
        )
    return Criterion(
        table["id"],
        table["measurement"],
        table["value"],
        measurement.UNITS[table["value"]],
        bounds[0],
        _bound(where, bounds[0], table[bounds[0]]),
        table["source"],
        *(_number(where, name, table[name]) if name in table else None for name in ("warning", "failing")),
        table.get("note", ""),
    )


def _bound(where: str, kind: str, bound: Any) -> float | tuple[float, float]:
    if kind != "between":
        return _number(where, kind, bound)
    if not isinstance(bound, list) or len(bound) != 2:
        raise UserError(f"{where}: between is {bound!r}, expected two numbers, [least, most]")
    least, most = (_number(where, kind, each) for each in bound)
    if least > most:
        raise UserError(f"{where}: between is {bound!r}, expected the smaller number first")
    return least, most


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {name} is {value!r}, expected a number")
    return float(value)
