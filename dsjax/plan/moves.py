"""Times of exchanges in attention–FFN disaggregation (AFD), and the time that pipeline stages add to a step.

AFD in one process: the host copies rows from attention to expert devices with ``jax.device_put``, and the answers back, one copy for each
pair of devices. AFD between processes: rows and answers pass through host memory, over one connection from each attention process to each
expert process; the attention processes wait for each other in each layer. `docs/attention-ffn-disaggregation.md` describes the exchange,
`sharding/dispatch/between.py` its bytes.

Pipeline stages (docs/pipeline.md) compute steps of different requests at the same time. They are priced as one engine per stage, all
sharing the devices: each has its own requests and its part of the cache, and its step takes as long as a step of the whole model on one
stage's devices. So a DP rank counts once per stage.
"""

from dataclasses import dataclass

from dsjax.config import ModelConfig
from dsjax.model.stage import layer_work, stages_of
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumption
from dsjax.plan.network import network_latency
from dsjax.plan.precision import BF16
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class AfdExchange:
    """Seconds of one exchange: on the links each way, of the host starting the copies each way, and of the host launching a program."""

    there: float
    back: float
    begin_there: float = 0.0
    begin_back: float = 0.0  # including the wait for other attention processes' answers
    launch: float = 0.0
    one_call: bool = False  # rows and answers are one call over a connection, which carries one call at a time


def in_one_process(attention: Cluster, experts: Cluster, devices: int) -> bool:
    """Return whether one process can run both sides: devices of one kind on one host."""
    return attention.hardware.key == experts.hardware.key and devices <= attention.devices_per_host


def processes_of(side: Cluster, devices: int) -> int:
    """Return the number of processes of a side: the fewest equal parts of its devices that each fit a host."""
    return next(n for n in range(-(-devices // side.devices_per_host), devices + 1) if devices % n == 0)


def afd_exchange(
    attention: Cluster,
    experts: Cluster,
    senders: int,
    receivers: int,
    cells: float,
    rows: float,
    row_bytes: tuple[float, float],
) -> AfdExchange:
    """Price one exchange of a layer, or of a micro-batch of it.

    cells: row capacity from one attention device to one expert device, all of which is copied within a process. rows: the rows needed;
    between processes only these are sent. row_bytes: bytes of a row, there and back.
    """
    launch = assumption("starting a program from the host")
    if in_one_process(attention, experts, senders + receivers):
        fixed = assumption("a move between devices, fixed part")
        begin = assumption("beginning a copy from the host") * senders * receivers
        rate = assumption("copies between devices, share of a link") * attention.hardware.scale_up_bandwidth
        copied = cells * max(senders, receivers)  # of the device with most copies
        there, back = (copied * size / rate + fixed for size in row_bytes)
        return AfdExchange(there, back, begin, begin, launch, one_call=False)
    # Each attention process has a connection to each expert process.
    processes = processes_of(attention, senders), processes_of(experts, receivers)
    rate, message = connection(attention, experts)
    for host, connections in ((attention, processes[1]), (experts, processes[0])):
        rate = min(rate, host.network_bandwidth * host.devices_per_host / connections)
    sent = rows * senders / processes[0] * receivers / processes[1]
    there, back = (sent * size / rate + message for size in row_bytes)
    return AfdExchange(there, back, 0.0, agreement(attention, processes[0]), launch, one_call=True)


def connection(sender: Cluster, receiver: Cluster) -> tuple[float, float]:
    """Return ``(bytes per second, fixed seconds of a message)`` of a connection between processes of two hosts, through host memory."""
    rate = min(
        assumption("bytes a second of the connection"), *(side.network_gbps * 1e9 / 8 for side in (sender, receiver))
    )
    return rate, assumption("a message, fixed part") + network_latency(sender)


def agreement(attention: Cluster, processes: int) -> float:
    """Return the seconds of the layer barrier, in which attention processes tell each other that they have a layer's answers."""
    if processes == 1:
        return 0.0
    return assumption("a word to and from another process with attention") * (processes - 1) + network_latency(
        attention
    )


def fullest_stage(config: ModelConfig, stages: int, mtp: bool = False) -> float:
    """Work of the largest stage ÷ the mean of all stages."""
    work, last_stage_work = layer_work(config, mtp)
    stage_work = [
        sum(work[stage.first : stage.first + stage.layers]) + (last_stage_work if stage.is_last else 0)
        for stage in stages_of(config, stages, mtp=mtp)
    ]
    return max(stage_work) * stages / sum(stage_work)


def hand_over(cluster: Cluster, mesh: MeshSpec, tokens: float, width: int, is_dsjax: bool = False) -> float:
    """Return the seconds to pass a step's hidden states from the first stage to the last; each device sends those of its DP rank.

    is_dsjax: as in dsjax, where each process sends the hidden states of all DP ranks to the next process over one connection.
    """
    size = tokens * width * BF16
    hops = mesh.pp_size - 1
    between = 0
    crossing = 0.0
    share = assumption("copies between stages, share of a link")
    fixed = assumption("a copy between stages, fixed part")
    if is_dsjax:
        between = -(-mesh.num_devices // cluster.devices_per_host) - 1
        rate, message = connection(cluster, cluster)
        crossing = size * mesh.dp_size / rate + message
    elif mesh.num_devices > cluster.domain:
        crossing = size / (share * cluster.network_bandwidth) + network_latency(cluster) + fixed
        # A domain holds whole stages, or a stage spans whole domains.
        between = hops if cluster.domain % mesh.stage_devices else cluster.domains_of(mesh.num_devices) - 1
    inside = size / (share * cluster.hardware.scale_up_bandwidth) + fixed
    return inside * (hops - between) + crossing * between
