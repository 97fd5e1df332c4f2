"""`exposition`: families as Prometheus's text format, or as OpenMetrics.

prometheus_client's encoders take 0.15 to 0.2 s for the 8,500 samples of 32 ranks, in which neither the engine's thread nor the
streams get far; this takes an eighth of that (tools/bench_metrics.py). And in OpenMetrics theirs (0.26) writes the colon of `vllm:`
as `_` unless told otherwise. A test holds the two equal.
"""

from collections.abc import Iterable, Set
from functools import lru_cache

from prometheus_client.utils import floatToGoString

from dsjax.serve.metrics_families import Family, Labels


def exposition(families: Iterable[Family], names: Set[str] = frozenset(), *, openmetrics: bool = False) -> bytes:
    """All samples, or those with these names (`x_total`, `x_bucket`, …)."""
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
