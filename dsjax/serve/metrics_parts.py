"""Metrics of the engine's state, read at each scrape: loads, offload tiers, experts, drafts, the mesh, prefill engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsjax.background import failure_counts
from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.stats import DraftCounts
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts
from dsjax.serve.metrics_families import Labels, Reading, Registry, fields_of
from sharding.balancing import balancedness_of_ranks

if TYPE_CHECKING:  # import JAX
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine

_Samples = Iterable[tuple[Labels, float]]

_OF = "of=sums: the layers' means over their maxima, each summed; of=layers: mean of the layers' ratios."
"""Meaning of the label `of` of both balancedness metrics."""


@dataclass
class LatestState:
    """The engine's last known state.

    Attributes:
        num_ranks: largest number of DP ranks since the start. Removed ranks report a load of 0.
        experts_per_device: physical experts of one device. Expert `x` is on EP rank `x // experts_per_device` (label `ep_rank`).
        page_bytes: bytes of a KV cache page, on all devices of a DP rank.
        parts: counts of the core's plugins by name (`StepStats.parts`).
        experts: sums since recording began, kept after it stops.
        exchange_share: share of device time in collectives in the last profile; None without a profile or without operations.
    """

    num_ranks: int
    experts_per_device: int
    page_bytes: int
    loads: Sequence[RankLoad] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    experts: ExpertCounts | None = None
    compilations: int = 0
    exchange_share: float | None = None

    @property
    def disk(self) -> DiskCounts | None:
        """Counts of the disk tier; None without one."""
        return self.parts.get("disk")


def _only(record: Any | None) -> list[tuple[Labels, Any]]:
    """Return a record without labels for `fields_of`; an empty list if the record is None."""
    return [] if record is None else [((), record)]


def add_background_metrics(registry: Registry) -> None:
    """Add the failures of this process's background work."""
    registry.total(
        "dsjax_background_failures",
        "Failures of background work, which cost that work alone.",
        lambda: [((work,), count) for work, count in failure_counts().items()],
        "work",
    )


def add_load_metrics(registry: Registry, state: LatestState) -> None:
    """Add each DP rank's requests, cost and KV cache pages."""

    def of_ranks(value: Callable[[RankLoad], float]) -> Callable[[], _Samples]:
        def read() -> _Samples:
            loads = {load.rank: load for load in state.loads}
            for rank in range(state.num_ranks):
                yield (str(rank),), value(loads[rank]) if rank in loads else 0.0

        return read

    for name, documentation, value in (
        ("vllm:num_requests_running", "Requests that hold a slot and pages.", lambda load: load.running),
        ("vllm:num_requests_waiting", "Requests in the queue of a rank.", lambda load: load.waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the latent cache's pages that requests hold; 1 is all.",
            lambda load: load.used_pages / load.usable_pages if load.usable_pages else 0.0,
        ),
        ("dsjax_rank_waiting_tokens", "Tokens of the requests in the queue.", lambda load: load.waiting_tokens),
        (
            "dsjax_rank_cost",
            "Cost of routing the next request to this DP rank; routing takes the lowest.",
            lambda load: load.cost,
        ),
        ("dsjax_rank_pages", "Pages of the latent cache.", lambda load: load.usable_pages),
        ("dsjax_rank_pages_used", "Pages that requests hold.", lambda load: load.used_pages),
        ("dsjax_rank_pages_cached", "Pages kept for their prefix alone; evictable.", lambda load: load.cached_pages),
    ):
        registry.gauge(name, documentation, of_ranks(value), "engine")


def add_tier_metrics(registry: Registry, state: LatestState) -> None:
    """Add the contents and hits of the KV cache and of its offload tiers."""

    def hits_by_tier() -> _Samples:
        for load in state.loads:
            for tier in ("device", "host", "disk"):
                yield (str(load.rank), tier), load.hits.get(tier, 0)

    def below_device(value: Callable[[RankLoad], int]) -> Callable[[], _Samples]:
        return lambda: [
            ((str(load.rank),), value(load)) for load in state.loads if "host" in load.tiers or state.disk is not None
        ]

    def bytes_of(device_pages: Callable[[RankLoad], int], count: str) -> Callable[[], _Samples]:
        def read() -> _Samples:
            loads, disk = state.loads, state.disk
            yield ("device",), state.page_bytes * sum(device_pages(load) for load in loads)
            hosts = [load.tiers["host"] for load in loads if "host" in load.tiers]
            if hosts:
                yield ("host",), state.page_bytes * sum(getattr(host, count) for host in hosts)
            if disk is not None:
                yield ("disk",), disk.page_bytes * getattr(disk, count)

        return read

    registry.total(
        "dsjax_prefix_cache_hits",
        "Tokens of prompts that were found cached, by the tier that had them.",
        hits_by_tier,
        "engine",
        "tier",
    )
    registry.total(
        "vllm:external_prefix_cache_queries",
        "Tokens of prompts that the devices' cache did not have, so that the tiers below were asked.",
        below_device(lambda load: load.queried - load.hits["device"]),
        "engine",
    )
    registry.total(
        "vllm:external_prefix_cache_hits",
        "Tokens of prompts that a tier below the devices' cache had.",
        below_device(lambda load: sum(load.hits.values()) - load.hits["device"]),
        "engine",
    )
    registry.gauge(
        "dsjax_cache_tier_bytes",
        "Bytes of pages that hold tokens, of all ranks.",
        bytes_of(lambda load: load.used_pages + load.cached_pages, "used_pages"),
        "tier",
    )
    registry.gauge(
        "dsjax_cache_tier_limit_bytes",
        "Bytes of pages that there is room for.",
        bytes_of(lambda load: load.usable_pages, "usable_pages"),
        "tier",
    )
    _add_host_metrics(registry, state)
    _add_disk_metrics(registry, state)


def _add_host_metrics(registry: Registry, state: LatestState) -> None:
    name = "dsjax_rank_host_pages"
    count = fields_of(lambda: [((str(load.rank),), load.tiers["host"]) for load in state.loads if "host" in load.tiers])
    registry.gauge(name, "Pages that host memory has room for.", count("usable_pages"), "engine")
    registry.gauge(f"{name}_used", "Pages in host memory.", count("used_pages"), "engine")
    for what, documentation in (
        ("stored", "Pages that went from the device to host memory."),
        ("fetched", "Pages that came back from host memory."),
        ("evicted", "Pages dropped from host memory because others needed the room."),
    ):
        registry.total(f"{name}_{what}", documentation, count(what), "engine")


def _add_disk_metrics(registry: Registry, state: LatestState) -> None:
    name, count = "dsjax_disk_pages", fields_of(lambda: _only(state.disk))
    registry.gauge(name, "Pages that the disk has room for.", count("usable_pages"))
    registry.gauge(f"{name}_used", "Pages on the disk.", count("used_pages"))
    registry.gauge(f"{name}_writing", "Pages on their way to the disk.", count("writing"))
    for what, documentation in (
        ("stored", "Pages that were written to the disk."),
        ("fetched", "Pages that came back from the disk."),
        ("evicted", "Pages deleted from the disk because others needed the room."),
        ("not_written", "Pages that were not written, because the disk was too slow or had failed."),
    ):
        registry.total(f"{name}_{what}", documentation, count(what))

    def failures() -> _Samples:
        if state.disk is not None:
            for operation, field in (("read", "failed_reads"), ("write", "failed_writes"), ("late", "late")):
                yield (operation,), getattr(state.disk, field)

    registry.total(
        "dsjax_disk_failures",
        "Pages that could not be read or written, and requests that went on without pages that were late.",
        failures,
        "operation",
    )


def add_transfer_metrics(registry: Registry, state: LatestState) -> None:
    """Add transfers requested from prefill engines, by outcome."""

    counts: Callable[[], TransferCounts | None] = lambda: state.parts.get("transfers")  # noqa: E731
    count = fields_of(lambda: _only(counts()))

    def landed_bytes() -> float | None:
        return None if (transfers := counts()) is None else transfers.landed * state.page_bytes

    def ended() -> _Samples:
        if (transfers := counts()) is not None:
            yield ("completed",), transfers.completed
            yield ("given_up",), transfers.given_up - transfers.refused
            yield ("refused",), transfers.refused

    name = "dsjax_transfer"
    registry.gauge(f"{name}s_under_way", "Prompts that prefill engines compute now.", count("under_way"))
    registry.total(f"{name}_pages", "Pages that came from prefill engines.", count("pages"))
    registry.gauge(
        f"{name}_landed_bytes",
        "Bytes of chunks from prefill engines on the devices, whose pages are not in the cache yet.",
        landed_bytes,
    )
    registry.total(
        f"{name}s",
        "Prompts that prefill engines were asked for: all pages came, or the rest was computed here; refused: other pages were offered.",
        ended,
        "outcome",
    )


def add_memory_metrics(registry: Registry, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
    """Add used and available memory of each device. read: like `dsjax.engine.device.process.device_memory`."""
    registry.gauge(
        "dsjax_device_memory_used_bytes",
        "Bytes of a device's memory in use.",
        lambda: [((device,), float(used)) for device, used, _ in read()],
        "device",
    )
    registry.gauge(
        "dsjax_device_memory_limit_bytes",
        "Bytes that a device has.",
        lambda: [((device,), float(limit)) for device, _, limit in read()],
        "device",
    )


def add_expert_metrics(registry: Registry, state: LatestState) -> None:
    """Add tokens by expert and the traffic of dispatch; no samples before the first recorded step.

    The sums restart with each recording, which Prometheus treats as a counter reset. Each expert is summed over layers, because
    DeepSeek-V3 would have 15,000 samples by layer and expert; `/dump_expert_distribution_record` has each layer.
    """

    def recorded(value: Callable[[ExpertCounts], Reading]) -> Callable[[], Reading]:
        return lambda: None if state.experts is None else value(state.experts)

    def tokens(counts: ExpertCounts) -> _Samples:
        for expert, number in enumerate(counts.tokens_per_expert.sum(axis=0).tolist()):
            yield (str(expert), str(expert // state.experts_per_device)), number

    def balancedness(counts: ExpertCounts) -> _Samples:
        layers = counts.tokens_per_expert.shape[0]
        load = counts.tokens_per_expert.reshape(layers, -1, state.experts_per_device).sum(axis=2)
        ratio = balancedness_of_ranks(load)
        return [(("sums",), ratio.of_sums), (("layers",), ratio.of_layers)]

    registry.total(
        "dsjax_expert_tokens",
        "Tokens that each physical expert computed, over all MoE layers.",
        recorded(tokens),
        "expert",
        "ep_rank",
    )
    registry.total(
        "dsjax_dispatch_rows",
        "Rows of tokens that each device sent to others.",
        recorded(lambda counts: _numbered(counts.rows_sent.tolist())),
        "device",
    )
    count = fields_of(lambda: _only(state.experts))
    registry.total("dsjax_dispatch_rounds", "Rounds of dispatch, of the layer with most.", count("rounds"))
    registry.total("dsjax_dispatch_bytes", "Bytes that all devices sent to dispatch.", count("dispatch_bytes"))
    registry.gauge(
        "dsjax_dispatch_padding_share",
        "Share of the exchange's rows that held no token, since recording began.",
        count("padding_share"),
    )
    registry.gauge(
        "dsjax_expert_balancedness",
        f"Mean over max of the EP ranks' tokens since recording began; {_OF}",
        recorded(balancedness),
        "of",
    )


def add_balance_metrics(registry: Registry, state: LatestState) -> None:
    """Add the work of expert load balancing; no samples without `--enable-eplb`."""

    def known(value: Callable[[BalanceStats], Reading]) -> Callable[[], Reading]:
        return lambda: None if (stats := state.parts.get("balance")) is None else value(stats)

    def balancedness(stats: BalanceStats) -> Reading:
        ratios = [(("sums",), stats.balancedness), (("layers",), stats.layer_balancedness)]
        return ratios if stats.windows else None

    count = fields_of(lambda: _only(state.parts.get("balance")))
    for name, documentation, counted in (
        ("windows", "Windows of experts' loads that were read.", "windows"),
        ("rebalances", "Rebalances that were carried out to their end.", "rebalances"),
        ("failures", "Rebalances that were given up because an exchange failed.", "failures"),
        ("layers_changed", "Layers that were placed anew.", "layers_changed"),
        ("experts_moved", "Experts that were written to another slot.", "experts_moved"),
        ("moved_bytes", "Bytes of moved experts, over the devices of an EP group.", "bytes_moved"),
        ("exchanges", "Commands between steps that moved experts.", "exchanges"),
        ("exchange_seconds", "Time of exchanges that moved experts, in which no step computed.", "exchange_seconds"),
        ("rebalance_seconds", "Time from decisions to the last layer.", "rebalance_seconds"),
    ):
        registry.total(f"dsjax_eplb_{name}", documentation, count(counted))
    registry.gauge(
        "dsjax_eplb_layers_left", "Layers that the rebalance under way has still to change.", count("layers_left")
    )
    registry.gauge(
        "dsjax_eplb_balancedness",
        f"Mean over max of the EP ranks' tokens in the last window; {_OF}",
        known(balancedness),
        "of",
    )
    registry.gauge(
        "dsjax_eplb_rank_tokens",
        "Tokens that each EP rank computed in the last window, over all MoE layers.",
        known(lambda stats: _numbered(stats.rank_tokens)),
        "ep_rank",
    )


class DraftMetrics:
    """Drafted and accepted tokens of speculative decoding, over all ranks.

    Args:
        most_drafts: number of draft positions to export from the start, with value 0.
    """

    def __init__(self, registry: Registry, state: LatestState, most_drafts: int):
        registry.gauge(
            "dsjax_draft_tokens_chosen",
            "Tokens that each row drafts now, where the engine chooses by measurement.",
            lambda: state.parts.get("draft_choice"),
        )
        name = "vllm:spec_decode_num"
        self._rows = registry.counter(f"{name}_drafts", "Rows that had drafts to verify.")
        self._drafted = registry.counter(f"{name}_draft_tokens", "Drafted tokens that were verified.")
        self._accepted = registry.counter(f"{name}_accepted_tokens", "Drafted tokens that were accepted.")
        self._per_position = registry.counter(
            f"{name}_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the row's drafts; 0 is the first.",
            "position",
        )
        if most_drafts:
            self.count(DraftCounts(0, 0, 0, (0,) * most_drafts))

    def count(self, counts: DraftCounts) -> None:
        """Count a step's drafts."""
        self._rows.add((), counts.num_drafts)
        self._drafted.add((), counts.num_draft_tokens)
        self._accepted.add((), counts.num_accepted_tokens)
        for labels, accepted in _numbered(counts.accepted_per_position):
            self._per_position.add(labels, accepted)


def add_generation_metrics(registry: Registry, generations: Generations, parked: ParkedRequests) -> None:
    """Add metrics of the current mesh, the wanted mesh and mesh changes. parked: requests that wait for a larger mesh."""
    ahead = generations.ahead
    for name, documentation, value in (
        ("dsjax_generation", "Number of the mesh; it begins with 0.", lambda: generations.number),
        ("dsjax_generation_devices", "Devices of the mesh.", lambda: generations.spec.num_devices),
        ("dsjax_generation_devices_wanted", "Devices the mesh was to have.", lambda: generations.wanted.num_devices),
        ("dsjax_generation_processes", "Processes with a part in it.", lambda: generations.facts.num_processes),
        (
            "dsjax_requests_waiting_for_mesh",
            "Requests that the mesh cannot hold, and that wait for a larger one.",
            lambda: len(parked),
        ),
        (
            "dsjax_compile_ahead_programs_done",
            "Programs of the meshes that may come next which process 0 has.",
            lambda: 0 if ahead is None else ahead.done,
        ),
        (
            "dsjax_compile_ahead_programs_wanted",
            "Programs of the meshes that may come next that process 0 is to have.",
            lambda: 0 if ahead is None else ahead.total,
        ),
        ("dsjax_generation_changing", "1 while no step computes, as the mesh is changed.", lambda: generations.busy),
    ):
        registry.gauge(name, documentation, lambda value=value: float(value()))
    registry.total(
        "dsjax_generation_changes",
        "Changes of the mesh, by reason.",
        lambda: [
            ((reason,), generations.counts.changes[reason])
            for reason in ("scale", "loss", "failure", "leave", "return")
        ],
        "reason",
    )
    registry.total(
        "dsjax_generation_weight_bytes",
        "Weights of changed meshes, by where they came from.",
        lambda: [((source,), counted) for source, counted in sorted(generations.counts.weight_bytes.items())],
        "source",
    )
    registry.total(
        "dsjax_requests_waited_for_mesh",
        "Requests that have waited for a larger mesh, by what came of it: resumed, expired or aborted.",
        lambda: [((outcome,), float(parked.outcomes[outcome])) for outcome in ("resumed", "expired", "aborted")],
        "outcome",
    )
    registry.total(
        "dsjax_generation_change_seconds",
        "Time of changes of the mesh, in which no step computed.",
        lambda: generations.counts.seconds,
    )


def add_prefill_metrics(registry: Registry, engines: Sequence[PrefillEngine]) -> None:
    """Add load and work of each prefill engine of this process."""

    def prompts() -> _Samples:
        for number, engine in enumerate(engines):
            loads = engine.core.loads()
            for state in ("running", "waiting"):
                yield (str(number), state), float(sum(getattr(load, state) for load in loads))

    def each(value: Callable[[PrefillEngine], float]) -> Callable[[], _Samples]:
        return lambda: _numbered(float(value(engine)) for engine in engines)

    name, label = "dsjax_prefill_engine", "prefill_engine"
    registry.gauge(
        f"{name}_up",
        "1 while the prefill engine computes prompts; 0 when it has failed, and decode engines compute them.",
        each(lambda engine: engine.error is None),
        label,
    )
    registry.gauge(f"{name}_prompts", "Prompts that the prefill engine has, by state.", prompts, label, "state")
    registry.gauge(
        f"{name}_kept_pages",
        "Pages that it keeps for decode engines, which have not taken them yet.",
        each(lambda engine: engine.buffers.num_pages_kept),
        label,
    )
    registry.total(
        f"{name}_tokens",
        "Tokens of prompts that the prefill engine computed.",
        each(lambda engine: engine.service.counts.tokens),
        label,
    )
    registry.total(
        f"{name}_step_seconds",
        "Time in which the prefill engine computed: its rate is the share of time that it is busy.",
        each(lambda engine: engine.service.counts.seconds),
        label,
    )


def _numbered(values: Iterable[float]) -> _Samples:
    """Label values by their index, such as a device or a rank."""
    return [((str(number),), value) for number, value in enumerate(values)]
