"""`Checklist`: measurements and the criteria that are held against them, from `configs/acceptance/` or a file of the user's."""

import dataclasses
import fnmatch
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from dsjax.bench.accept.kinds import KINDS
from dsjax.bench.accept.kinds.kind import Measurement
from dsjax.errors import UserError, check_fields
from dsjax.options import OptionError
from dsjax.toml_files import check_kind, read_toml

_BOUNDS = {
    "below": ("<", operator.lt),
    "at_most": ("≤", operator.le),
    "above": (">", operator.gt),
    "at_least": ("≥", operator.ge),
    "between": ("", lambda value, bound: bound[0] <= value <= bound[1]),
}


@dataclass(frozen=True)
class Criterion:
    """A value and the bound that it is held against.

    measurement, value: which value of which measurement; unit: the value's. kind, bound: `below`, `at_most`, `above`, `at_least` a
    number, or `between` two. source: where the bound is from. warning, failing: bounds beyond which a missed value is called so; None
    where the plan has none. note: what a reader must know.
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
        return _BOUNDS[self.kind][1](value, self.bound)

    def grade(self, value: float) -> str | None:
        """`failing` or `warning` of a value that is beyond that bound; None of any other."""
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
        ids, names = {c.id for c in self.criteria}, set(self.measurements)
        kept, whole = set(), set()
        for word in (part.strip() for part in only.split(",")):
            named = fnmatch.filter(ids, word), fnmatch.filter(names, word)
            if not any(named):
                measurements = ", ".join(self.measurements)
                raise OptionError(
                    f"--only has {word!r}, which names no criterion and no measurement; measurements: {measurements}"
                )
            kept.update(named[0])
            whole.update(named[1])
        chosen = [c for c in self.criteria if c.id in kept or c.measurement in whole]
        needed = whole | {c.measurement for c in chosen}
        measurements = {name: m for name, m in self.measurements.items() if name in needed}
        return dataclasses.replace(self, measurements=measurements, criteria=chosen)


def load_checklist(name_or_path: str, *, quick: bool = False) -> Checklist:
    """A bundled name (`h20-32`) or a TOML file. quick: with each measurement's `quick` values.

    Raises:
        UserError: no such file; not TOML; something in it that is missing, unknown, or of the wrong kind.
    """
    where, body = f"criteria {name_or_path!r}", read_toml("criteria", "acceptance", name_or_path)
    fields = ("name", "description", "measurements", "criteria")
    check_fields(where, body, fields, fields)
    if not isinstance(body["measurements"], dict) or not isinstance(body["criteria"], list):
        raise UserError(f"{where}: expected tables [measurements.NAME] and [[criteria]]")
    for field, what, table in (
        ("measurements", "measurement", "[measurements.NAME]"),
        ("criteria", "criterion", "[[criteria]]"),
    ):
        if not body[field]:
            raise UserError(f"{where}: it has no {what}, so that nothing could be missed; add a table {table}")
    measurements = {name: _measurement(where, name, one, quick) for name, one in body["measurements"].items()}
    criteria = [_criterion(where, k, one, measurements) for k, one in enumerate(body["criteria"], 1)]
    ids = [c.id for c in criteria]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        raise UserError(f"{where}: several criteria are called {', '.join(twice)}; give each a name of its own")
    return Checklist(str(body["name"]), str(body["description"]), measurements, criteria)


def _measurement(where: str, name: str, table: Any, quick: bool) -> Measurement:
    where = f"{where}: measurement {name}"
    if not isinstance(table, dict) or table.get("kind") not in list(KINDS):
        found = table.get("kind") if isinstance(table, dict) else table
        raise UserError(f"{where}: kind is {found!r}, expected one of {', '.join(KINDS)}")
    kind, short = KINDS[table["kind"]], table.get("quick", {})
    if not isinstance(short, dict):
        raise UserError(f"{where}: quick is {short!r}, expected a table of fields that are shorter with --quick")
    given = {key: value for key, value in table.items() if key not in ("kind", "quick")}
    hints, fields = get_type_hints(kind), [field for field in dataclasses.fields(kind) if field.name != "name"]
    names = [field.name for field in fields]
    check_fields(where, given, names, [field.name for field in fields if field.default is dataclasses.MISSING])
    check_fields(f"{where}: quick", short, names, ())
    for key, value in (*given.items(), *short.items()):
        hint = hints[key]
        check_kind(where, key, value, hint)
        if hint in (int, float) and not 0 <= value < math.inf:
            raise UserError(f"{where}: {key} is {value!r}, expected 0 or more")
    # Both, so that a mistake in quick shows at once.
    return [kind(name=name, **values) for values in (given, given | short)][quick]


def _criterion(where: str, number: int, table: Any, measurements: Mapping[str, Measurement]) -> Criterion:
    if not isinstance(table, dict):
        raise UserError(f"{where}: criterion {number} is {table!r}, expected a table")
    where = f"{where}: criterion {table.get('id', number)}"
    required = ("id", "measurement", "value", "source")
    check_fields(where, table, (*required, *_BOUNDS, "warning", "failing", "note"), required)
    for name in (*required, "note"):
        check_kind(where, name, table.get(name, ""), str)
    bounds = [name for name in _BOUNDS if name in table]
    if len(bounds) != 1:
        raise UserError(f"{where}: found {' and '.join(bounds) or 'no bound'}, expected one of {', '.join(_BOUNDS)}")
    measurement, value, kind = table["measurement"], table["value"], bounds[0]
    if measurement not in measurements:
        raise UserError(f"{where}: there is no measurement {measurement!r}; there are {', '.join(measurements)}")
    units = measurements[measurement].UNITS
    if value not in units:
        raise UserError(f"{where}: {measurement} gives no {value!r}; it gives {', '.join(units)}")
    bound, pair = table[kind], kind == "between"
    if pair and (not isinstance(bound, list) or len(bound) != 2):
        raise UserError(f"{where}: between is {bound!r}, expected two numbers, [least, most]")
    numbers = [(kind, one) for one in (bound if pair else [bound])]
    for name, one in (*numbers, *((name, table[name]) for name in ("warning", "failing") if name in table)):
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise UserError(f"{where}: {name} is {one!r}, expected a number")
    if pair and bound[0] > bound[1]:
        raise UserError(f"{where}: between is {bound!r}, expected the smaller number first")
    others = {name: table[name] for name in (*required, "warning", "failing", "note") if name in table}
    return Criterion(unit=units[value], kind=kind, bound=tuple(bound) if pair else bound, **others)
