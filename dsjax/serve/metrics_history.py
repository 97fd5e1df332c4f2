"""`History`: the server's token counts and loads over the last minutes, for a page that is opened later."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsjax.engine.schedule.rank import RankLoad
from dsjax.serve.metrics_families import Family
from dsjax.serve.schemas import HistoryBody

INTERVAL_SECONDS = 2.0
"""Minimum time between two points."""
KEPT_SECONDS = 300.0
LATENCY_WINDOW_SECONDS = 60.0
"""Window of the page's latency quantiles."""
LATENCIES = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")


class _Point(NamedTuple):
    time: float
    sums: dict[str, float]
    buckets: dict[str, dict[str, float]]


class History:
    """Time series of sums since the start, with at most one point every two seconds.

    `Metrics` adds a point before it counts a step, and `to_json` when the history is read, so an idle server does no work. The sums
    before and after an idle period are equal.

    Args:
        families: returns the families of `Metrics`.
        loads: returns the ranks' last known loads.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        families: Callable[[], Sequence[Family]],
        loads: Callable[[], Sequence[RankLoad]],
        clock: Callable[[], float],
    ):
        self._families, self._loads, self._clock = families, loads, clock
        self._points: deque[_Point] = deque()

    def add_point(self) -> None:
        """Add a point unless the last one is younger than the interval."""
        self._add_point(self._clock())

    def _add_point(self, now: float) -> None:
        if not self._points or now - self._points[-1].time >= INTERVAL_SECONDS:
            self._points.append(self._current_point(now))
            while now - self._points[0].time > KEPT_SECONDS:
                self._points.popleft()

    def to_json(self) -> HistoryBody:
        """Return all points, oldest first; the last is the current one."""
        now = self._clock()
        self._add_point(now)
        points = [*self._points]
        if len(points) > 1 and now - points[-1].time < INTERVAL_SECONDS / 2:
            points.pop()  # almost as recent as the current point: the rate between the two would be meaningless
        if points[-1].time < now:
            points.append(self._current_point(now))
        points = [point for point in points if now - point.time <= KEPT_SECONDS]
        before_window = [point for point in points if now - point.time >= LATENCY_WINDOW_SECONDS]
        return {
            "kept_seconds": KEPT_SECONDS,
            "points": [{"age": now - point.time, **point.sums} for point in points],
            "buckets_a_minute_ago": (before_window[-1] if before_window else points[0]).buckets,
        }

    def _current_point(self, now: float) -> _Point:
        families = {family.name: family for family in self._families()}

        def total(name: str) -> float:
            return sum(value for _, _, value in families[name].samples())

        loads = self._loads()
        sums = {
            "prompt_tokens": total("vllm:prompt_tokens"),
            "generation_tokens": total("vllm:generation_tokens"),
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
        }
        return _Point(now, sums, {name: _buckets(families[name]) for name in LATENCIES})


def _buckets(histogram: Family) -> dict[str, float]:
    """Return a histogram's cumulative counts by upper bound, summed over the ranks."""
    counts: dict[str, float] = {}
    for suffix, labels, value in histogram.samples():
        if suffix == "_bucket":
            upper_bound = labels[-1]  # `le`, which is a bucket's last label
            counts[upper_bound] = counts.get(upper_bound, 0) + value
    return counts
