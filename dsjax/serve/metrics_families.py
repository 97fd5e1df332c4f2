"""Families of metrics kept as plain numbers, which become samples only when somebody scrapes.

prometheus_client's own counters and histograms take a lock and walk their buckets for each observation: a millisecond or
two a step with 1,024 running requests. These take a count with each value, so that requests which waited equally long
are entered together, and gauges are read from the engine's latest state at the scrape.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counter(Collector):
    """Sums that only grow, by label values. `name` is without `_total`, which the exposition adds."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, labelnames: Sequence[str]):
        self.name, self._documentation, self._labelnames = name, documentation, tuple(labelnames)
        self._values: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Add to one sum; 0 makes it visible, so that a rate over its first increase is right."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The family without samples: how the registry learns the name."""
        yield CounterMetricFamily(self.name, self._documentation, labels=self._labelnames)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """All sums."""
        (family,) = self.describe()
        for labels, value in self._values.copy().items():
            family.add_metric(labels, value)
        yield family


class _ReadAtScrape(Collector):
    """Samples that `read` gives at the scrape: pairs of label values and a number."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        read: Callable[[], Iterable[tuple[Labels, float]]],
    ):
        self.name, self._documentation, self._labelnames, self._read = name, documentation, tuple(labelnames), read
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The family without samples."""
        yield self.family(self.name, self._documentation, labels=self._labelnames)

    def collect(self) -> Iterable[Metric]:
        """What `read` gives."""
        (family,) = self.describe()
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family


class Gauge(_ReadAtScrape):
    """What is so now."""

    family = GaugeMetricFamily


class Total(_ReadAtScrape):
    """A sum that somebody else keeps. `name` is without `_total`."""

    family = CounterMetricFamily


class _Buckets:
    """One histogram's counts, not cumulative, and its sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, size: int):
        self.counts = [0] * size
        self.sum = 0.0


class Histogram(Collector):
    """Histograms by label values, of one set of upper bounds; +Inf is added."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        bounds: Sequence[float],
    ):
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{name}: found bounds {bounds}, expected them to rise")
        self.name, self._documentation, self._labelnames = name, documentation, tuple(labelnames)
        self._bounds = [float(bound) for bound in bounds]
        self._names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._children: dict[Labels, _Buckets] = {}
        registry.register(self)

    def observe(self, labels: Labels, value: float, count: int = 1) -> None:
        """Enter `count` observations of `value`; a value equal to a bound belongs to it, as in Prometheus."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = _Buckets(len(self._names))
        child.counts[bisect.bisect_left(self._bounds, value)] += count
        child.sum += value * count

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The family without samples."""
        yield HistogramMetricFamily(self.name, self._documentation, labels=self._labelnames)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """All histograms, cumulative."""
        (family,) = self.describe()
        for labels, child in self._children.copy().items():
            total, buckets = 0, []
            for name, count in zip(self._names, child.counts.copy(), strict=True):
                total += count
                buckets.append((name, total))
            family.add_metric(labels, buckets, child.sum)
        yield family


def one_two_five(most: int) -> list[int]:
    """vLLM's bounds for numbers of tokens: 1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [each * power for each in (1, 2, 5) if each * power <= most]
        power *= 10
    return bounds
