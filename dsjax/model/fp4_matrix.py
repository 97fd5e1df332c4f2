"""Routed experts' matrices in a packed format (NVFP4, MXFP4, INT4): ``weight``, ``scale`` and, in NVFP4, ``global_scale``."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from dsjax.fp4 import rows
from dsjax.fp4.decode import decode
from dsjax.fp4.formats import INT4, MXFP4, NVFP4, PackedFormat
from dsjax.kernels.gate import gated
from dsjax.model.fp8_product import ActivationScheme, block_product
from dsjax.model.parameters import WEIGHT_DTYPES, Declaration, reinterpret, value_of
from sharding import fp8

PARTS = ("weight", "scale", "global_scale")
PACKED = np.dtype(np.uint8)
"""Dtype of bytes that hold two values each; no other matrix has it."""


class FP4Matrix(nnx.Module):
    """A packed matrix ``[..., in, out]`` or, with gate and up fused, ``[..., in, 2, out]``, as in ``Matrix``.

    ``in`` is the packed dimension: two values a byte in ``weight``, one value a block in ``scale``.
    """

    def __init__(self, declare: Declaration, shape: tuple[int, ...], axes: tuple[str | None, ...]):
        form = declare.format.packed
        fused = axes[-2] == "stack"
        depth = len(shape) - (3 if fused else 2)

        def along_depth(divisor: int) -> tuple[int, ...]:
            return tuple(-(-size // divisor) if axis == depth else size for axis, size in enumerate(shape))

        self.weight = declare.parameter(along_depth(2), axes, init="packed", dtype=PACKED, packed=2)
        self.scale = declare.parameter(along_depth(form.block), axes, init="scale", dtype=np.dtype(form.scale_dtype))
        if form.has_global:
            of_each = [(size, name) for axis, (size, name) in enumerate(zip(shape, axes, strict=True)) if axis != depth]
            sizes, names = zip(*of_each[:-1], strict=True)
            self.global_scale = declare.parameter((*sizes, 1), (*names, None), init="scale", dtype=WEIGHT_DTYPES["f32"])

    def value(self, dtype: jnp.dtype) -> Array:
        """Return the matrix in ``dtype``."""
        arrays = {part: value_of(getattr(self, part)) for part in PARTS if hasattr(self, part)}
        return decoded(arrays, "stack" in self.weight.info.logical_axes, dtype)


def format_of(arrays: Mapping[str, Array], weight_dtype: np.dtype) -> PackedFormat | None:
    """Return the packed format of a layer's experts from their stored arrays and weight dtype; None if they are not packed."""
    if weight_dtype != PACKED:
        return None
    if any(name.endswith(".global_scale") for name in arrays):
        return NVFP4
    return next(form for form in (MXFP4, INT4) if form.scale_bytes == arrays["down.scale"].dtype.itemsize)


def meant(arrays: Mapping[str, Array], form: PackedFormat) -> dict[str, Array]:
    """Return a matrix's stored arrays with ``scale`` reinterpreted as the format's scale dtype (on CPUs it is stored as integers)."""
    return dict(arrays) | {"scale": reinterpret(arrays["scale"], np.dtype(form.scale_dtype))}


def decoded(arrays: Mapping[str, Array], fused: bool, dtype: jnp.dtype) -> Array:
    """Decode a matrix from its ``weight``, ``scale`` and ``global_scale`` to ``dtype``. fused: whether it is ``[..., in, 2, out]``."""
    depth, whole = arrays["weight"].ndim - (3 if fused else 2), arrays.get("global_scale")
    whole = whole if whole is None else jnp.expand_dims(whole, depth)
    return decode(arrays["weight"], arrays["scale"], whole, depth, dtype)


def swiglu_w4a8(
    x: Float[Array, "N D"],
    gate_up: Mapping[str, Array],
    down: Mapping[str, Array],
    scheme: ActivationScheme,
    limit: float | None = None,
) -> Float[Array, "N D"]:
    """``down(silu(gate) × up)`` of one expert in float32, with activations quantised 1 × 128 to FP8 before each product (W4A8).

    A product is ``Σ_b (values[b] · weight[b]) × scales[b]`` over blocks b of 128 along the depth, times the tensor's scale.
    ``weight[b]`` is ``value × scale`` in the dtype of ``x``: exact in bfloat16 for NVFP4 and MXFP4, rounded for INT4. The input of
    ``down`` is rounded to the dtype of ``x``, then quantised.
    """
    hidden = _w4a8(scheme.quantise(x), gate_up, x.dtype, fused=True)
    hidden = gated(hidden[..., 0, :], hidden[..., 1, :], limit).astype(x.dtype)
    return _w4a8(scheme.quantise(hidden), down, x.dtype, fused=False)


def swiglu_w4a4(
    x: Float[Array, "*x N D"], gate_up: Mapping[str, Array], down: Mapping[str, Array], limit: float | None = None
) -> Float[Array, "*x N D"]:
    """``down(silu(gate) × up)`` of one expert, or of each if ``x`` has an expert axis first, rows in NVFP4 before each product (W4A4)."""
    if x.ndim == 2:
        one = ({part: array[None] for part, array in arrays.items()} for arrays in (gate_up, down))
        return swiglu_w4a4(x[None], *one, limit)[0]
    parts = lambda arrays: (arrays["weight"], arrays["scale"], arrays["global_scale"])  # noqa: E731
    hidden = rows.product(x, *parts(gate_up))
    hidden = gated(hidden[..., 0, :], hidden[..., 1, :], limit).astype(x.dtype)
    return rows.product(hidden, *parts(down))


def _w4a8(x: fp8.Quantised, arrays: Mapping[str, Array], operands: jnp.dtype, *, fused: bool) -> Float[Array, "N *m"]:
    weight = decoded({name: array for name, array in arrays.items() if name != "global_scale"}, fused, operands)
    blocks = fp8.num_scales(weight.shape[0]), *weight.shape[1:-1], fp8.num_scales(weight.shape[-1])
    out = block_product(x, weight, jnp.ones(blocks, jnp.float32), operands)
    return out * arrays["global_scale"] if "global_scale" in arrays else out
