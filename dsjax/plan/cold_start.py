"""Time of a cold start before compilation, and the time for which `dsjax serve` is silent after it loses a host of a mesh.

A start waits until each host has read its share of the checkpoint, as fast as storage and network allow. For losses see docs/many-hosts.md.
"""

from dataclasses import dataclass
from typing import Any

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, assumption, spread
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.memory import expert_side_bytes, weight_bytes
from dsjax.plan.precision import Precision, checkpoint_precision

_DIVIDED_BY_TP = ("attention", "dense MLP", "shared experts", "embedding and head")


def files_precision(instance: Instance) -> Precision:
    """Return the precision of an instance's checkpoint: the model's own, or for another engine the one it computes in."""
    precision = instance.options.precision
    return precision if instance.options.engine.name in LAUNCHED else checkpoint_precision(instance.config, precision)


def host_bytes(instance: Instance) -> int:
    """Return the bytes of weights that one host's process reads: each distinct shard on its devices, once (`docs/many-hosts.md`).

    The latents' projections and norms, replicated on every device, are counted with the heads' matrices, which `tp` divides: slightly too
    many bytes if `tp` > 1. Each stage is counted as the fullest one.
    """
    layout = instance.layout
    mesh = layout.mesh
    precision = files_precision(instance)
    drafts = instance.options.drafts > 0
    per_host = instance.cluster.devices_per_host
    stages = max(1, min(mesh.num_devices, per_host) // mesh.stage_devices)
    devices = min(mesh.stage_devices, per_host)
    parts = {"experts": min(devices, mesh.stage_devices // mesh.expert_copies)}
    parts |= dict.fromkeys(_DIVIDED_BY_TP, min(mesh.tp_size, devices))
    if layout.fused:  # each device has all of it, or it is split into as many parts as an expert
        parts["shared experts"] = min(mesh.expert_width_shards, devices)
    weights = weight_bytes(instance.config, layout, precision, drafts)
    shared_bytes = 0
    if layout.experts and layout.devices <= per_host:  # one process has both sides
        shared_bytes = layout.experts * expert_side_bytes(instance.config, layout, precision, drafts)
    return shared_bytes + stages * sum(size * parts.get(name, 1) for name, size in weights.items())


def storage_rate(cluster: Cluster) -> float:
    """Return each host's rate to read a checkpoint while all do, in bytes/s: from the cluster file, or assumed within its cards' rate."""
    if cluster.storage is not None:
        return cluster.storage
    rate = assumption("storage, of each host")
    return min(rate, cluster.network_bandwidth * cluster.devices_per_host)


def reading(cluster: Cluster, size: float) -> Figure:
    """Return the seconds in which a host reads `size` bytes."""
    [seconds] = spread(lambda: [size / storage_rate(cluster)])
    seconds.unit = "s"
    return seconds


def cold_start(*instances: Instance) -> Figure:
    """Seconds until each host has read its weights. Excludes compiling, and starting Python and JAX."""
    return reading(instances[0].cluster, sum(map(host_bytes, instances)))


@dataclass(frozen=True)
class Recovery:
    """Cost of losing one host."""

    read: Figure  # bytes of experts that the other hosts read from the checkpoint
    seconds: Figure  # without compiling
    compiling: Figure  # additional seconds unless the smaller mesh was compiled ahead, which is never the case with AFD

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        named = zip(("bytes_read", "seconds", "compiling_s"), (self.read, self.seconds, self.compiling), strict=True)
        return {name: figure.to_json() for name, figure in named}


def recovery(instance: Instance) -> Recovery | None:
    """Return the cost of losing one host; None if the loss ends the instance (one host, or stages, whose processes all end).

    With AFD, the lost host is an attention host; for a lost expert process, attention waits until it comes back.
    """
    cluster, layout = instance.cluster, instance.layout
    hosts = layout.mesh.num_devices // cluster.devices_per_host
    if hosts < 2 or layout.mesh.pp_size > 1:
        return None
    lost_bytes = 0 if layout.experts else instance.memory.weights.get("experts", 0)

    def compute() -> tuple[float, float, float]:
        # A survivor reads the experts of its new share that it did not hold. By chance it held one in `hosts` of them, because the order
        # of devices changes with each mesh epoch.
        reread_bytes = lost_bytes * layout.devices * (1 - 1 / hosts)
        seconds = assumption("noticing a process that died") + assumption("meeting, a new generation")
        if reread_bytes:
            seconds += reread_bytes / (storage_rate(cluster) * (hosts - 1))
        return reread_bytes, seconds, assumption("compiling")

    return Recovery(*spread(compute))
