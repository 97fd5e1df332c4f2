"""What one call of a kernel computes and moves, written into the call, so that whoever reads a compiled program can price it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsjax.kernels.pallas import pl


@dataclass(frozen=True)
class KernelCost:
    """Operations and bytes of one call on one device.

    flops: of matrix products, a multiply-add counting two, of all tiles that are computed. dtype: of the products' operands, by
    HLO's name. bytes: of main memory read and written; what tiles side by side read again from the device's cache counts once.
    assumed: whether the figures take a length for granted that only the requests or the routing tell.
    """

    flops: float
    bytes: float
    dtype: str
    assumed: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """For ``pallas_call``: XLA keeps it in the custom call (`serialized_metadata`)."""
        return {
            "cost_flops": f"{self.flops:.0f}",
            "cost_bytes": f"{self.bytes:.0f}",
            "cost_dtype": self.dtype,
            "cost_assumed": str(int(self.assumed)),
        }

    @property
    def estimate(self) -> pl.CostEstimate:
        """Give it to JAX, and to schedulers that read it there."""
        return pl.CostEstimate(flops=int(self.flops), bytes_accessed=int(self.bytes), transcendentals=0)


def hlo_dtype(dtype) -> str:
    """HLO's short name of a floating-point dtype."""
    return {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn"}[str(dtype)]


def expected_tiles(mean_load: float, tile: int) -> float:
    """Mean number of tiles that an expert's pairs fill or begin, where their number is Poisson's: the sum of P(pairs > k × tile)."""
    # P(N = n) in logarithms: at mean loads in the thousands exp(-mean_load) is no number.
    most = math.ceil(mean_load + 12 * math.sqrt(mean_load) + 12)
    return sum(
        math.ceil(n / tile) * math.exp(n * math.log(mean_load) - mean_load - math.lgamma(n + 1))
        for n in range(1, most + 1)
    )


def power(size: float) -> int:
    """The least power of two that holds ``size``, and at least the 16 that a tensor core takes."""
    return max(16, 1 << math.ceil(math.log2(max(size, 1))))
