"""Measured seconds between the sizes that were measured. Whatever is looked up here grows with its sizes, and with its points.

A kernel that is slower for fewer rows could be given more of them, so that the seconds of a size are the least of that size and
all larger ones. Between two sizes they are a weighted mean of the seconds there. Both keep an order: where every point of one table
is at most the point of another, so is everything between the points. More of a resource therefore never makes a step slower.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class Curve:
    """Seconds over one size: straight between the sizes that were timed, which is exact for a fixed part and a part for each.

    Below the first size the first; beyond the last in proportion to the work that `beyond` gives, or as the last two points run.
    """

    def __init__(self, points: Iterable[tuple[float, float]], beyond: Callable[[float], float] | None = None):
        points = sorted(points)
        self.sizes, seconds = [size for size, _ in points], [time for _, time in points]
        for at in range(len(seconds) - 2, -1, -1):
            seconds[at] = min(seconds[at], seconds[at + 1])
        self.seconds, self._beyond = seconds, beyond

    def __call__(self, size: float) -> float:
        """Seconds at a size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size > sizes[-1]:
            if self._beyond is not None:
                return seconds[-1] * self._beyond(size) / self._beyond(sizes[-1])
            if len(sizes) == 1:
                return seconds[-1] * size / sizes[-1]
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return seconds[-1] + max(slope, 0.5 * seconds[-1] / sizes[-1]) * (size - sizes[-1])
        at = bisect.bisect_left(sizes, size)
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def times(self, factor: float) -> Curve:
        """Return the curve with all seconds multiplied by `factor`."""
        return Curve(zip(self.sizes, (time * factor for time in self.seconds), strict=True), self._beyond)


class Grid:
    """Seconds over two sizes that were evaluated at `firsts × seconds`: a weighted mean of the four corners of a cell.

    Below the first of a size the first; beyond the last in proportion to the size.
    """

    def __init__(self, firsts: Sequence[float], seconds: Sequence[float], time: Callable[[float, float], float]):
        self._firsts, self._seconds = list(firsts), list(seconds)
        table = np.array([[time(first, second) for second in self._seconds] for first in self._firsts])
        for axis in (0, 1):
            table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
        self._table = table.tolist()

    def __call__(self, first: float, second: float) -> float:
        """Seconds at two sizes."""
        row, down, more = _place(self._firsts, first)
        column, right, further = _place(self._seconds, second)
        above, below = self._table[row], self._table[row + 1] if down else self._table[row]
        if right:
            at_row = above[column] + right * (above[column + 1] - above[column])
            at_next = below[column] + right * (below[column + 1] - below[column])
        else:
            at_row, at_next = above[column], below[column]
        return (at_row + down * (at_next - at_row)) * more * further


def _place(sizes: list[float], size: float) -> tuple[int, float, float]:
    """(last size that is not larger, share of the way to the next one, how many times beyond the last)."""
    if size <= sizes[0]:
        return 0, 0.0, 1.0
    if size >= sizes[-1]:
        return len(sizes) - 1, 0.0, size / sizes[-1]
    at = bisect.bisect_right(sizes, size) - 1
    return at, (size - sizes[at]) / (sizes[at + 1] - sizes[at]), 1.0


def doublings(least: float, most: float, steps: int = 1) -> list[float]:
    """`least`, and so many sizes for each doubling up to at least `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(least * 2 ** (len(sizes) / steps))
    return sizes
