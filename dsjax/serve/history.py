"""`History`: what the server did in the last minutes, for a page that is opened late."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dsjax.engine.schedule.rank import RankLoad
from dsjax.serve.metrics_families import Family
from dsjax.serve.schemas import HistoryBody

INTERVAL_SECONDS = 2.0
KEPT_SECONDS = 300.0
LATENCY_SECONDS = 60.0
"""The page's quantiles are of the last minute."""
LATENCIES = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")


class _Point(NamedTuple):
    time: float
    prompt_tokens: float
    generation_tokens: float
    running: int
    waiting: int
    buckets: dict[str, Counter[str]]


class History:
    """Sums since the start, noted every two seconds in which there was a step.

    A point is noted before its step is counted, and once more when somebody asks, so nothing runs while nothing happens: the sums
    of two points around an idle time are equal, and the first step after it has a point of its own before it.

    Args:
        families: of `Metrics`, whose sums and histograms are read.
        loads: gives the ranks' load as last known.
        clock: seconds.
    """

    def __init__(
        self,
        families: Callable[[], Sequence[Family]],
        loads: Callable[[], Sequence[RankLoad]],
        clock: Callable[[], float],
    ):
        self._families, self._loads, self._clock = families, loads, clock
        self._points: deque[_Point] = deque()

    def note(self) -> None:
        """Note a point, unless the last one is younger than the interval."""
        now = self._clock()
        if not self._points or now - self._points[-1].time >= INTERVAL_SECONDS:
            self._points.append(self._read(now))
            while now - self._points[0].time > KEPT_SECONDS:
                self._points.popleft()

    def to_json(self) -> HistoryBody:
        """All points, oldest first, the last of them as it is now.

        That one stands in for a point that was noted just before: between two so near there is no rate worth drawing.
        """
        self.note()
        now = self._clock()
        points = [*self._points]
        if len(points) > 1 and now - points[-1].time < INTERVAL_SECONDS / 2:
            points.pop()
        if now > points[-1].time:
            points.append(self._read(now))
        points = [point for point in points if now - point.time <= KEPT_SECONDS]
        before = [point for point in points if now - point.time >= LATENCY_SECONDS]
        return {
            "kept_seconds": KEPT_SECONDS,
            "points": [
                {
                    "age": now - point.time,
                    "prompt_tokens": point.prompt_tokens,
                    "generation_tokens": point.generation_tokens,
                    "running": point.running,
                    "waiting": point.waiting,
                }
                for point in points
            ],
            "buckets_a_minute_ago": (before[-1] if before else points[0]).buckets,
        }

    def _read(self, now: float) -> _Point:
        families = {family.name: family for family in self._families()}

        def total(name: str) -> float:
            return sum(value for _, _, value in families[name].samples())

        loads = self._loads()
        return _Point(
            now,
            total("vllm:prompt_tokens"),
            total("vllm:generation_tokens"),
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            {name: _buckets(families[name].samples()) for name in LATENCIES},
        )


def _buckets(samples) -> Counter[str]:
    """A histogram's cumulative counts by upper bound, over all ranks."""
    counts: Counter[str] = Counter()
    for suffix, labels, value in samples:
        if suffix == "_bucket":
            counts[labels[-1]] += value
    return counts
