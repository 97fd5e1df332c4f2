"""Seconds of a compiled program's operations and collectives on a target, from rooflines, link bandwidths and assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsjax.dryrun.program import OperationCost, ProgramCollective
from dsjax.dryrun.program.costs import bytes_moved, products
from dsjax.dryrun.program.text import Computation, Operation, Program
from dsjax.hardware import Hardware
from dsjax.hardware.description import UNITS
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Draw, Figure, Kind, assumed, drawing
from dsjax.plan.network import collective_start, network_latency, torus_hops

INSIDE, BETWEEN = "network inside", "network between"

COPIES = "copies"
"""Thread of asynchronous copies, which run beside the compute thread."""
FigureEnd = Literal["low", "value", "high"]


def carried_bytes(collective: ProgramCollective) -> tuple[float, float, int]:
    """Return ``(bytes over a device's scale-up link, bytes through its share of the network, number of sequential latencies)``.

    An all-to-all sends every row directly to its destination. An all-gather sends each row to a host once, through one of its NICs, and
    forwards it over the scale-up links; a reduce-scatter does the reverse; an all-reduce is both in sequence. These are the bytes of
    rings over hosts (NCCL's algorithms for many ranks); a direct exchange would send each row to every rank of a host.
    """
    n, h = collective.ranks, collective.neighbours
    hosts = -(-n // h)
    size = collective.operand_bytes
    if collective.kind in ("all-gather", "collective-broadcast"):
        return (size * (n - 1) if h > 1 else 0), size * (n - h) / h, hosts - 1
    part = size / n
    if collective.kind == "reduce-scatter":
        return (part * (n - 1) if h > 1 else 0), part * (n - h) / h, hosts - 1
    if collective.kind == "all-reduce":
        return (2 * part * (n - 1) if h > 1 else 0), 2 * part * (n - h) / h, 2 * (hosts - 1)
    return collective.bytes_inside, collective.bytes_between, min(hosts - 1, 1) if collective.bytes_between else 0


@dataclass(frozen=True)
class Assumed:
    """All inputs of a price except the program's bytes and operations. Shares are fractions of the ceilings."""

    peaks: Mapping[int, Figure]
    """Peak operations per second by bits of the operands, the keys of `dsjax.hardware.description.UNITS`."""
    f32_flops: Figure
    memory_bandwidth: Figure
    scale_up_bandwidth: Figure
    network_bandwidth: Figure
    product_share: Figure
    memory_share: Figure
    link_share: Figure
    network_share: Figure
    launch: Figure
    loop_iteration: Figure
    fixed_inside: Figure
    fixed_between: Figure
    latency: Figure
    hops: Figure
    host_link: Figure
    host_turn: Figure

    @classmethod
    @drawing(Draw())  # makes the inputs figures with ranges
    def of(cls, cluster: Cluster) -> Assumed:
        """Return the assumptions for a cluster's device and links."""
        chip = cluster.hardware
        is_cuda = chip.platform == "cuda"
        ceiling = chip.sources
        return cls(
            peaks={bits: _peak_figure(chip, bits) for bits in sorted(UNITS, reverse=True)},
            f32_flops=assumed(
                chip.bf16_flops / 16, chip.bf16_flops / 32, chip.bf16_flops / 6, "float32 operations a second",
                "exact float32 products: vector units, or several bf16 products",
            ),
            memory_bandwidth=_ceiling(chip.memory_bandwidth, "bytes a second of memory", ceiling["memory_bandwidth"]),
            scale_up_bandwidth=_ceiling(
                chip.scale_up_bandwidth, "bytes a second of scale-up links", ceiling["scale_up_bandwidth"]
            ),
            network_bandwidth=_ceiling(
                cluster.network_bandwidth, "bytes a second of the network", cluster.sources["network_gbps"]
            ),
            product_share=assumed(0.65, 0.45, 0.85, "products, share of peak", "XLA's Triton and cuBLAS kernels, untuned"),
            memory_share=assumed(
                0.75, 0.55, 0.9, "share of memory bandwidth", "at best a plain copy: 4.3 of 4.8 TB/s, H200"
            ),
            link_share=assumed(0.6, 0.35, 0.85, "collectives, share of a scale-up link", "NCCL, or ICI, launched by XLA"),
            network_share=assumed(0.6, 0.35, 0.8, "collectives, share of the network", "NCCL, launched by XLA"),
            launch=assumed(2e-6, 1e-6, 4e-6, "between two kernels", "launches of a CUDA graph", "s")
            if is_cuda
            else assumed(0.5e-6, 0.1e-6, 1e-6, "between two operations", "one program on the core, no launches", "s"),
            loop_iteration=assumed(
                10e-6, 5e-6, 25e-6, "a turn of a loop of unknown length", "the host reads the condition back", "s"
            )
            if is_cuda
            else assumed(1e-6, 0.2e-6, 2e-6, "a turn of a loop of unknown length", "the core branches itself", "s"),
            fixed_inside=collective_start(between=False),
            fixed_between=collective_start(between=True),
            latency=network_latency(cluster),
            hops=_named(torus_hops(cluster), "links that a row crosses"),
            host_link=assumed(25e9, 12e9, 50e9, "bytes a second between a device and its host", "PCIe 5.0 × 16, shared or not"),
            host_turn=assumed(
                50e-6, 20e-6, 200e-6, "a lookup by the host in a step, fixed part", "two copies and a thread that wakes", "s"
            ),
        )  # fmt: skip

    def figures(self) -> list[Figure]:
        """List all figures, in the order of their declaration."""
        others = [getattr(self, name) for name in self.__dataclass_fields__ if name != "peaks"]
        return [*self.peaks.values(), *others]


def _peak_figure(chip: Hardware, bits: int) -> Figure:
    unit = chip.unit(bits)
    own = UNITS[bits].removesuffix("_flops")
    name = own.upper() if own.startswith("fp") else own
    return _ceiling(chip.peaks[unit], f"{name} operations a second", chip.sources[unit])


def _named(figure: float, name: str) -> Figure:
    if not isinstance(figure, Figure):
        return Figure(figure, name=name)
    return Figure(figure, figure.low, figure.high, figure.kinds, name=name, source=figure.source)


def _ceiling(value: float, name: str, source: str) -> Figure:
    """Return a ceiling with its source, which is often an assumption for networks."""
    kind = Kind.ASSUMPTION if source.startswith("assumption") else Kind.EXACT
    return Figure(value, kinds=kind, name=name, source=source)


@dataclass(frozen=True)
class TargetPrices:
    """Prices of one target, at the fast end, the middle or the slow end of all assumptions.

    An operation takes max(operations ÷ peak, bytes ÷ bandwidth) plus a launch. A collective takes, on each link that it uses, a fixed
    time plus bytes ÷ bandwidth, and between hosts one latency per crossing.
    """

    assumed: Assumed
    end: FigureEnd = "value"
    ragged_share: float = 1.0  # fraction of a ragged all-to-all's maximum that even routing sends

    def operation(self, program: Program, computation: Computation, operation: Operation) -> OperationCost:
        """Return the cost of an operation on the compute thread."""
        flops = compute = 0.0
        for dtype, count in products(program, computation, operation):
            flops += count
            compute += count / self._peak(dtype)
        compute /= self._rate(self.assumed.product_share)
        size = bytes_moved(program, computation, operation)
        memory = size / self._memory
        launch = self._time(self.assumed.launch)
        bound = "launch" if launch > max(compute, memory) else "operations" if compute > memory else "memory"
        return OperationCost(max(compute, memory) + launch, flops, size, bound)

    def copy(self, computation: Computation, operation: Operation) -> Mapping[str, OperationCost]:
        """Return the cost of an asynchronous copy (its result read and written) or of a host computation (its result transferred)."""
        if operation.opcode == "custom-call-start":
            size = max((shape.nbytes for shape in operation.shapes if not shape.space), default=0)
            seconds = size / self._rate(self.assumed.host_link) + self._time(self.assumed.host_turn)
            return {COPIES: OperationCost(seconds, 0.0, size, "host")}
        size = 2 * max((shape.nbytes for shape in operation.shapes), default=0)
        return {COPIES: OperationCost(size / self._memory + self._time(self.assumed.launch), 0.0, size, "memory")}

    def loop_overhead(self, loop: Operation, known: bool) -> OperationCost:
        """Return the overhead of a loop iteration: 0 if the trip count is known in advance."""
        return OperationCost(0.0 if known else self._time(self.assumed.loop_iteration), bound="host")

    def transfer(self, collective: ProgramCollective) -> Mapping[str, OperationCost]:
        """Return a collective's cost inside the scale-up domain, between domains, or both at once."""
        share = self.ragged_share if collective.kind == "ragged-all-to-all" else 1.0
        inside, between, crossings = carried_bytes(collective)
        return self.links(share * inside, share * between, crossings)

    def links(self, inside: float, between: float, crossings: int) -> dict[str, OperationCost]:
        """Return the cost of bytes over a device's scale-up link, and of bytes and latencies over its share of the network."""
        costs = {}
        a = self.assumed
        if inside:
            moving = inside * self._time(a.hops) / (self._rate(a.scale_up_bandwidth) * self._rate(a.link_share))
            fixed = self._time(a.fixed_inside)
            costs[INSIDE] = OperationCost(fixed + moving, 0.0, inside, "latency" if fixed > moving else "bandwidth")
        if between:
            moving = between / (self._rate(a.network_bandwidth) * self._rate(a.network_share))
            fixed = self._time(a.fixed_between) + crossings * self._time(a.latency)
            costs[BETWEEN] = OperationCost(fixed + moving, 0.0, between, "latency" if fixed > moving else "bandwidth")
        return costs

    def copied(self, size: float) -> float:
        """Return the seconds to read and write ``size`` bytes on the device, including a launch."""
        return 2 * size / self._memory + self._time(self.assumed.launch)

    @property
    def _memory(self) -> float:
        return self._rate(self.assumed.memory_bandwidth) * self._rate(self.assumed.memory_share)

    def _peak(self, dtype: str) -> float:
        if dtype in ("f32", "f64"):
            return self._rate(self.assumed.f32_flops)
        return self._rate(self.assumed.peaks[{"f4": 4, "f8": 8, "s8": 8, "u8": 8}.get(dtype[:2], 16)])

    def _time(self, figure: Figure) -> float:
        return getattr(figure, self.end)

    def _rate(self, figure: Figure) -> float:
        """Return the rate for ``end``; the high end of a rate gives the low end of a time."""
        return getattr(figure, {"low": "high", "value": "value", "high": "low"}[self.end])


def even_ragged_share(ranks: int, top_k: int) -> float:
    """Return a token's rows under even routing ÷ its maximum. A token sends one row to each rank with one of its experts."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k) / min(ranks, top_k)


def default_cluster(hardware: Hardware, devices: int) -> Cluster:
    """Return a cluster with enough hosts for ``devices``, and the network that the hardware file assumes."""
    hosts = math.ceil(devices / hardware.devices_per_host)
    return Cluster(
        name=f"{hardware.key} × {devices}",
        description=f"{hosts} hosts × {hardware.devices_per_host} {hardware.name}, as its file describes it",
        hardware=hardware,
        hosts=hosts,
        devices_per_host=hardware.devices_per_host,
        scale_up_devices=max(hardware.scale_up_devices, hardware.devices_per_host),
        network="assumption: InfiniBand through one or two switches",
        network_gbps=hardware.scale_out_gbps,
        nics_per_host=hardware.devices_per_host,
        latency=2e-6,
        latency_low=1e-6,
        latency_high=5e-6,
        sources={"network_gbps": hardware.sources.get("scale_out_gbps", "the hardware's file")},
    )
