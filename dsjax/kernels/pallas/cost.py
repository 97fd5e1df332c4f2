"""``KernelCost``: operations and bytes of a kernel call, stored in the call, so that the dry run can price compiled programs."""

import math
from dataclasses import dataclass

from dsjax.kernels.pallas import pl


@dataclass(frozen=True)
class KernelCost:
    """Operations and bytes of one call on one device."""

    flops: float  # of the matrix products of all computed tiles; a multiply-add counts two
    # read and written in main memory; repeated reads by neighbouring tiles, from the device's cache, count once
    bytes: float
    dtype: str  # the operands' dtype by HLO's name
    assumed: bool = False  # whether the figures assume lengths that only the requests or the routing determine

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata for ``pallas_call``, which XLA keeps in the custom call (`serialized_metadata`)."""
        return {
            "cost_flops": f"{self.flops:.0f}",
            "cost_bytes": f"{self.bytes:.0f}",
            "cost_dtype": self.dtype,
            "cost_assumed": str(int(self.assumed)),
        }

    @property
    def estimate(self) -> pl.CostEstimate:
        """The cost estimate for ``pallas_call``, which XLA's schedulers read."""
        return pl.CostEstimate(flops=int(self.flops), bytes_accessed=int(self.bytes), transcendentals=0)


def hlo_dtype(dtype) -> str:
    """Return HLO's short name of a floating-point dtype."""
    return {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn"}[str(dtype)]


def expected_tiles(mean_load: float, tile: int) -> float:
    """Return the mean number of tiles for a Poisson-distributed number of an expert's pairs: the sum of P(pairs > k × tile)."""
    # P(N = n) in logarithms: exp(-mean_load) underflows at mean loads in the thousands.
    most = math.ceil(mean_load + 12 * math.sqrt(mean_load) + 12)
    return sum(
        math.ceil(n / tile) * math.exp(n * math.log(mean_load) - mean_load - math.lgamma(n + 1))
        for n in range(1, most + 1)
    )


def power(size: float) -> int:
    """Return the least power of two that is at least ``size`` and 16, the smallest size for tensor cores."""
    return max(16, 1 << math.ceil(math.log2(max(size, 1))))
