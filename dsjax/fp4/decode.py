"""Packed formats on devices: matrices ``[..., in / 2, out]`` and their scales, decoded by JAX inside a program."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from dsjax.fp4.formats import INT4, INT4_OFFSET


def codes_to_values(codes: UInt8[Array, "*n"], integers: bool = False) -> Float[Array, "*n"]:
    """Decode the lower four bits of each code to float32, with operations that Mosaic and Triton support too.

    An e2m1 code ``s ee f`` with ee > 0 is a float32 with exponent ee − 1; with ee = 0 it is 0 or 0.5. integers: the codes are INT4.
    """
    code = codes.astype(jnp.uint32)
    if integers:
        return (code & 15).astype(jnp.int32).astype(jnp.float32) - INT4_OFFSET
    magnitude = code & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + jnp.uint32(126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code & 8 != 0, -value, value)


def scales_to_values(scales: Array) -> Float[Array, "*n"]:
    """Convert block scales to float32. uint8 scales are e8m0 exponents with float32's bias, where byte 0 is 0; others are numbers."""
    if scales.dtype == jnp.uint8:
        return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return scales.astype(jnp.float32)


def unpack(packed: UInt8[Array, "..."], axis: int, integers: bool = False) -> Float[Array, "..."]:
    """Decode bytes that hold two values each along ``axis``, which becomes twice as long."""
    pair = jnp.stack([codes_to_values(code, integers) for code in (packed & 15, packed >> 4)], axis=axis + 1)
    return pair.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def decode(
    packed: UInt8[Array, "..."], scales: Array, tensor_scale: Array | None, depth_axis: int, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Return ``(value × scale) × tensor_scale``, computed in float32 and rounded to ``dtype``. e2m1 × scale is exact in bfloat16.

    packed: ``[..., in / 2, (2,) out]``. depth_axis: the axis of ``in``. scales: ``[..., in / block, (2,) out]``, e4m3 (NVFP4), uint8 with
    e8m0 exponents (MXFP4) or bfloat16 (INT4). tensor_scale: float32, of each matrix, with the same leading dimensions and trailing
    dimensions of 1; None in formats without one.
    """
    values = unpack(packed, depth_axis, integers=scales.dtype == INT4.scale_dtype)
    block = values.shape[depth_axis] // scales.shape[depth_axis]
    values = values * jnp.repeat(scales_to_values(scales), block, axis=depth_axis)
    if tensor_scale is not None:
        values = values * tensor_scale
    return values.astype(dtype)
