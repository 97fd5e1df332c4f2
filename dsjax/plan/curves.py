"""Interpolation of measured seconds, monotonic in the sizes and in the measured points.

The seconds of a size are the minimum over that size and all larger ones, because a kernel that is slower for fewer rows could be given
more. Between two sizes they are interpolated linearly. If no point of a table is above the same point of another, no interpolated value
is either, so more of a resource never makes a step slower.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class Curve:
    """Seconds by one size, linear between the timed sizes and constant below the first.

    Beyond the last size they grow in proportion to the work that `beyond` returns, or else with the slope of the last two points, at least
    half the slope of proportional growth.
    """

    def __init__(self, points: Iterable[tuple[float, float]], beyond: Callable[[float], float] | None = None):
        self.sizes, seconds = map(list, zip(*sorted(points), strict=True))
        self.seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
        self._beyond = beyond

    def __call__(self, size: float) -> float:
        """Seconds at a size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        last, most = sizes[-1], seconds[-1]
        if size > last and self._beyond is not None:
            return most * self._beyond(size) / self._beyond(last)
        if size > last:
            slope = (most - seconds[-2]) / (last - sizes[-2]) if len(sizes) > 1 else most / last
            return most + max(slope, 0.5 * most / last) * (size - last)
        index = bisect.bisect_left(sizes, size)
        share = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])

    def times(self, factor: float) -> Curve:
        """Return the curve with all seconds multiplied by `factor`."""
        return Curve([(size, time * factor) for size, time in zip(self.sizes, self.seconds, strict=True)], self._beyond)


class Grid:
    """Seconds by two sizes, bilinear between the evaluated points `firsts × seconds`.

    They are constant below the first point of a size, and proportional to the size beyond the last.
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

        def along(row: list[float]) -> float:
            return row[column] + right * (row[column + 1] - row[column]) if right else row[column]

        seconds = along(self._table[row])
        if down:
            seconds += down * (along(self._table[row + 1]) - seconds)
        return seconds * more * further


def _place(sizes: list[float], size: float) -> tuple[int, float, float]:
    """Return (index of the last size that is not larger, fraction of the way to the next size, ratio to the last size or 1)."""
    if size <= sizes[0]:
        return 0, 0.0, 1.0
    if size >= sizes[-1]:
        return len(sizes) - 1, 0.0, size / sizes[-1]
    index = bisect.bisect_right(sizes, size) - 1
    return index, (size - sizes[index]) / (sizes[index + 1] - sizes[index]), 1.0


def doublings(least: float, most: float, steps: int = 1) -> list[float]:
    """Return sizes from `least` to at least `most`, with `steps` sizes for each doubling."""
    return [least * 2 ** (number / steps) for number in range(math.ceil(steps * math.log2(most / least)) + 1)]
