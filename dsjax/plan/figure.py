"""`Figure`: a number that knows what kind of knowledge it is, how far it may be off, and what it was made of."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_SETTLED: ContextVar[str | None] = ContextVar("settled", default=None)


class Kind(enum.IntFlag):
    """Where a number is from; a result has the kinds of everything that went into it."""

    EXACT = 1
    COMPILED = 2
    MEASURED = 4
    ASSUMPTION = 8

    def words(self) -> str:
        """`measured + assumption`; exact arithmetic is named only where nothing else went in."""
        if self == Kind.EXACT:
            return "exact"
        return " + ".join(kind.name.lower() for kind in Kind if kind in self and kind is not Kind.EXACT)


class Figure:
    """A positive quantity `low ≤ value ≤ high`, its kinds, and the named figures that it was computed from.

    The parts of a sum, product or quotient are taken as independent: their distances to their ends add up as squares do (of products
    and quotients, the relative distances). An interval is therefore not a bound: it is where the answer is to be expected when
    each assumption is somewhere in its range, not all of them at the same end. How often measurements lie inside is told by
    `docs/plan-validation.md`. With one uncertain part the ends are that part's.
    """

    __slots__ = ("high", "kinds", "low", "name", "note", "parts", "source", "unit", "value")

    def __init__(
        self,
        value: float,
        low: float | None = None,
        high: float | None = None,
        kinds: int = Kind.EXACT,
        *,
        name: str = "",
        unit: str = "",
        note: str = "",
        source: str = "",
        parts: tuple[Figure, ...] = (),
    ):
        self.value = value
        self.low = value if low is None else low
        self.high = value if high is None else high
        self.kinds = int(kinds)  # an IntFlag's | costs as much as all other arithmetic together
        self.name, self.unit, self.note, self.source, self.parts = name, unit, note, source, parts

    def named(self, name: str, unit: str = "", note: str = "") -> Figure:
        """Make it one line of a derivation; what it was made of hangs below it."""
        parts = (self,) if self.name else self.parts
        return Figure(
            self.value, self.low, self.high, self.kinds, name=name, unit=unit or self.unit, note=note, parts=parts
        )

    def made_of(self, *others: Figure) -> Figure:
        """Add those of the others that have a name as further lines of its derivation."""
        parts = (*self.parts, *(other for other in others if other.name))
        return Figure(self.value, self.low, self.high, self.kinds, parts=parts)

    def _with(self, other: Figure | float, value: float, low: float, high: float) -> Figure:
        parts = (self,) if self.name else self.parts
        if isinstance(other, Figure):
            parts = parts + ((other,) if other.name else other.parts)
            return Figure(value, low, high, self.kinds | other.kinds, parts=parts)
        return Figure(value, low, high, self.kinds, parts=parts)

    def __add__(self, other: Figure | float) -> Figure:
        value = self.value + (other.value if isinstance(other, Figure) else other)
        if not isinstance(other, Figure):
            return self._with(other, value, self.low + other, self.high + other)
        return self._with(
            other, value, value - math.hypot(self.value - self.low, other.value - other.low),
            value + math.hypot(self.high - self.value, other.high - other.value),
        )  # fmt: skip

    __radd__ = __add__

    def __sub__(self, other: Figure | float) -> Figure:
        """Difference."""
        if not isinstance(other, Figure):
            return self._with(other, self.value - other, self.low - other, self.high - other)
        value = self.value - other.value
        return self._with(
            other, value, value - math.hypot(self.value - self.low, other.high - other.value),
            value + math.hypot(self.high - self.value, other.value - other.low),
        )  # fmt: skip

    def __rsub__(self, other: float) -> Figure:
        return self._with(other, other - self.value, other - self.high, other - self.low)

    def _relative(self) -> tuple[float, float]:
        """(value ÷ low - 1, high ÷ value - 1)."""
        return _over(self.value, self.low), _over(self.high, self.value)

    def __mul__(self, other: Figure | float) -> Figure:
        if not isinstance(other, Figure):
            return self._with(other, self.value * other, self.low * other, self.high * other)
        (low, high), (other_low, other_high) = self._relative(), other._relative()
        value = self.value * other.value
        return self._with(
            other, value, value / (1 + math.hypot(low, other_low)), value * (1 + math.hypot(high, other_high))
        )

    __rmul__ = __mul__

    def __truediv__(self, other: Figure | float) -> Figure:
        if not isinstance(other, Figure):
            return self._with(other, self.value / other, self.low / other, self.high / other)
        (low, high), (other_low, other_high) = self._relative(), other._relative()
        value = self.value / other.value
        return self._with(
            other, value, value / (1 + math.hypot(low, other_high)), value * (1 + math.hypot(high, other_low))
        )

    def __rtruediv__(self, other: float) -> Figure:
        return self._with(other, other / self.value, other / self.high, other / self.low)

    def __repr__(self) -> str:
        return f"Figure({self.value:.6g} [{self.low:.6g}, {self.high:.6g}] {Kind(self.kinds).words()})"

    def part(self, name: str) -> Figure:
        """The figure of that name anywhere below this one.

        Raises:
            KeyError: there is none.
        """
        for figure, _ in self.walk():
            if figure.name == name:
                return figure
        raise KeyError(name)

    def walk(self, depth: int = 0) -> Iterator[tuple[Figure, int]]:
        """This figure and all below it with their depths, each once under its parent."""
        yield self, depth
        seen: set[int] = set()
        for part in self.parts:
            if id(part) not in seen:
                seen.add(id(part))
                yield from part.walk(depth + 1)

    def to_json(self) -> dict[str, Any]:
        """`{"value", "low", "high", "kind"}`, and `unit` where there is one."""
        fields: dict[str, Any] = {"value": self.value, "low": self.low, "high": self.high}
        fields["kind"] = Kind(self.kinds).words()
        return {**fields, "unit": self.unit} if self.unit else fields


class Middle(Figure):
    """A figure of which only the middle value is worked out: an interval and a derivation take ten times as long.

    Whatever is computed with one is one. The search compares middle values of thousands of steps, and works out in full what it shows.
    """

    __slots__ = ()
    low = high = property(lambda self: self.value)  # type: ignore[assignment]
    kinds, parts, name, unit, note, source = 0, (), "", "", "", ""  # type: ignore[assignment]

    def __init__(self, value: float):
        self.value = value

    def named(self, name: str, unit: str = "", note: str = "") -> Figure:
        """Return itself: there is no derivation."""
        return self

    def made_of(self, *others: Figure) -> Figure:
        """Return itself: there is no derivation."""
        return self

    def _with(self, other: Figure | float, value: float, low: float, high: float) -> Figure:
        return _middle(value)

    # The search adds and multiplies millions of times: each makes its result itself, without a further call.

    def __add__(self, other: Figure | float) -> Figure:
        made = _new(Middle)
        made.value = self.value + (other.value if isinstance(other, Figure) else other)
        return made

    __radd__ = __add__

    def __sub__(self, other: Figure | float) -> Figure:
        return _middle(self.value - (other.value if isinstance(other, Figure) else other))

    def __rsub__(self, other: Figure | float) -> Figure:
        return _middle((other.value if isinstance(other, Figure) else other) - self.value)

    def __mul__(self, other: Figure | float) -> Figure:
        made = _new(Middle)
        made.value = self.value * (other.value if isinstance(other, Figure) else other)
        return made

    __rmul__ = __mul__

    def __truediv__(self, other: Figure | float) -> Figure:
        made = _new(Middle)
        made.value = self.value / (other.value if isinstance(other, Figure) else other)
        return made

    def __rtruediv__(self, other: Figure | float) -> Figure:
        return _middle((other.value if isinstance(other, Figure) else other) / self.value)


_new = Figure.__new__


def _middle(value: float) -> Middle:
    middle = _new(Middle)
    middle.value = value
    return middle


@contextlib.contextmanager
def settled(name: str) -> Iterator[None]:
    """Within it the assumption of that name has no range, as if somebody had found its middle value to be right."""
    before = _SETTLED.set(name)
    try:
        yield
    finally:
        _SETTLED.reset(before)


def is_settled(name: str) -> bool:
    """Whether the assumption of that name is taken to be known (`settled`)."""
    return _SETTLED.get() == name


def unless_settled(figure: Figure) -> Figure:
    """Return a figure, or its middle value alone where it is an assumption that is taken to be known (`settled`)."""
    if not is_settled(figure.name) or not figure.kinds & Kind.ASSUMPTION:
        return figure
    value, about = figure.value, {"note": figure.note, "source": figure.source, "parts": figure.parts}
    return Figure(value, value, value, figure.kinds, name=figure.name, unit=figure.unit, **about)


def exact(value: float, name: str = "", unit: str = "", note: str = "") -> Figure:
    """Arithmetic on the model's and the layout's integers."""
    return Figure(value, name=name, unit=unit, note=note)


def amount(value: float, name: str, unit: str, times: Figure) -> Figure:
    """`exact`, of what is multiplied with `times`: where that is a middle value, nobody will ask for the name."""
    return _middle(value) if times.__class__ is Middle else Figure(value, name=name, unit=unit)


def measured(value: float, low: float, high: float, name: str, source: str, unit: str = "") -> Figure:
    """A published or own measurement, with the spread of what it was read from."""
    return Figure(value, low, high, Kind.MEASURED, name=name, source=source, unit=unit)


def assumed(value: float, low: float, high: float, name: str, why: str, unit: str = "") -> Figure:
    """Nobody measured it here: the range is where we would be surprised to be wrong."""
    return unless_settled(Figure(value, low, high, Kind.ASSUMPTION, name=name, source=why, unit=unit))


def _over(larger: float, smaller: float) -> float:
    """larger ÷ smaller - 1 of two ends of one figure; 0 ÷ 0 is nothing."""
    if larger == smaller:
        return 0.0
    return larger / smaller - 1 if smaller > 0 else math.inf


def total(figures: Sequence[Figure]) -> Figure:
    """The sum of at least one, at the price of one addition."""
    if any(figure.__class__ is Middle for figure in figures):
        return _middle(sum([figure.value for figure in figures], 0.0))
    value = below = above = 0.0
    kinds, parts = 0, []
    for figure in figures:
        value += figure.value
        below += (figure.value - figure.low) ** 2
        above += (figure.high - figure.value) ** 2
        kinds |= figure.kinds
        if figure.name:
            parts.append(figure)
        else:
            parts += figure.parts
    return Figure(value, value - math.sqrt(below), value + math.sqrt(above), kinds, parts=tuple(parts))


def largest(first: Figure, *others: Figure) -> Figure:
    """The maximum, end by end: of times, what is waited for."""
    result = first
    for other in others:
        if result.__class__ is Middle:
            result = _middle(max(result.value, other.value))
            continue
        result = result._with(
            other, max(result.value, other.value), max(result.low, other.low), max(result.high, other.high)
        )
    return result


def smallest(first: Figure, *others: Figure) -> Figure:
    """The minimum, end by end: of rates, the one that holds the others up."""
    result = first
    for other in others:
        result = result._with(
            other, min(result.value, other.value), min(result.low, other.low), min(result.high, other.high)
        )
    return result
