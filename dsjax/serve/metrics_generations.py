"""Metrics of the mesh as it changes while requests go on: docs/many-hosts.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsjax.serve.metrics_families import Gauge, Registry, Total

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.generations import Generations

REASONS = ("scale", "loss", "failure", "return")


def add_generation_metrics(registry: Registry, model_name: str, generations: Generations) -> None:
    """Add families that show which mesh there is, which one is wanted, and what changing it took; read at the scrape."""

    def gauge(name: str, documentation: str, value: Callable[[], float]) -> None:
        Gauge(registry, name, documentation, ("model_name",), lambda: [((model_name,), float(value()))])

    gauge("dsjax_generation", "Number of the mesh; it begins with 0.", lambda: generations.number)
    gauge("dsjax_generation_devices", "Devices of the mesh.", lambda: generations.spec.num_devices)
    gauge("dsjax_generation_devices_wanted", "Devices it was to have.", lambda: generations.wanted.num_devices)
    gauge("dsjax_generation_processes", "Processes with a part in it.", lambda: generations.facts.num_processes)
    ahead = generations.ahead
    for name, what, count in (
        ("done", "Programs of the meshes that may come next which process 0 has.", "done"),
        ("wanted", "Of those, how many it is to have.", "total"),
    ):
        read = lambda count=count: 0 if ahead is None else getattr(ahead, count)  # noqa: E731
        gauge(f"dsjax_compile_ahead_programs_{name}", what, read)
    gauge("dsjax_generation_changing", "1 while no step computes, as the mesh is changed.", lambda: generations.busy)
    Total(
        registry,
        "dsjax_generation_changes",
        "Changes of the mesh, by reason.",
        ("model_name", "reason"),
        lambda: [((model_name, reason), generations.counts.changes[reason]) for reason in REASONS],
    )
    Total(
        registry,
        "dsjax_generation_change_seconds",
        "Time in those, in which no step computed.",
        ("model_name",),
        lambda: [((model_name,), generations.counts.seconds)],
    )
