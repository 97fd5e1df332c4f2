"""Metric families that keep plain numbers and create samples and text only at a scrape.

prometheus_client's histograms take a lock and search their buckets for each observation: about a millisecond per step with 1,024 running
requests. These histograms take a count with each value, so that requests with an equal wait are observed together. Gauges read the
engine's latest state at the scrape.

prometheus_client's encoders take 0.15 to 0.2 s for the 8,500 samples of 32 ranks, which delays the engine's thread and the streams;
`exposition` takes an eighth of that. For OpenMetrics prometheus_client 0.26 also writes the colon of `vllm:` as `_` by default. A test
compares both outputs.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Sample = tuple[str, Labels, float]
"""(suffix of the family's name, label values, value). A bucket's last label is `le`."""
Samples = Iterable[tuple[Labels, float]]
Reading = float | None | Samples
"""Value of a gauge: a number, None for no sample, or pairs of label values and a number."""


def field_reader(records: Callable[[], Iterable[tuple[Labels, Any]]]) -> Callable[[str], Callable[[], Reading]]:
    """Return a function that maps a field's name to a gauge's `read` function. A field that is None has no sample.

    records: called at each scrape; returns pairs of label values and a record.
    """

    def reader_of(field: str) -> Callable[[], Reading]:
        return lambda: [
            (labels, value) for labels, record in records() if (value := getattr(record, field)) is not None
        ]

    return reader_of


def unlabelled(record: Any | None) -> list[tuple[Labels, Any]]:
    """Return a record without labels for `field_reader`; an empty list if the record is None."""
    return [] if record is None else [((), record)]


def by_index(values: Iterable[float]) -> Samples:
    """Label values by their index, such as a device or a rank."""
    return [((str(index),), value) for index, value in enumerate(values)]


class Registry(CollectorRegistry):
    """prometheus_client's registry, which also creates families and keeps them in order.

    common: names and values of the first labels of all families.
    """

    def __init__(self, **common: str):
        super().__init__()
        self.common = common
        self.families: list[Family] = []

    def register(self, collector: Collector) -> None:
        """Add a family; its names must be new."""
        super().register(collector)
        self.families.append(collector)

    def counter(self, name: str, documentation: str, *labelnames: str) -> "Counter":
        """Add a counter."""
        return Counter(self, name, documentation, labelnames)

    def histogram(self, name: str, documentation: str, bounds: Sequence[float], *labelnames: str) -> "Histogram":
        """Add a histogram with these upper bounds."""
        return Histogram(self, name, documentation, labelnames, bounds=bounds)

    def gauge(self, name: str, documentation: str, read: Callable[[], Reading], *labelnames: str) -> None:
        """Add a gauge. read: returns its value at a scrape."""
        Gauge(self, name, documentation, labelnames, read=read)

    def total(self, name: str, documentation: str, read: Callable[[], Reading], *labelnames: str) -> None:
        """Add a counter. read: returns its value at a scrape."""
        Total(self, name, documentation, labelnames, read=read)


class Family(Collector):
    """A metric family: name, label names and samples. A counter's `name` has no `_total`; its samples add it.

    common: names and values of the first labels; default: the registry's.
    """

    kind: str

    def __init__(
        self,
        registry: Registry,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        common: Mapping[str, str] | None = None,
    ):
        common = registry.common if common is None else common
        self.name, self.documentation = name, documentation
        self.labelnames = (*common, *labelnames)
        self._common = tuple(common.values())
        registry.register(self)

    def samples(self) -> Iterable[Sample]:
        """Yield the current samples; safe while another thread adds samples."""
        raise NotImplementedError

    def describe(self) -> Iterable[Metric]:
        """Yield the family without samples, so that the registry learns its names."""
        yield Metric(self.name, self.documentation, self.kind)

    def collect(self) -> Iterable[Metric]:
        """Yield the family in prometheus_client's form."""
        (family,) = self.describe()
        for suffix, labels, value in self.samples():
            names = (*self.labelnames, "le")[: len(labels)]
            family.add_sample(self.name + suffix, dict(zip(names, labels, strict=True)), value)
        yield family


class Counter(Family):
    """A counter: sums by label values."""

    kind = "counter"

    def __init__(self, *declaration, **more):
        super().__init__(*declaration, **more)
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Add to a sum. Adding 0 exports the series early, so that Prometheus' `rate` includes the first increase."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def samples(self) -> Iterable[Sample]:
        """Yield a sample for each sum."""
        for labels, value in self._values.copy().items():
            yield "_total", self._common + labels, value


class Gauge(Family):
    """A gauge whose `read` is called at each scrape."""

    kind = "gauge"
    _suffix = ""

    def __init__(self, *declaration, read: Callable[[], Reading]):
        super().__init__(*declaration)
        self._read = read

    def samples(self) -> Iterable[Sample]:
        """Yield the samples that `read` returns."""
        reading = self._read()
        for labels, value in [((), reading)] if isinstance(reading, int | float) else reading or ():
            yield self._suffix, self._common + labels, value


class Total(Gauge):
    """A counter whose `read` is called at each scrape."""

    kind = "counter"
    _suffix = "_total"


class _Buckets:
    """Non-cumulative bucket counts and the sum of one histogram."""

    __slots__ = ("counts", "sum")

    def __init__(self, size: int):
        self.counts = [0] * size
        self.sum = 0.0


class Histogram(Family):
    """Histograms by label values with common upper bounds; +Inf is added."""

    kind = "histogram"

    def __init__(self, *declaration, bounds: Sequence[float]):
        super().__init__(*declaration)
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{self.name}: found bounds {bounds}, expected them to rise")
        self._bounds = [float(bound) for bound in bounds]
        self._bound_names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._children: dict[Labels, _Buckets] = {}

    def observe(self, labels: Labels, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`. A value equal to a bound counts towards it, as in Prometheus."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = _Buckets(len(self._bound_names))
        child.counts[bisect.bisect_left(self._bounds, value)] += count
        child.sum += value * count

    def samples(self) -> Iterable[Sample]:
        """Yield cumulative buckets, then count and sum."""
        for labels, child in self._children.copy().items():
            total = 0
            for bound, count in zip(self._bound_names, child.counts.copy(), strict=True):
                total += count
                yield "_bucket", (*self._common, *labels, bound), total
            yield "_count", self._common + labels, total
            yield "_sum", self._common + labels, child.sum


class _SummedFamily:
    """A family with the samples of other processes added."""

    def __init__(self, family: Family, others: Mapping[tuple[str, Labels], float]):
        self.name, self.documentation, self.labelnames = family.name, family.documentation, family.labelnames
        self.kind = family.kind
        self._family = family
        self._others = others

    def samples(self) -> Iterable[Sample]:
        """Yield the family's samples, then the samples that only other processes have."""
        remaining = dict(self._others)
        for suffix, labels, value in self._family.samples():
            yield suffix, labels, value + remaining.pop((suffix, labels), 0)
        for (suffix, labels), value in remaining.items():
            yield suffix, labels, value


def sum_over_processes(
    families: Iterable[Family], snapshots: Iterable[Iterable[tuple[str, str, Labels, float]]]
) -> list[Family]:
    """Return the families, summed over processes. snapshots: each other process's samples, with the family's name first."""
    totals: dict[str, dict[tuple[str, Labels], float]] = {}
    for snapshot in snapshots:
        for name, suffix, labels, value in snapshot:
            family_totals = totals.setdefault(name, {})
            key = (suffix, tuple(labels))
            family_totals[key] = family_totals.get(key, 0) + value
    return [_SummedFamily(family, totals[family.name]) if family.name in totals else family for family in families]


def one_two_five(most: int) -> list[int]:
    """Return vLLM's bounds for token counts: 1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds = []
    power = 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return bounds


def exposition(families: Iterable[Family], names: Set[str] = frozenset(), *, openmetrics: bool = False) -> bytes:
    """Return all samples, or only those in `names` (`x_total`, `x_bucket`, …), in Prometheus's text format or OpenMetrics."""
    lines: list[str] = []
    for family in families:
        sample_lines = list(_sample_lines(family, names))
        if sample_lines or not names:
            # OpenMetrics names a counter without the `_total` of its samples.
            title = f"{family.name}_total" if family.kind == "counter" and not openmetrics else family.name
            lines += [
                f"# HELP {title} {_escaped(family.documentation)}",
                f"# TYPE {title} {family.kind}",
                *sample_lines,
            ]
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def _sample_lines(family: Family, names: Set[str]) -> Iterable[str]:
    name, labelnames = family.name, family.labelnames
    for suffix, labels, value in family.samples():
        if names and name + suffix not in names:
            continue
        number = str(value) if type(value) is int else floatToGoString(value)
        yield f"{name}{suffix}{_label_text(labelnames, labels)} {number}"


@lru_cache(maxsize=65536)
def _label_text(labelnames: Labels, labels: Labels) -> str:
    """Return `{a="1",le="0.5"}`, cached for each time series."""
    pairs = zip((*labelnames, "le"), labels, strict=False)
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
