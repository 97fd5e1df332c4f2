"""Metrics of the KV cache: hits and contents of its tiers, and transfers from prefill engines."""

from collections.abc import Callable

from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts
from dsjax.serve.metrics_families import Registry, Samples, field_reader, unlabelled
from dsjax.serve.metrics_parts import LatestState


def _disk(state: LatestState) -> DiskCounts | None:
    """Return the counts of the disk tier; None without one."""
    return state.parts.get("disk")


def add_tier_metrics(registry: Registry, state: LatestState) -> None:
    """Add the contents and hits of the KV cache and of its offload tiers."""

    def hits_by_tier() -> Samples:
        for load in state.loads:
            for tier in ("device", "host", "disk"):
                yield (str(load.rank), tier), load.hits.get(tier, 0)

    def offloaded(value: Callable[[RankLoad], int]) -> Callable[[], Samples]:
        return lambda: [
            ((str(load.rank),), value(load)) for load in state.loads if "host" in load.tiers or _disk(state) is not None
        ]

    def bytes_by_tier(device_pages: Callable[[RankLoad], int], field: str) -> Callable[[], Samples]:
        def read() -> Samples:
            loads = state.loads
            disk = _disk(state)
            yield ("device",), state.page_bytes * sum(device_pages(load) for load in loads)
            hosts = [load.tiers["host"] for load in loads if "host" in load.tiers]
            if hosts:
                yield ("host",), state.page_bytes * sum(getattr(host, field) for host in hosts)
            if disk is not None:
                yield ("disk",), disk.page_bytes * getattr(disk, field)

        return read

    registry.total(
        "dsjax_prefix_cache_hits", "Prompt tokens found in the prefix cache, by tier.", hits_by_tier, "engine", "tier"
    )
    registry.total(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that were not in device memory and were looked up in the offload tiers.",
        offloaded(lambda load: load.queried - load.hits["device"]),
        "engine",
    )
    registry.total(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens found in an offload tier.",
        offloaded(lambda load: sum(load.hits.values()) - load.hits["device"]),
        "engine",
    )
    registry.gauge(
        "dsjax_cache_tier_bytes",
        "Bytes of pages in use or cached, over all ranks.",
        bytes_by_tier(lambda load: load.used_pages + load.cached_pages, "used_pages"),
        "tier",
    )
    registry.gauge(
        "dsjax_cache_tier_limit_bytes",
        "Capacity of the tier in bytes, over all ranks.",
        bytes_by_tier(lambda load: load.usable_pages, "usable_pages"),
        "tier",
    )
    _add_host_metrics(registry, state)
    _add_disk_metrics(registry, state)


def _add_host_metrics(registry: Registry, state: LatestState) -> None:
    name = "dsjax_rank_host_pages"
    count = field_reader(
        lambda: [((str(load.rank),), load.tiers["host"]) for load in state.loads if "host" in load.tiers]
    )
    registry.gauge(name, "Capacity of the host memory tier, in pages.", count("usable_pages"), "engine")
    registry.gauge(f"{name}_used", "Pages in host memory.", count("used_pages"), "engine")
    for field, documentation in (
        ("stored", "Pages copied from the device to host memory."),
        ("fetched", "Pages fetched from host memory."),
        ("evicted", "Pages evicted from host memory."),
    ):
        registry.total(f"{name}_{field}", documentation, count(field), "engine")


def _add_disk_metrics(registry: Registry, state: LatestState) -> None:
    name = "dsjax_disk_pages"
    count = field_reader(lambda: unlabelled(_disk(state)))
    registry.gauge(name, "Capacity of the disk tier, in pages.", count("usable_pages"))
    registry.gauge(f"{name}_used", "Pages on the disk.", count("used_pages"))
    registry.gauge(f"{name}_writing", "Pages being written to the disk.", count("writing"))
    for field, documentation in (
        ("stored", "Pages written to the disk."),
        ("fetched", "Pages fetched from the disk."),
        ("evicted", "Pages evicted from the disk."),
        ("not_written", "Pages not written because the disk was too slow or had failed."),
    ):
        registry.total(f"{name}_{field}", documentation, count(field))

    def failures() -> Samples:
        if (disk := _disk(state)) is not None:
            yield ("read",), disk.failed_reads
            yield ("write",), disk.failed_writes
            yield ("late",), disk.late

    registry.total(
        "dsjax_disk_failures",
        "Failed reads and writes of pages, and requests that went on without late pages.",
        failures,
        "operation",
    )


def add_transfer_metrics(registry: Registry, state: LatestState) -> None:
    """Add transfers requested from prefill engines, by outcome."""

    def counts() -> TransferCounts | None:
        return state.parts.get("transfers")

    def landed_bytes() -> float | None:
        return None if (transfers := counts()) is None else transfers.landed * state.page_bytes

    def by_outcome() -> Samples:
        if (transfers := counts()) is not None:
            yield ("completed",), transfers.completed
            yield ("given_up",), transfers.given_up - transfers.refused
            yield ("refused",), transfers.refused

    name = "dsjax_transfer"
    count = field_reader(lambda: unlabelled(counts()))
    registry.gauge(f"{name}s_under_way", "Prompts that prefill engines are computing.", count("under_way"))
    registry.total(f"{name}_pages", "Pages received from prefill engines.", count("pages"))
    registry.gauge(
        f"{name}_landed_bytes", "Bytes received from prefill engines that are not in the KV cache yet.", landed_bytes
    )
    registry.total(
        f"{name}s",
        "Prompts requested from prefill engines, by outcome. given_up: the rest was computed here; refused: incompatible pages.",
        by_outcome,
        "outcome",
    )
