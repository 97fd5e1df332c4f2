"""What a start waits for before anything is compiled: each host's share of the checkpoint, at what storage and network give."""

from __future__ import annotations

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, assumed, spread
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.memory import expert_side_bytes, weight_bytes
from dsjax.plan.moves import in_one_process
from dsjax.plan.precision import Precision, of_files

_DIVIDED_BY_TP = ("attention", "dense MLP", "shared experts", "embedding and head")


def files_precision(instance: Instance) -> Precision:
    """Precision of the files that an instance is loaded from: the model's own, unless another engine loads what it can multiply by."""
    chosen = instance.options.precision
    return chosen if instance.options.engine.name in LAUNCHED else of_files(instance.config, chosen)


def host_bytes(instance: Instance) -> int:
    """Bytes of weights that the process of one host reads: each different shard that its devices hold, once.

    A process reads only what its devices hold, and a tensor that several of them hold once (`docs/many-hosts.md`). Latents' projections and
    norms are whole on every device and here counted with the heads' matrices, which `tp` divides: a little too many bytes where `tp` > 1.
    Each stage is counted as the fullest one.
    """
    layout, mesh, precision = instance.layout, instance.layout.mesh, files_precision(instance)
    drafts, per_host = instance.options.drafts > 0, instance.cluster.devices_per_host
    stages = max(1, min(mesh.num_devices, per_host) // mesh.stage_devices)
    devices = min(mesh.stage_devices, per_host)
    parts = {"experts": min(devices, mesh.stage_devices // mesh.expert_copies)}
    parts |= dict.fromkeys(_DIVIDED_BY_TP, min(mesh.tp_size, devices))
    if layout.fused:  # each device has it whole, or as many parts of it as an expert has
        parts["shared experts"] = min(mesh.expert_width_shards, devices)
    weights = weight_bytes(instance.config, layout, precision, drafts)
    beside = 0
    if layout.experts and in_one_process(
        instance.cluster, instance.cluster.experts or instance.cluster, layout.devices
    ):
        beside = layout.experts * expert_side_bytes(instance.config, layout, precision, drafts)
    return beside + stages * sum(size * parts.get(name, 1) for name, size in weights.items())


def storage_rate(cluster: Cluster) -> float:
    """Bytes a second at which one host reads a checkpoint while all do: of the cluster file, or assumed, within what its cards give."""
    if cluster.storage is not None:
        return cluster.storage
    rate = assumed(
        3e9, 1e9, 7e9, "storage, of each host", "one NVMe disk, or a client of a parallel file system", "B/s"
    )
    return min(rate, cluster.network_bandwidth * cluster.devices_per_host)


def reading(cluster: Cluster, size: float) -> Figure:
    """Seconds in which a host reads so many bytes."""
    [seconds] = spread(lambda: [size / storage_rate(cluster)])
    seconds.unit = "s"
    return seconds


def cold_start(*instances: Instance) -> Figure:
    """Seconds until each host has read its weights. Excludes compiling, and starting Python and JAX."""
    return reading(instances[0].cluster, sum(map(host_bytes, instances)))
