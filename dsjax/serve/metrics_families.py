"""Families of metrics kept as plain numbers, which become samples, and then text, only when somebody scrapes.

prometheus_client's own histograms take a lock and walk their buckets for each observation, which adds up to a millisecond a
step with 1,024 running requests. These take a count with each value, so that requests which waited equally long are
entered together, and gauges are read from the engine's latest state at the scrape.

Its encoders take 0.15 to 0.2 s for the 8,500 samples of 32 ranks, in which neither the engine's thread nor the streams get far;
`exposition` takes an eighth of that. And in OpenMetrics theirs (0.26) writes the colon of `vllm:` as `_`
unless told otherwise. A test holds the two equal.
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
"""(what follows the family's name, label values, value). A bucket has one label more than its family: `le`, last."""
Reading = float | None | Iterable[tuple[Labels, float]]
"""What a gauge shows: one number, None where there is none, or pairs of label values and a number."""


def fields_of(records: Callable[[], Iterable[tuple[Labels, Any]]]) -> Callable[[str], Callable[[], Reading]]:
    """Make a function from a field's name to one that reads it of each record at the scrape. A field that is None has no sample.

    records: those that there are, each with its label values.
    """
    return lambda name: (
        lambda: [(labels, value) for labels, record in records() if (value := getattr(record, name)) is not None]
    )


class Registry(CollectorRegistry):
    """prometheus_client's, which also makes families, and remembers them in their order.

    common: labels that all of its families have, first, with their values. Nobody else gives values for them.
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
        """Add sums that only grow."""
        return Counter(self, name, documentation, labelnames)

    def histogram(self, name: str, documentation: str, bounds: Sequence[float], *labelnames: str) -> "Histogram":
        """Add histograms of these upper bounds."""
        return Histogram(self, name, documentation, labelnames, bounds=bounds)

    def gauge(self, name: str, documentation: str, read: Callable[[], Reading], *labelnames: str) -> None:
        """Add values that rise and fall."""
        Gauge(self, name, documentation, labelnames, read=read)

    def total(self, name: str, documentation: str, read: Callable[[], Reading], *labelnames: str) -> None:
        """Add sums that only grow and are kept elsewhere."""
        Total(self, name, documentation, labelnames, read=read)


class Family(Collector):
    """A name, its label names, and samples. `name` of a counter is without `_total`, which its samples add.

    common: labels with their values before those of `labelnames`; default: the registry's.
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
        self.labelnames, self._common = (*common, *labelnames), tuple(common.values())
        registry.register(self)

    def samples(self) -> Iterable[Sample]:
        """Yield all samples, as they are now. May be called while another thread adds some."""
        raise NotImplementedError

    def describe(self) -> Iterable[Metric]:
        """Yield the family without samples: how the registry learns the names."""
        yield Metric(self.name, self.documentation, self.kind)

    def collect(self) -> Iterable[Metric]:
        """Yield the family as prometheus_client has it."""
        (family,) = self.describe()
        for suffix, labels, value in self.samples():
            names = (*self.labelnames, "le")[: len(labels)]
            family.add_sample(self.name + suffix, dict(zip(names, labels, strict=True)), value)
        yield family


class Counter(Family):
    """Sums that only grow, by label values."""

    kind = "counter"

    def __init__(self, *declaration, **more):
        super().__init__(*declaration, **more)
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Add to one sum; 0 makes it visible, so that a rate over its first increase is right."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def samples(self) -> Iterable[Sample]:
        """Yield a sample for each sum."""
        for labels, value in self._values.copy().items():
            yield "_total", self._common + labels, value


class Gauge(Family):
    """Values that rise and fall: `read` is called at the scrape."""

    kind = "gauge"
    _suffix = ""

    def __init__(self, *declaration, read: Callable[[], Reading]):
        super().__init__(*declaration)
        self._read = read

    def samples(self) -> Iterable[Sample]:
        """Yield what `read` returns."""
        reading = self._read()
        for labels, value in [((), reading)] if isinstance(reading, int | float) else reading or ():
            yield self._suffix, self._common + labels, value


class Total(Gauge):
    """A counter whose sums are kept elsewhere and read at the scrape."""

    kind = "counter"
    _suffix = "_total"


class _Buckets:
    """One histogram's counts, not cumulative, and its sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, size: int):
        self.counts = [0] * size
        self.sum = 0.0


class Histogram(Family):
    """Histograms by label values, of one set of upper bounds; +Inf is added."""

    kind = "histogram"

    def __init__(self, *declaration, bounds: Sequence[float]):
        super().__init__(*declaration)
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{self.name}: found bounds {bounds}, expected them to rise")
        self._bounds = [float(bound) for bound in bounds]
        self._bound_names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._children: dict[Labels, _Buckets] = {}

    def observe(self, labels: Labels, value: float, count: int = 1) -> None:
        """Enter `count` observations of `value`; a value equal to a bound belongs to it, as in Prometheus."""
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
    """A family with the same samples of other processes added to its own."""

    def __init__(self, family: Family, others: Mapping[tuple[str, Labels], float]):
        self.name, self.documentation, self.labelnames = family.name, family.documentation, family.labelnames
        self.kind, self._family, self._others = family.kind, family, others

    def samples(self) -> Iterable[Sample]:
        """Yield the family's samples in their order; then those that only others have."""
        left = dict(self._others)
        for suffix, labels, value in self._family.samples():
            yield suffix, labels, value + left.pop((suffix, labels), 0)
        for (suffix, labels), value in left.items():
            yield suffix, labels, value


def summed(families: Iterable[Family], snapshots: Iterable[Iterable[tuple[str, str, Labels, float]]]) -> list[Family]:
    """Families whose samples are the sums over processes. snapshots: of each other process, a sample with its family's name first."""
    added: dict[str, dict[tuple[str, Labels], float]] = {}
    for snapshot in snapshots:
        for name, suffix, labels, value in snapshot:
            of_family, key = added.setdefault(name, {}), (suffix, tuple(labels))
            of_family[key] = of_family.get(key, 0) + value
    return [_SummedFamily(family, added[family.name]) if family.name in added else family for family in families]


def one_two_five(most: int) -> list[int]:
    """Return vLLM's bounds for numbers of tokens: 1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [each * power for each in (1, 2, 5) if each * power <= most]
        power *= 10
    return bounds


def exposition(families: Iterable[Family], names: Set[str] = frozenset(), *, openmetrics: bool = False) -> bytes:
    """Families as Prometheus's text format, or as OpenMetrics: all samples, or those with these names (`x_total`, `x_bucket`, …)."""
    lines: list[str] = []
    for family in families:
        written = list(_sample_lines(family, names))
        if written or not names:
            # OpenMetrics calls a counter what its samples are called without `_total`.
            title = f"{family.name}_total" if family.kind == "counter" and not openmetrics else family.name
            lines += [f"# HELP {title} {_escaped(family.documentation)}", f"# TYPE {title} {family.kind}", *written]
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
    """`{a="1",le="0.5"}`; made once for each time series."""
    pairs = zip((*labelnames, "le"), labels, strict=False)
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
