"""Metrics of the engine's state, read at each scrape: DP ranks' loads, device memory, the mesh, prefill engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dsjax.background import failure_counts
from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.serve.metrics_families import Registry, Samples, by_index

if TYPE_CHECKING:  # import JAX
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine


@dataclass
class LatestState:
    """The engine's last known state."""

    num_ranks: int  # largest number of DP ranks since the start. Removed ranks report a load of 0
    # physical experts of one device. Expert `x` is on EP rank `x // experts_per_device` (label `ep_rank`)
    experts_per_device: int
    page_bytes: int  # bytes of a KV cache page, on all devices of a DP rank
    loads: Sequence[RankLoad] = ()
    parts: dict[str, Any] = field(default_factory=dict)  # counts of the core's plugins by name (`StepStats.parts`)
    experts: ExpertCounts | None = None  # sums since recording began, kept after it stops
    compilations: int = 0
    # share of device time in collectives in the last profile; None without a profile or without operations
    exchange_share: float | None = None


def add_background_metrics(registry: Registry) -> None:
    """Add the failures of this process's background work."""
    registry.total(
        "dsjax_background_failures",
        "Failures of background work. Requests are not affected.",
        lambda: [((work,), count) for work, count in failure_counts().items()],
        "work",
    )


def add_load_metrics(registry: Registry, state: LatestState) -> None:
    """Add each DP rank's requests, cost and KV cache pages."""

    def per_rank(value: Callable[[RankLoad], float]) -> Callable[[], Samples]:
        def read() -> Samples:
            loads = {load.rank: load for load in state.loads}
            for rank in range(state.num_ranks):
                yield (str(rank),), value(loads[rank]) if rank in loads else 0.0

        return read

    registry.gauge(
        "vllm:kv_cache_usage_perc",
        "Share of KV cache pages in use by requests, from 0 to 1.",
        per_rank(lambda load: load.used_pages / load.usable_pages if load.usable_pages else 0.0),
        "engine",
    )
    for name, documentation, attribute in (
        ("vllm:num_requests_running", "Running requests, which have a slot and KV cache pages.", "running"),
        ("vllm:num_requests_waiting", "Requests in the queue of a rank.", "waiting"),
        ("dsjax_rank_waiting_tokens", "Tokens of the requests in the queue of a rank.", "waiting_tokens"),
        ("dsjax_rank_cost", "Cost of routing the next request to this DP rank; the lowest is chosen.", "cost"),
        ("dsjax_rank_pages", "KV cache pages of a rank.", "usable_pages"),
        ("dsjax_rank_pages_used", "KV cache pages in use by requests.", "used_pages"),
        ("dsjax_rank_pages_cached", "Evictable pages, kept for prefix caching only.", "cached_pages"),
    ):
        registry.gauge(name, documentation, per_rank(attrgetter(attribute)), "engine")


def add_memory_metrics(registry: Registry, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
    """Add used and available memory of each device. read: like `dsjax.engine.device.process.device_memory`."""
    registry.gauge(
        "dsjax_device_memory_used_bytes",
        "Device memory in use, in bytes.",
        lambda: [((device,), float(used)) for device, used, _ in read()],
        "device",
    )
    registry.gauge(
        "dsjax_device_memory_limit_bytes",
        "Device memory, in bytes.",
        lambda: [((device,), float(limit)) for device, _, limit in read()],
        "device",
    )


def add_generation_metrics(registry: Registry, generations: Generations, parked: ParkedRequests) -> None:
    """Add metrics of the current mesh, the wanted mesh and mesh changes. parked: requests that wait for a larger mesh."""
    ahead = generations.ahead
    for name, documentation, value in (
        ("dsjax_generation", "Mesh epoch, from 0.", lambda: generations.number),
        ("dsjax_generation_devices", "Devices of the current mesh.", lambda: generations.spec.num_devices),
        ("dsjax_generation_devices_wanted", "Devices of the requested mesh.", lambda: generations.wanted.num_devices),
        ("dsjax_generation_processes", "Processes of the current mesh.", lambda: generations.facts.num_processes),
        (
            "dsjax_requests_waiting_for_mesh",
            "Requests that do not fit the mesh and wait for a larger one.",
            lambda: len(parked),
        ),
        (
            "dsjax_compile_ahead_programs_done",
            "Programs of possible next meshes that process 0 has compiled.",
            lambda: 0 if ahead is None else ahead.done,
        ),
        (
            "dsjax_compile_ahead_programs_wanted",
            "Programs of possible next meshes that process 0 compiles ahead.",
            lambda: 0 if ahead is None else ahead.total,
        ),
        ("dsjax_generation_changing", "1 while the mesh changes and no step runs.", lambda: generations.busy),
    ):
        registry.gauge(name, documentation, lambda value=value: float(value()))
    registry.total(
        "dsjax_generation_changes",
        "Mesh changes, by reason.",
        lambda: [
            ((reason,), generations.counts.changes[reason])
            for reason in ("scale", "loss", "failure", "leave", "return")
        ],
        "reason",
    )
    registry.total(
        "dsjax_generation_weight_bytes",
        "Bytes of weights of new mesh epochs, by source.",
        lambda: [((source,), num_bytes) for source, num_bytes in sorted(generations.counts.weight_bytes.items())],
        "source",
    )
    registry.total(
        "dsjax_requests_waited_for_mesh",
        "Requests that waited for a larger mesh, by outcome: resumed, expired or aborted.",
        lambda: [((outcome,), float(parked.outcomes[outcome])) for outcome in ("resumed", "expired", "aborted")],
        "outcome",
    )
    registry.total(
        "dsjax_generation_change_seconds",
        "Duration of mesh changes, during which no step runs.",
        lambda: generations.counts.seconds,
    )


def add_prefill_metrics(registry: Registry, engines: Sequence[PrefillEngine]) -> None:
    """Add load and work of each prefill engine of this process."""

    def prompts() -> Samples:
        for index, engine in enumerate(engines):
            loads = engine.core.loads()
            for state in ("running", "waiting"):
                yield (str(index), state), float(sum(getattr(load, state) for load in loads))

    def per_engine(value: Callable[[PrefillEngine], float]) -> Callable[[], Samples]:
        return lambda: by_index(float(value(engine)) for engine in engines)

    name, label = "dsjax_prefill_engine", "prefill_engine"
    registry.gauge(
        f"{name}_up",
        "1 while the prefill engine works; 0 once it has failed and decode engines compute its prompts.",
        per_engine(lambda engine: engine.error is None),
        label,
    )
    registry.gauge(f"{name}_prompts", "Prompts of the prefill engine, by state.", prompts, label, "state")
    registry.gauge(
        f"{name}_kept_pages",
        "Pages that decode engines have not fetched yet.",
        per_engine(lambda engine: engine.buffers.num_pages_kept),
        label,
    )
    for suffix, documentation, count in (
        ("tokens", "Prompt tokens computed by the prefill engine.", "tokens"),
        ("step_seconds", "Time spent in steps of the prefill engine; the rate is its utilisation.", "seconds"),
    ):
        registry.total(f"{name}_{suffix}", documentation, per_engine(attrgetter(f"service.counts.{count}")), label)
