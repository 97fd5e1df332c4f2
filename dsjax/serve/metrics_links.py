"""Metrics of links between a group's processes, of links to processes with experts, and of network cards."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from dsjax.engine.afd.messages import ExpertLinks
from dsjax.hosts.interfaces import Interface
from dsjax.hosts.links import LinkState
from dsjax.serve.metrics_families import Labels, Registry, field_reader

Links = Callable[[], Mapping[int, LinkState]]


def add_link_metrics(registry: Registry, links: Links, interfaces: Callable[[], Iterable[Interface]]) -> None:
    """Add the state of the links to other processes and the counters of network cards."""
    link_field = field_reader(lambda: [((str(process_id),), state) for process_id, state in links().items()])
    for name, documentation, field in (
        (
            "round_trip_seconds",
            "Time between a packet to another process and its acknowledgement, smoothed by the kernel.",
            "round_trip",
        ),
        ("answer_seconds", "Time until another process answered a small message, the least of five.", "answer"),
    ):
        registry.gauge(f"dsjax_link_{name}", documentation, link_field(field), "peer")
    for name, documentation, field in (
        ("probes", "Probes of the link to another process.", "probes"),
        ("probes_unanswered", "Probes of the link to another process without an answer within a second.", "unanswered"),
        ("segments", "TCP segments sent to probe the link to another process.", "segments"),
        ("segments_retransmitted", "TCP segments of probes that were lost and sent again.", "retransmitted"),
    ):
        registry.total(f"dsjax_link_{name}", documentation, link_field(field), "peer")

    def transferred() -> Iterator[tuple[Labels, float]]:
        for interface in interfaces():
            yield (interface.name, "sent"), float(interface.sent)
            yield (interface.name, "received"), float(interface.received)

    registry.total("dsjax_network_bytes", "Bytes over the host's network cards.", transferred, "interface", "direction")
    registry.gauge(
        "dsjax_network_speed_bytes_per_second",
        "Bytes a second that a network card can send, and receive at the same time.",
        lambda: [((interface.name,), interface.speed) for interface in interfaces()],
        "interface",
    )


def add_expert_link_metrics(registry: Registry, links: Callable[[], ExpertLinks | None]) -> None:
    """Add the counts of the link to each process with experts. The label is the process's index in `--afd-address`.

    links: returns the current links, which change with the expert side; None before there are any.
    """
    name, label = "dsjax_expert_process", "expert_process"
    process_field = field_reader(
        lambda: [((str(n),), counts) for n, counts in enumerate(getattr(links(), "counts", ()))]
    )
    for suffix, documentation, field in (
        ("connected", "1 while the process with experts is connected.", "connected"),
        (
            "last_gap_seconds",
            "Time from the last loss of the connection to the answer of the interrupted call.",
            "last_gap",
        ),
    ):
        registry.gauge(f"{name}_{suffix}", documentation, process_field(field), label)
    for suffix, documentation, field in (
        ("losses", "Connections lost during a call, which was repeated.", "losses"),
        ("calls", "Expert calls that were answered, one per layer and microbatch.", "calls"),
        ("sent_bytes", "Bytes sent to the process.", "sent"),
        ("received_bytes", "Bytes received from the process.", "received"),
    ):
        registry.total(f"{name}_{suffix}", documentation, process_field(field), label)
