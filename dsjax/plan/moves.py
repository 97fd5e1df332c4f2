"""What it takes to move rows from the devices with attention to those with experts, and answers back, as dsjax does it.

In one process the host copies each attention device's rows for an expert device there by ``jax.device_put``, and its answers back: as many
copies as there are pairs of devices. Between processes rows and answers go through the hosts' memory, over a connection from each process
with attention to each with experts, and processes with attention wait for each other at each layer. `docs/attention-ffn-disaggregation.md`
has the exchange, `sharding/dispatch/between.py` its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumed
from dsjax.plan.network import network_latency
from dsjax.plan.operations import low_latency_fit


@dataclass(frozen=True)
class Moves:
    """Seconds of one move each way: there, back on the links; begin_there, begin_back: in which the host begins them, and in which a
    process with attention whose answers are back waits until the others have theirs.

    launch: in which the host starts one program. one_call: both are one call over the one connection, and calls follow each other.
    """

    there: float
    back: float
    begin_there: float
    begin_back: float
    launch: float
    one_call: bool


def in_one_process(attention: Cluster, experts: Cluster, devices: int) -> bool:
    """Whether one process can have both sides: one kind of device, of one host."""
    return _among_each_other(attention, experts) and devices <= attention.devices_per_host


def _among_each_other(attention: Cluster, experts: Cluster) -> bool:
    """Whether experts are on devices of the hosts with attention. They are not where the cluster has hosts for them beside these, of
    whatever device."""
    return attention.experts is None and attention.hardware.key == experts.hardware.key


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
    if in_one_process(attention, experts, senders + receivers):
        there, back = (cells * size for size in row_bytes)
        return _between_devices(attention, senders, receivers, there, back)
    processes = processes_of(attention, senders), processes_of(experts, receivers)
    of_one = senders / processes[0] * receivers / processes[1]
    there, back = (rows * of_one * size for size in row_bytes)
    return _between_processes(attention, experts, processes, there, back)


def launch() -> float:
    """Seconds in which the host starts a program."""
    why = (
        "jax.jit's call on flat leaves: 0.2 ms for 200 parameters on emulated devices, not timed on a GPU; a layer's "
        "programs take 10 to 40 arrays"
    )
    return assumed(60e-6, 20e-6, 200e-6, "starting a program from the host", why, "s")


def _between_devices(cluster: Cluster, senders: int, receivers: int, there: float, back: float) -> Moves:
    share = assumed(0.6, 0.35, 0.85, "copies between devices, share of a link", "jax.device_put, not timed on a GPU")
    fixed = assumed(10e-6, 5e-6, 30e-6, "a move between devices, fixed part", "a small copy and the wait for it", "s")
    each = assumed(10e-6, 3e-6, 30e-6, "beginning a copy from the host", "jax.device_put, not timed on a GPU", "s")
    rate = share * cluster.hardware.scale_up_bandwidth
    busiest = max(senders, receivers)  # devices that one device sends to, or hears from
    begin = each * senders * receivers
    return Moves(
        there * busiest / rate + fixed,
        back * busiest / rate + fixed,
        begin, begin, launch(), one_call=False,
    )  # fmt: skip


def connection(here: Cluster, there: Cluster) -> tuple[float, float]:
    """``(bytes a second, seconds of a message beside its bytes)`` of a connection between processes of two hosts, through their memory."""
    stream = assumed(
        5e9, 2.5e9, 6e9, "bytes a second of the connection",
        "18 MB there and back in 7.1 ms by ZeroMQ without encryption, over loopback on two shared cores", "B/s",
    )  # fmt: skip
    card = min(one.network_gbps for one in (here, there)) * 1e9 / 8
    rate = min(stream, card)
    fixed = assumed(
        79e-6, 40e-6, 400e-6, "a message, fixed part", "64 B there and back by ZeroMQ take 79 µs; copies to and from a device", "s"
    )  # fmt: skip
    return rate, fixed + network_latency(here)


def _between_processes(
    attention: Cluster, experts: Cluster, processes: tuple[int, int], there: float, back: float
) -> Moves:
    """processes: with attention, and with experts; each of these has a connection to each of those."""
    rate, way = connection(attention, experts)
    for host, connections in ((attention, processes[1]), (experts, processes[0])):
        cards = host.network_bandwidth * host.devices_per_host / connections
        rate = min(rate, cards)
    return Moves(
        there / rate + way,
        back / rate + way,
        0.0, agreement(attention, processes[0]), launch(), one_call=True,
    )  # fmt: skip


def agreement(attention: Cluster, processes: int) -> float:
    """Seconds from a process with attention having its answers of a layer to its knowing that all others have theirs."""
    if processes == 1:
        return 0.0
    each = assumed(
        79e-6, 40e-6, 200e-6, "a word to and from another process with attention",
        "64 B there and back by ZeroMQ, over loopback on two shared cores; a process that is late is waited for", "s",
    )  # fmt: skip
    return each * (processes - 1) + network_latency(attention)


# MegaScale-Infer (arXiv 2504.02263), Step-3 with StepMesh (arXiv 2507.19427) and Baidu Baige's AFD send rows from device to device
# without a host between; Baige's cross to a host once and are spread inside it. They publish no times of a move, so that those of
# DeepEP's low-latency kernels stand here
def published_moves(
    attention: Cluster,
    experts: Cluster,
    senders: int,
    receivers: int,
    rows: float,
    top_k: int,
    row_bytes: tuple[float, float],
    slowest: float,
) -> Moves:
    """Price one exchange as others have it: a row once to each host that has one of its experts, or within a domain to each device.

    rows: of one attention device. row_bytes: there, and back. slowest: load of the busiest expert device ÷ the mean.
    """
    near = _among_each_other(attention, experts) and senders + receivers <= attention.domain
    places = receivers if near else -(-receivers // experts.devices_per_host)
    copies = places * (1 - (1 - 1 / places) ** top_k)
    ways = []
    for size, combine in zip(row_bytes, (False, True), strict=True):
        fixed, network, link = low_latency_fit(combine)
        leaving = rows * copies * size
        arriving = (rows * senders * copies * size / receivers) * slowest
        if near:
            seconds = max(leaving, arriving) / (link * attention.hardware.scale_up_bandwidth)
        else:
            far = attention.between(attention.num_devices)
            out, into = leaving / (network * far.network_bandwidth), arriving / (network * experts.network_bandwidth)
            seconds = max(out, into) + network_latency(far)
        ways.append(seconds + fixed)
    return Moves(*ways, 0.0, 0.0, 0.0, one_call=False)
