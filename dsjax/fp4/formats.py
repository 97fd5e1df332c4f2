"""What NVFP4 and MXFP4 are, and what ``--weights`` calls them. It needs no JAX: planner and configuration read it, too."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 6.0
"""The largest e2m1 value."""
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The e2m1 values of codes 0 to 7; codes 8 to 15 are their negatives (OCP Microscaling Formats 1.0, section 5.3.3)."""
E4M3_LARGEST = 448.0
E8M0_BIAS = 127


@dataclass(frozen=True)
class FP4Format:
    """A format of e2m1 values, two a byte, of which ``block`` along the depth share a scale.

    scale_dtype: NumPy's or ml_dtypes' name of a scale's dtype; ``uint8`` is the byte of an e8m0 exponent.
    has_global: whether a tensor has a float32 scale of its own, too.
    """

    name: str
    block: int
    scale_dtype: str
    has_global: bool

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a value with its share of the block's scale; the tensor's own 4 bytes are left out."""
        return 0.5 + 1 / self.block


NVFP4 = FP4Format("nvfp4", 16, "float8_e4m3fn", has_global=True)
MXFP4 = FP4Format("mxfp4", 32, "uint8", has_global=False)
FORMATS = {form.name: form for form in (NVFP4, MXFP4)}
UNQUANTISED = "-bf16"
"""Ending of the names of weights of which only the routed experts are quantised."""


def experts_format(weights: str) -> FP4Format | None:
    """The format of the routed experts of ``weights``; None where they are not FP4."""
    return FORMATS.get(weights.removesuffix(UNQUANTISED))
