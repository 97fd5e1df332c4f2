"""Packed formats on devices: matrices ``[..., in / 2, out]`` and their scales, decoded by JAX inside a program."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from dsjax.fp4.formats import INT4, INT4_OFFSET


def codes_to_values(codes: UInt8[Array, "*n"], integers: bool = False) -> Float[Array, "*n"]:
    """Codes (the lower four bits) as float32, by arithmetic that Mosaic and Triton have as well.

    An e2m1 code with an exponent, ``s ee f``, is the float32 of exponent ee − 1; the two without one are 0 and 0.5.
    """
    code = codes.astype(jnp.uint32)
    if integers:
        return (code & 15).astype(jnp.int32).astype(jnp.float32) - INT4_OFFSET
    magnitude = code & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + jnp.uint32(126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code & 8 != 0, -value, value)


def scales_to_values(scales: Array) -> Float[Array, "*n"]:
    """Block scales as float32: e4m3 or bfloat16 numbers, or bytes of e8m0 exponents, whose bias is float32's. Byte 0 stands for 0."""
    if scales.dtype == jnp.uint8:
        return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return scales.astype(jnp.float32)


def unpack(packed: UInt8[Array, "..."], axis: int, integers: bool = False) -> Float[Array, "..."]:
    """The values of bytes that hold two along ``axis``, which becomes twice as long."""
    pair = jnp.stack([codes_to_values(code, integers) for code in (packed & 15, packed >> 4)], axis=axis + 1)
    return pair.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def decode(
    packed: UInt8[Array, "..."], scales: Array, whole: Float[Array, "..."] | None, depth_axis: int, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """``(value × scale) × whole`` in float32, rounded to ``dtype``: of e2m1 values bfloat16 rounds only where there is a ``whole``.

    packed: ``[..., in / 2, (2,) out]``; depth_axis: of ``in``. scales: the same shape with blocks for bytes, e4m3, e8m0's byte, or
    bfloat16, of which values are integers. whole: one value for each matrix, with the same leading dimensions and ones behind; None in a
    format that has none.
    """
    values = unpack(packed, depth_axis, integers=scales.dtype == INT4.scale_dtype)
    block = values.shape[depth_axis] // scales.shape[depth_axis]
    values = values * jnp.repeat(scales_to_values(scales), block, axis=depth_axis)
    if whole is not None:
        values = values * whole
    return values.astype(dtype)
