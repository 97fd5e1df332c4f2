"""Figures: numbers with a range, a kind and a source; and draws, which move every uncertain number within its range.

The planner computes with plain floats. Where it needs a number that nobody knows exactly, it calls `assumed` or `measured`, which return
the middle value, or within ``with drawing(draw)`` the value that the draw has for this name, so that everything that is computed from an
assumption, in however many places and layouts, moves with it. `spread` runs a computation with many draws and gives each result an
interval; the difference of two results has an interval of its own, in which what they share cancels.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import statistics
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from dsjax.toml_files import bundled_text

LEVEL = 0.9
"""Share of the draws that an interval holds. The ends of an assumption's range are taken as its 5 % and 95 % quantiles."""
DRAWS = 30
"""Draws behind an interval of a table: of so many, the second and the last but one lie at either end of an assumption's range.
`dsjax plan compare` takes more."""
TWO_LINES = "{value}\n{low}–{high}"
"""A form of `Figure.text` for cells of a table."""


class Kind(enum.IntFlag):
    """Where a number is from; a result has the kinds of everything that went into it."""

    EXACT = 1
    COMPILED = 2
    MEASURED = 4
    ASSUMPTION = 8

    def words(self) -> str:
        """`measured + assumption`; exact arithmetic is named only where nothing else went in."""
        return " + ".join(kind.name.lower() for kind in Kind if kind in self and kind is not Kind.EXACT) or "exact"


class Figure(float):
    """A float with `low ≤ value ≤ high`, its kinds, and for an input its name and source. Arithmetic on it gives plain floats."""

    __slots__ = ("high", "kinds", "low", "name", "source", "unit")

    def __new__(
        cls,
        value: float,
        low: float | None = None,
        high: float | None = None,
        kinds: int = Kind.EXACT,
        *,
        name: str = "",
        unit: str = "",
        source: str = "",
    ) -> Figure:
        """Make a figure; without `low` and `high` it has no range."""
        figure = super().__new__(cls, value)
        figure.low = float(value) if low is None else low
        figure.high = float(value) if high is None else high
        figure.kinds, figure.name, figure.unit, figure.source = int(kinds), name, unit, source
        return figure

    def __getnewargs_ex__(self) -> tuple[tuple, dict[str, str]]:
        return (float(self), self.low, self.high, self.kinds), {
            "name": self.name,
            "unit": self.unit,
            "source": self.source,
        }

    @property
    def value(self) -> float:
        """The middle, as a plain float."""
        return float(self)

    def text(self, factor: float = 1.0, digits: int = 0, form: str = "{value} [{low} … {high}]") -> str:
        """Write the value and both ends, multiplied by `factor`, with so many decimals."""
        ends = {"value": float(self), "low": self.low, "high": self.high}
        return form.format(**{name: f"{end * factor:,.{digits}f}" for name, end in ends.items()})

    def to_json(self) -> dict[str, Any]:
        """`{"value", "low", "high", "kind"}`, and `unit` where there is one."""
        fields: dict[str, Any] = {"value": float(self), "low": self.low, "high": self.high}
        fields["kind"] = Kind(self.kinds).words()
        return {**fields, "unit": self.unit} if self.unit else fields


def through(figure: float, function: Callable[[float], float]) -> float:
    """Apply a monotone function to a value, and to both ends of a figure."""
    if not isinstance(figure, Figure):
        return function(figure)
    low, high = sorted((function(figure.low), function(figure.high)))
    return Figure(function(float(figure)), low, high, figure.kinds)


def as_json(figure: float) -> dict[str, Any]:
    """`Figure.to_json`; a plain float is an exact figure."""
    return (figure if isinstance(figure, Figure) else Figure(figure)).to_json()


class Draw:
    """Where each assumption lies within its range: -1 at its low end, 0 at its middle value, 1 at its high end.

    seen: the figures that a computation asked for, by name.
    """

    def __init__(self, places: Mapping[str, float] | Callable[[str], float] | None = None):
        self._place = places if callable(places) else lambda name: (places or {}).get(name, 0.0)
        self.seen: dict[str, Figure] = {}

    @classmethod
    def number(cls, number: int, of: int) -> Draw:
        """One of a Latin hypercube of draws. The same number has the same places in every computation."""
        return cls(lambda name: _places(name, of)[number])

    def of(self, figure: Figure) -> float:
        """The value of an assumption in this draw."""
        self.seen.setdefault(figure.name, figure)
        place = self._place(figure.name)
        if place == 0.0 or figure.low == figure.high:
            return figure
        end = figure.high if place > 0 else figure.low
        return float(figure) + (end - float(figure)) * abs(place)


@functools.cache
def _places(name: str, draws: int) -> tuple[float, ...]:
    """A normal variable's quantiles, in an order of the name's own, in units of the distance to its 5 % and 95 % quantiles."""
    normal, end = statistics.NormalDist(), statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    order = np.random.default_rng(zlib.crc32(name.encode())).permutation(draws)
    return tuple(max(-1.0, min(1.0, normal.inv_cdf((float(rank) + 0.5) / draws) / end)) for rank in order)


_DRAW: ContextVar[Draw | None] = ContextVar("draw", default=None)


@contextlib.contextmanager
def drawing(draw: Draw) -> Iterator[Draw]:
    """Within it, `assumed` and `measured` give what the draw has."""
    before = _DRAW.set(draw)
    try:
        yield draw
    finally:
        _DRAW.reset(before)


def is_drawing() -> bool:
    """Whether a draw is at hand: whoever only wants the middle value need not work out a range."""
    return _DRAW.get() is not None


def drawn(figure: Figure) -> float:
    """The value of a figure that is kept, such as a measurement from a file, in the draw at hand."""
    draw = _DRAW.get()
    return figure if draw is None else draw.of(figure)


def measured(value: float, low: float, high: float, name: str, source: str, unit: str = "") -> float:
    """A published or own measurement, with the spread of what it was read from."""
    return _input(value, low, high, Kind.MEASURED, name, source, unit)


def assumed(value: float, low: float, high: float, name: str, why: str, unit: str = "") -> float:
    """A number that nobody has measured here: the range is where we would be surprised to be wrong."""
    return _input(value, low, high, Kind.ASSUMPTION, name, why, unit)


def _input(value: float, low: float, high: float, kind: Kind, name: str, source: str, unit: str) -> float:
    draw = _DRAW.get()
    if draw is None:
        return value
    return draw.of(Figure(value, low, high, kind, name=name, source=source, unit=unit))


def assumption(key: str) -> float:
    """The value of a figure of `configs/assumptions.toml`, in the draw at hand."""
    return drawn(_table()[key])


def ends(key: str) -> tuple[float, float, float]:
    """(value, low, high) of a figure of `configs/assumptions.toml`, whatever the draw."""
    figure = _table()[key]
    return figure.value, figure.low, figure.high


@functools.cache
def _table() -> dict[str, Figure]:
    rows = tomllib.loads(bundled_text("assumptions.toml"))
    return {key: _of_row(row.get("name", key), row) for key, row in rows.items()}


def _of_row(name: str, row: dict[str, Any]) -> Figure:
    kind = Kind.MEASURED if row.get("measured") else Kind.ASSUMPTION
    return Figure(*map(float, row["range"]), kind, name=name, unit=row.get("unit", ""), source=row["why"])


def spread(compute: Callable[[], Sequence[float]], draws: int | np.ndarray = DRAWS) -> list[Figure]:
    """Run a computation at the middle values and with so many draws, and give each of its results an interval.

    compute: must keep nothing from one call to the next that depends on an assumption. draws: how many, or what `samples` gave.
    """
    with drawing(Draw()) as middle:
        values = compute()
    inputs = middle.seen.values()
    kinds = functools.reduce(lambda all_of_them, figure: all_of_them | figure.kinds, inputs, int(Kind.EXACT))
    if not any(figure.low < figure.high for figure in inputs):
        return [Figure(value, kinds=kinds) for value in values]
    seen = samples(compute, draws) if isinstance(draws, int) else draws
    low, high = np.quantile(seen, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0, method="hazen")
    ends = zip(values, low, high, strict=True)
    return [Figure(value, min(float(a), value), max(float(b), value), kinds) for value, a, b in ends]


def samples(compute: Callable[[], Sequence[float]], draws: int) -> np.ndarray:
    """Run a computation with each draw: float64 [draws, results]. The same draws for every computation."""
    rows = []
    for number in range(draws):
        with drawing(Draw.number(number, draws)):
            rows.append([float(value) for value in compute()])
    return np.array(rows)
