"""Families of metrics about experts in other processes, as the attention side sees them."""

from collections.abc import Callable

from dsjax.engine.afd.messages import ExpertLinks, LinkCounts
from dsjax.serve.metrics_families import Labels, Registry


def add_expert_link_metrics(registry: Registry, links: Callable[[], ExpertLinks | None]) -> None:
    """Add what the link to each process with experts has done. The label counts the addresses of `--afd-address`.

    links: of now; another side of experts has others. None: there are none, or not yet.
    """

    def each(value: Callable[[LinkCounts], float]) -> Callable[[], list[tuple[Labels, float]]]:
        def values() -> list[tuple[Labels, float]]:
            now = links()
            every = () if now is None else now.counts
            return [((str(number),), float(value(counts))) for number, counts in enumerate(every)]

        return values

    name, label = "dsjax_expert_process", "expert_process"
    for what, documentation, value in (
        ("connected", "1 while the process with experts is connected.", lambda counts: counts.connected),
        (
            "last_gap_seconds",
            "Time from the last end of the connection to the answer of the call that met it.",
            lambda counts: counts.last_gap,
        ),
    ):
        registry.gauge(f"{name}_{what}", documentation, each(value), label)
    for what, documentation, value in (
        ("losses", "Connections that ended under a call, which was made again.", lambda counts: counts.losses),
        ("calls", "Calls for the experts of a layer that were answered.", lambda counts: counts.calls),
        ("sent_bytes", "Bytes of rows that went to the process.", lambda counts: counts.sent),
        ("received_bytes", "Bytes of answers that came from it.", lambda counts: counts.received),
    ):
        registry.total(f"{name}_{what}", documentation, each(value), label)
