"""`Chip`: seconds of single operations on one device: measured efficiencies carried over to its ceilings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dsjax.hardware import Hardware
from dsjax.plan.figure import Figure, assumed, largest
from dsjax.plan.operations import (
    H800_BANDWIDTH,
    H800_FP8_FLOPS,
    decode_attention_efficiency,
    dense_efficiency,
    grouped_efficiency,
    prefill_attention_efficiency,
    product_bytes,
    roofline,
)
from dsjax.plan.precision import BF16, Precision

_HOPPER = ("h100", "h200", "h800")


@dataclass(frozen=True)
class Chip:
    """One device and the precision of its weights."""

    hardware: Hardware
    precision: Precision

    @cached_property
    def carried_over(self) -> Figure:
        """Factor on an efficiency of the H800: 1 on devices with the same die, uncertain on others."""
        if self.hardware.key in _HOPPER:
            return Figure(1.0)
        why = f"efficiencies were measured on an H800, not on {self.hardware.name}"
        return assumed(1.0, 0.8, 1.1, "carried over to this device", why)

    @cached_property
    def weak_in_compute(self) -> bool:
        """Whether it has less than half of the H800's operations for each byte that it reads: its units are easy to feed."""
        chip = self.hardware
        return chip.fp8_flops / chip.memory_bandwidth < 0.5 * H800_FP8_FLOPS / H800_BANDWIDTH

    def _compute_share(self, share: Figure) -> Figure:
        """Efficiency where operations are the bound; half of the H800's loss vanishes on a device that is easy to feed."""
        if not self.weak_in_compute:
            return share * self.carried_over
        return assumed(
            (1 + share.value) / 2,
            share.value,
            0.95,
            f"{share.name}, easy to feed" if share.name else "compute efficiency, easy to feed",
            f"{self.hardware.name} has few operations a byte: between the H800's efficiency and 0.95",
        )

    def product(self, rows: float, n: int, k: int, *, expert: bool = False) -> Figure:
        """Seconds of a dense product `[rows, k] × [k, n]` with bf16 results, weights of the precision's kind."""
        itemsize = self.precision.expert if expert else self.precision.linear
        peak, flops = self.precision.peak(self.hardware, expert), 2.0 * rows * n * k
        moved = product_bytes(rows, n, k, itemsize, min(itemsize, 2))
        share = dense_efficiency(max(1, round(rows)), n, k)
        return self._roofline(flops, moved, peak, share)

    def bf16_product(self, rows: float, n: int, k: int) -> Figure:
        """The same with bf16 weights: absorbed matrices, head, router."""
        moved = product_bytes(rows, n, k, BF16, BF16)
        share = dense_efficiency(max(1, round(rows)), n, k)
        return self._roofline(2.0 * rows * n * k, moved, self.hardware.bf16_flops, share)

    def grouped(
        self, groups: Figure | float, rows: Figure, n: int, k: int, *, gate_up: bool, contiguous: bool
    ) -> Figure:
        """Seconds of the experts' product: `rows` in all over `groups` experts whose weights are read.

        Below 192 rows an expert the efficiency is that of a dense product of as many rows; from there on, the grouped tables'.
        """
        each = rows.value / max(groups, 1e-9)
        share = dense_efficiency(max(1, round(each)), n, k) if each < 192 else grouped_efficiency(gate_up, contiguous)
        itemsize = self.precision.expert
        if itemsize < 1:
            share = assumed(0.5, 0.35, 0.65, "FP4 grouped efficiency", "no public table was at hand")
        peak = self.precision.peak(self.hardware, True)
        compute = rows * (2.0 * n * k / peak) / self._compute_share(share)
        moved = rows * (k * min(itemsize, 2) + 2.0 * n) + groups * (n * k * itemsize)
        return largest(compute, moved / (share * self.carried_over * self.hardware.memory_bandwidth))

    def _roofline(self, flops: float, moved: float, peak: float, share: Figure) -> Figure:
        bandwidth = self.hardware.memory_bandwidth
        bound_by_compute = flops / peak > moved / bandwidth
        share = self._compute_share(share) if bound_by_compute else share * self.carried_over
        return roofline(flops, moved, peak, bandwidth) / share

    def decode_attention(self, flops: float, read: float) -> Figure:
        """Absorbed attention on cached latents: `read` bytes of cache, operations in bf16."""
        of_bandwidth, of_peak = decode_attention_efficiency()
        compute = flops / (self._compute_share(of_peak) * self.hardware.bf16_flops)
        return largest(compute, read / (of_bandwidth * self.carried_over * self.hardware.memory_bandwidth))

    def prefill_attention(self, flops: float) -> Figure:
        """Naive causal attention in bf16."""
        return flops / (self._compute_share(prefill_attention_efficiency()) * self.hardware.bf16_flops)

    def stream(self, moved: float) -> Figure:
        """Norms, quantisation, rotation, permutation: `moved` bytes through memory."""
        share = assumed(
            0.75, 0.55, 0.9, "element-wise share of bandwidth", "at best a plain copy: 4.3 of 4.8 TB/s, H200"
        )
        return moved / (share * self.carried_over * self.hardware.memory_bandwidth)
