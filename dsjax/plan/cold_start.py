"""What a start waits for before anything is compiled, and how long `dsjax serve` is silent after a host of a mesh is lost.

A start waits for each host's share of the checkpoint, at what storage and network give; for losses see docs/many-hosts.md.
"""

from dataclasses import dataclass
from typing import Any

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, assumption, spread
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.memory import expert_side_bytes, weight_bytes
from dsjax.plan.precision import Precision, of_files

_DIVIDED_BY_TP = ("attention", "dense MLP", "shared experts", "embedding and head")


def files_precision(instance: Instance) -> Precision:
    """Precision of the files that an instance is loaded from: the model's own, unless another engine loads what it can multiply by."""
    chosen = instance.options.precision
    return chosen if instance.options.engine.name in LAUNCHED else of_files(instance.config, chosen)


def host_bytes(instance: Instance) -> int:
    """Bytes of weights that the process of one host reads: each different shard that its devices hold, once (`docs/many-hosts.md`).

    Latents' projections and norms, whole on every device, are counted with the heads' matrices, which `tp` divides: a little too many bytes
    where `tp` > 1. Each stage is counted as the fullest one.
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
    if layout.experts and layout.devices <= per_host:  # one process has both sides
        beside = layout.experts * expert_side_bytes(instance.config, layout, precision, drafts)
    return beside + stages * sum(size * parts.get(name, 1) for name, size in weights.items())


def storage_rate(cluster: Cluster) -> float:
    """Bytes a second at which one host reads a checkpoint while all do: of the cluster file, or assumed, within what its cards give."""
    if cluster.storage is not None:
        return cluster.storage
    rate = assumption("storage, of each host")
    return min(rate, cluster.network_bandwidth * cluster.devices_per_host)


def reading(cluster: Cluster, size: float) -> Figure:
    """Seconds in which a host reads so many bytes."""
    [seconds] = spread(lambda: [size / storage_rate(cluster)])
    seconds.unit = "s"
    return seconds


def cold_start(*instances: Instance) -> Figure:
    """Seconds until each host has read its weights. Excludes compiling, and starting Python and JAX."""
    return reading(instances[0].cluster, sum(map(host_bytes, instances)))


@dataclass(frozen=True)
class Recovery:
    """What the loss of one host costs.

    compiling: more seconds unless the smaller mesh was compiled ahead, which is never so where experts have devices of their own.
    """

    read: Figure  # bytes of experts that the other hosts read from the checkpoint
    seconds: Figure  # without compiling
    compiling: Figure

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        named = zip(("bytes_read", "seconds", "compiling_s"), (self.read, self.seconds, self.compiling), strict=True)
        return {name: figure.to_json() for name, figure in named}


def recovery(instance: Instance) -> Recovery | None:
    """What the loss of one host costs; None where it ends the instance: of one host, or of stages, whose processes all end.

    Where experts have devices of their own, the host is one with attention, which waits for a process with experts to come back.
    """
    cluster, layout = instance.cluster, instance.layout
    hosts = layout.mesh.num_devices // cluster.devices_per_host
    if hosts < 2 or layout.mesh.pp_size > 1:
        return None
    held = 0 if layout.experts else instance.memory.weights.get("experts", 0)

    def compute() -> tuple[float, float, float]:
        # A survivor reads the experts of its new part that it did not hold. It holds one in `hosts` of them, by chance: the order of
        # devices changes with each mesh epoch.
        read = held * layout.devices * (1 - 1 / hosts)
        seconds = assumption("noticing a process that died") + assumption("meeting, a new generation")
        if read:
            seconds += read / (storage_rate(cluster) * (hosts - 1))
        return read, seconds, assumption("compiling")

    return Recovery(*spread(compute))
