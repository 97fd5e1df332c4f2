"""The packed formats NVFP4, MXFP4 and INT4, and their ``--weights`` names. Imports no JAX: used by the planner and the configuration."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 6.0
"""The largest e2m1 value."""
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The e2m1 values of codes 0 to 7; codes 8 to 15 are their negatives (OCP Microscaling Formats 1.0, section 5.3.3)."""
E4M3_LARGEST = 448.0
E8M0_BIAS = 127
INT4_OFFSET = 8
"""The code of the integer 0: codes 0 to 15 are −8 to 7, as compressed-tensors packs them (``pack_to_int32``)."""
INT4_HALF_RANGE = 7.5
"""Ratio of a block's largest magnitude to its scale: half of the 15 steps from −8 to 7."""


@dataclass(frozen=True)
class PackedFormat:
    """A format of four-bit values, two per byte, with one scale per ``block`` values along the depth."""

    name: str
    block: int
    # NumPy or ml_dtypes name of the scale's dtype, different in each format; ``uint8`` is the byte of an e8m0 exponent
    scale_dtype: str
    has_global: bool = False  # whether a tensor also has a float32 scale
    integers: bool = False  # whether values are integers instead of e2m1 numbers

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale."""
        return 2 if self.scale_dtype == "bfloat16" else 1

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value, including its share of the block's scale but not the tensor's 4-byte scale."""
        return 0.5 + self.scale_bytes / self.block


NVFP4 = PackedFormat("nvfp4", 16, "float8_e4m3fn", has_global=True)
MXFP4 = PackedFormat("mxfp4", 32, "uint8")
INT4 = PackedFormat("int4", 32, "bfloat16", integers=True)
FORMATS = {form.name: form for form in (NVFP4, MXFP4, INT4)}
UNQUANTISED = "-bf16"
"""Suffix of ``--weights`` names that quantise only the routed experts."""


def experts_format(weights: str) -> PackedFormat | None:
    """Return the format of the routed experts of ``weights``; None if they are not packed."""
    return FORMATS.get(weights.removesuffix(UNQUANTISED))


def with_scales_of(dtype: str) -> PackedFormat:
    """Return the format whose block scales have a dtype.

    Raises:
        StopIteration: no format has scales of this dtype.
    """
    return next(form for form in FORMATS.values() if form.scale_dtype == dtype)
