"""What it takes to move rows from the devices with attention to those with experts and answers back, and a batch from stage to stage.

In one process the host copies each attention device's rows for an expert device there by ``jax.device_put``, and its answers back: as many
copies as there are pairs of devices. Between processes rows and answers go through the hosts' memory, over a connection from each process
with attention to each with experts, and processes with attention wait for each other at each layer. `docs/attention-ffn-disaggregation.md`
has the exchange, `sharding/dispatch/between.py` its bytes.

Of stages (docs/pipeline.md) as many steps are under way as there are stages, each of other requests. That is as many engines as stages,
taking turns on all devices: each has the time of a step of the whole model on one stage's devices, its own requests, and its part of the
cache. So a DP rank counts as often as there are stages, with the requests of one such batch. What stages add to a step is here.
"""

from dataclasses import dataclass

from dsjax.config import ModelConfig
from dsjax.model.stage import layer_work, stages_of
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.network import network_latency
from dsjax.plan.precision import BF16
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class Moves:
    """Seconds of one move each way on the links; in which the host begins them (begin_back: and a process with attention waits until the
    others have their answers); in which it starts a program. one_call: both are one call over the one connection, and calls follow
    each other."""

    there: float
    back: float
    begin_there: float
    begin_back: float
    launch: float
    one_call: bool


def in_one_process(attention: Cluster, experts: Cluster, devices: int) -> bool:
    """Whether one process can have both sides: one kind of device, of one host."""
    return attention.hardware.key == experts.hardware.key and devices <= attention.devices_per_host


def processes_of(side: Cluster, devices: int) -> int:
    """Processes that have so many devices of a side of several processes: the fewest equal parts of which a host holds one."""
    return next(n for n in range(-(-devices // side.devices_per_host), devices + 1) if devices % n == 0)


def moves(
    attention: Cluster,
    experts: Cluster,
    senders: int,
    receivers: int,
    cells: float,
    rows: float,
    row_bytes: tuple[float, float],
) -> Moves:
    """Price one exchange of a layer, or of a micro-batch of it.

    cells: rows of a device with attention that there is room for to one device with experts, all of which travel within a process.
    rows: those that are needed, which alone travel between processes. row_bytes: there, and back.
    """
    launch = assumption("starting a program from the host")
    if in_one_process(attention, experts, senders + receivers):
        fixed = assumption("a move between devices, fixed part")
        begin = assumption("beginning a copy from the host") * senders * receivers
        rate = assumption("copies between devices, share of a link") * attention.hardware.scale_up_bandwidth
        copied = cells * max(senders, receivers)  # by the device that sends to most, or hears from most
        there, back = (copied * size / rate + fixed for size in row_bytes)
        return Moves(there, back, begin, begin, launch, one_call=False)
    # Each process with attention has a connection to each of those with experts.
    processes = processes_of(attention, senders), processes_of(experts, receivers)
    rate, way = connection(attention, experts)
    for host, connections in ((attention, processes[1]), (experts, processes[0])):
        rate = min(rate, host.network_bandwidth * host.devices_per_host / connections)
    sent = rows * senders / processes[0] * receivers / processes[1]
    there, back = (sent * size / rate + way for size in row_bytes)
    return Moves(there, back, 0.0, agreement(attention, processes[0]), launch, one_call=True)


def connection(here: Cluster, there: Cluster) -> tuple[float, float]:
    """``(bytes a second, seconds of a message beside its bytes)`` of a connection between processes of two hosts, through their memory."""
    rate = min(assumption("bytes a second of the connection"), *(one.network_gbps * 1e9 / 8 for one in (here, there)))
    return rate, assumption("a message, fixed part") + network_latency(here)


def agreement(attention: Cluster, processes: int) -> float:
    """Seconds from a process with attention having its answers of a layer to its knowing that all others have theirs."""
    if processes == 1:
        return 0.0
    return assumption("a word to and from another process with attention") * (processes - 1) + network_latency(
        attention
    )


def fullest_stage(config: ModelConfig, stages: int, mtp: bool = False) -> float:
    """Work of the stage that has most ÷ the mean: all others wait for it."""
    work, behind = layer_work(config, mtp)
    each = [
        sum(work[stage.first : stage.first + stage.layers]) + (behind if stage.ends else 0)
        for stage in stages_of(config, stages, mtp=mtp)
    ]
    return max(each) * stages / sum(each)


def cut_stage(layout: InstanceLayout, per_host: int) -> str | None:
    """Why dsjax cannot run a layout with stages on hosts of so many devices; None where it can. A stage is of one process of one host."""
    mesh = layout.mesh
    if mesh.pp_size == 1 or mesh.num_devices <= per_host or per_host % mesh.stage_devices == 0:
        return None
    return f"{mesh}: a stage of {mesh.stage_devices} devices is on several hosts of {per_host}, and dsjax has each stage in one process"


def hand_over(cluster: Cluster, mesh: MeshSpec, tokens: float, width: int, own: bool = False) -> float:
    """Seconds in which a step's hidden states go from the first stage to the last: each device sends its DP rank's to one of the next.

    own: as dsjax has it, whose processes, one a host, send those of all DP ranks over one connection.
    """
    size, hops, between, crossing = tokens * width * BF16, mesh.pp_size - 1, 0, 0.0
    share = assumption("copies between stages, share of a link")
    fixed = assumption("a copy between stages, fixed part")
    if own:
        between = -(-mesh.num_devices // cluster.devices_per_host) - 1
        rate, message = connection(cluster, cluster)
        crossing = size * mesh.dp_size / rate + message
    elif mesh.num_devices > cluster.domain:
        crossing = size / (share * cluster.network_bandwidth) + network_latency(cluster) + fixed
        # Whole stages lie beside each other in a domain, or each is as wide as one.
        between = hops if cluster.domain % mesh.stage_devices else cluster.domains_of(mesh.num_devices) - 1
    inside = size / (share * cluster.hardware.scale_up_bandwidth) + fixed
    return inside * (hops - between) + crossing * between
