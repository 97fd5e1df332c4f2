"""What a start waits for before anything is compiled: each host's share of the checkpoint, at what storage and network give."""

from __future__ import annotations

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, assumed, exact, smallest
from dsjax.plan.instance import Instance
from dsjax.plan.memory import expert_side_bytes
from dsjax.plan.moves import in_one_process

_DIVIDED_BY_TP = ("attention", "dense MLP", "shared experts", "embedding and head")


def host_bytes(instance: Instance) -> int:
    """Bytes of weights that the process of one host reads: the experts of all its devices; of the rest, each different shard once.

    A process reads only what its devices hold, and a tensor that several of them hold once (`docs/many-hosts.md`). Latents' projections and
    norms are whole on every device and here counted with the heads' matrices, which `tp` divides: a little too many bytes where `tp` > 1.
    """
    layout = instance.layout
    devices = min(layout.mesh.num_devices, instance.cluster.devices_per_host)
    shards = min(layout.mesh.tp_size, devices)
    weights = instance.memory.weights
    beside = 0
    if layout.experts and in_one_process(
        instance.cluster, instance.cluster.experts or instance.cluster, layout.devices
    ):
        drafts = instance.options.drafts > 0
        beside = layout.experts * expert_side_bytes(instance.config, layout, instance.options.precision, drafts)
    return beside + sum(
        size * (devices if name == "experts" else shards if name in _DIVIDED_BY_TP else 1)
        for name, size in weights.items()
    )


def storage_rate(cluster: Cluster) -> Figure:
    """Bytes a second at which one host reads a checkpoint while all do: of the cluster file, or assumed, within what its cards give."""
    if cluster.storage is not None:
        return exact(cluster.storage, "storage, of each host", "B/s", f"{cluster.name}: storage_gb_per_s")
    rate = assumed(
        3e9, 1e9, 7e9, "storage, of each host", "one NVMe disk, or a client of a parallel file system", "B/s"
    )
    cards = exact(cluster.network_bandwidth * cluster.devices_per_host, "a host's cards", "B/s")
    return smallest(rate, cards)


def cold_start(instance: Instance) -> Figure:
    """Seconds in which every host of an instance has read its weights. Compiling, and starting Python and JAX, are not in it."""
    size = exact(host_bytes(instance), "weights that a host reads", "B")
    return (size / storage_rate(instance.cluster)).named("cold start: reading weights", "s")
