"""Families of metrics about the links between a group's processes, and about the host's network cards."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from dsjax.hosts.interfaces import Interface
from dsjax.hosts.links import LinkState
from dsjax.serve.metrics_families import Labels, Reading, Registry

Links = Callable[[], Mapping[int, LinkState]]


def add_link_metrics(registry: Registry, links: Links, interfaces: Callable[[], Iterable[Interface]]) -> None:
    """Add the states of links to other processes, and the counters of network cards."""

    def of(field: str) -> Callable[[], Reading]:
        def read() -> Iterator[tuple[Labels, float]]:
            for process_id, state in links().items():
                value = getattr(state, field)
                if value is not None:
                    yield (str(process_id),), float(value)

        return read

    for name, documentation, field in (
        (
            "round_trip_seconds",
            "Time between a packet to another process and its acknowledgement, smoothed by the kernel.",
            "round_trip",
        ),
        ("answer_seconds", "Time until another process answered a small message, the least of five.", "answer"),
    ):
        registry.gauge(f"dsjax_link_{name}", documentation, of(field), "peer")
    for name, documentation, field in (
        ("probes", "Probes of the link to another process.", "probes"),
        ("probes_unanswered", "Probes of the link to another process without an answer within a second.", "unanswered"),
        ("segments", "TCP segments sent to probe the link to another process.", "segments"),
        ("segments_retransmitted", "TCP segments of probes that were lost and sent again.", "retransmitted"),
    ):
        registry.total(f"dsjax_link_{name}", documentation, of(field), "peer")

    def transferred() -> Iterator[tuple[Labels, float]]:
        for one in interfaces():
            yield (one.name, "sent"), float(one.sent)
            yield (one.name, "received"), float(one.received)

    registry.total("dsjax_network_bytes", "Bytes over the host's network cards.", transferred, "interface", "direction")
    registry.gauge(
        "dsjax_network_speed_bytes_per_second",
        "Bytes a second that a network card can send, and receive at the same time.",
        lambda: [((one.name,), one.speed) for one in interfaces()],
        "interface",
    )
