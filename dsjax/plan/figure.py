"""Figures: numbers with a range, a kind and a source; and draws, which move every uncertain number within its range.

The planner computes with plain floats. For an uncertain number it calls `assumed` or `measured`, which return the middle value, or inside
``with drawing(draw)`` the draw's value for this name. Everything computed from an assumption, in all places and layouts, thus moves with
it. `spread` runs a computation with many draws and gives each result an interval; the difference of two results has its own interval, in
which their common part cancels.
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
"""Draws for an interval in a table: with this number, the second and the last but one lie at the ends of an assumption's range.
`dsjax plan compare` takes more."""
TWO_LINES = "{value}\n{low}–{high}"
"""Format of `Figure.text` for table cells."""


class Kind(enum.IntFlag):
    """Source of a number. A result has the kinds of all its inputs."""

    EXACT = 1
    COMPILED = 2
    MEASURED = 4
    ASSUMPTION = 8

    def words(self) -> str:
        """Return text such as `measured + assumption`; `exact` is named only if there is no other kind."""
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
        figure.kinds = int(kinds)
        figure.name = name
        figure.unit = unit
        figure.source = source
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
        """Write the value and both ends, multiplied by `factor`, with `digits` decimals."""
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
        """Return one draw of a Latin hypercube. The same number has the same places in every computation."""
        return cls(lambda name: _places(name, of)[number])

    def of(self, figure: Figure) -> float:
        """Return the value of an assumption in this draw."""
        self.seen.setdefault(figure.name, figure)
        quantile = self._place(figure.name)
        if quantile == 0.0 or figure.low == figure.high:
            return figure
        end = figure.high if quantile > 0 else figure.low
        return float(figure) + (end - float(figure)) * abs(quantile)


@functools.cache
def _places(name: str, draws: int) -> tuple[float, ...]:
    """Return quantiles of a normal variable, in an order seeded by the name, in units of the distance to its 5 % and 95 % quantiles."""
    normal = statistics.NormalDist()
    end = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    order = np.random.default_rng(zlib.crc32(name.encode())).permutation(draws)
    return tuple(max(-1.0, min(1.0, normal.inv_cdf((float(rank) + 0.5) / draws) / end)) for rank in order)


_DRAW: ContextVar[Draw | None] = ContextVar("draw", default=None)


@contextlib.contextmanager
def drawing(draw: Draw) -> Iterator[Draw]:
    """Make `assumed` and `measured` return the draw's values inside the `with` block."""
    before = _DRAW.set(draw)
    try:
        yield draw
    finally:
        _DRAW.reset(before)


def is_drawing() -> bool:
    """Whether a draw is active. Without one only middle values are needed, and ranges need not be computed."""
    return _DRAW.get() is not None


def drawn(figure: Figure) -> float:
    """Return the value of a stored figure, such as a measurement from a file, in the active draw."""
    draw = _DRAW.get()
    return figure if draw is None else draw.of(figure)


def measured(value: float, low: float, high: float, name: str, source: str, unit: str = "") -> float:
    """Return a published or own measurement, with the spread of its source."""
    return _input(value, low, high, Kind.MEASURED, name, source, unit)


def assumed(value: float, low: float, high: float, name: str, why: str, unit: str = "") -> float:
    """Return an assumed number that was not measured. A true value outside its range would surprise us."""
    return _input(value, low, high, Kind.ASSUMPTION, name, why, unit)


def _input(value: float, low: float, high: float, kind: Kind, name: str, source: str, unit: str) -> float:
    draw = _DRAW.get()
    if draw is None:
        return value
    return draw.of(Figure(value, low, high, kind, name=name, source=source, unit=unit))


def assumption(key: str) -> float:
    """Return the value of a figure of `configs/assumptions.toml` in the active draw."""
    return drawn(_table()[key])


def ends(key: str) -> tuple[float, float, float]:
    """Return (value, low, high) of a figure of `configs/assumptions.toml`, regardless of the draw."""
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
    """Run a computation at the middle values and with many draws, and return each of its results with an interval.

    compute: must not keep anything that depends on an assumption between calls. draws: their number, or the result of `samples`.
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
    """Run a computation with each draw and return float64 [draws, results]. Every computation gets the same draws."""
    rows = []
    for number in range(draws):
        with drawing(Draw.number(number, draws)):
            rows.append([float(value) for value in compute()])
    return np.array(rows)
