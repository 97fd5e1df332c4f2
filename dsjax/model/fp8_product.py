"""Products in FP8: activations quantised 1 × 128 times weights quantised 128 × 128, the definition of ``--activation-scheme dynamic``.

DeepSeek-V3 technical report, section 3.3: operands in e4m3, one scale per 128 values of a row and per 128 × 128 weights, and sums
promoted to float32 after each 128 of the depth (``act_quant`` and ``fp8_gemm`` of its published inference code). Every e4m3 number and
every product of two fits float32, so devices without FP8 compute the same by widening: only the order of 128 additions differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dsjax.kernels.gate import gated
from dsjax.model.parameters import expand_blocks
from sharding import fp8


@dataclass(frozen=True)
class ActivationScheme:
    """How activations are quantised before products with FP8 weights (``quantization_config.activation_scheme``)."""

    # scales are computed from the values at run time. False: activations are not quantised, and weights are widened
    dynamic: bool = False
    powers: bool = False  # scales are powers of two (``scale_fmt`` "ue8m0")
    # format of the rows of routed experts if it is not FP8, one of ``dsjax.config.weights.ROW_FORMATS``
    experts: str | None = None

    def __str__(self) -> str:
        return self.experts or ("dynamic" if self.dynamic else "none")

    def quantise(self, x: Float[Array, "*n K"]) -> fp8.Quantised:
        """Quantise rows for ``block_product``."""
        return fp8.quantise(x, powers=self.powers)


WIDEN = ActivationScheme()


def block_product(
    x: fp8.Quantised, weight: Float[Array, "K *m"], scale: Float[Array, "S *mb"], operands: jnp.dtype
) -> Float[Array, "*n *m"]:
    """``Σ_b (values[b] · weight[b]) × scales[b] × scale[b]`` over blocks b of 128 of the depth, summed in float32.

    x: values ``[*n, K]`` and scales ``[*n, S]``. weight: e4m3, ``[K, N]`` or ``[K, 2, F]``; scale: the same with K, and N or F, divided by
    128, rounded up. operands: dtype to which e4m3 is widened, exactly, for XLA's product: bfloat16 or float32.
    """
    columns = expand_blocks(scale, scale.ndim - 1, weight.shape[-1])
    blocks, short = columns.shape[0], -weight.shape[0] % fp8.BLOCK if columns.shape[0] > 1 else 0
    leading = x.values.shape[:-1]
    values = jnp.pad(x.values, [(0, 0)] * len(leading) + [(0, short)]).reshape(*leading, blocks, -1)
    weight = jnp.pad(weight, [(0, short)] + [(0, 0)] * (weight.ndim - 1)).reshape(blocks, -1, *weight.shape[1:])
    scale_index = (..., *[None] * (weight.ndim - 2))

    def deeper(total, block):
        values, scales, weight, columns = block
        product = jnp.tensordot(
            values.astype(operands), weight.astype(operands), axes=1, preferred_element_type=jnp.float32
        )
        return total + product * scales[scale_index] * columns, None

    over = jnp.moveaxis(values, -2, 0), jnp.moveaxis(x.scales, -1, 0), weight, columns
    nothing = jnp.zeros((*leading, *weight.shape[2:]), jnp.float32)
    if blocks == 1:
        return deeper(nothing, jax.tree.map(lambda array: array[0], over))[0]
    return lax.scan(deeper, nothing, over)[0]


def swiglu(
    x: Float[Array, "N D"],
    gate_up: tuple[Array, Array],
    down: tuple[Array, Array],
    scheme: ActivationScheme,
    limit: float | None = None,
) -> Float[Array, "N D"]:
    """``down(silu(gate) × up)`` of one expert, float32. The input of ``down`` is rounded to the dtype of ``x``, then quantised.

    gate_up: ``[D, 2, F]`` and its scales; down: ``[F, D]`` and its scales. limit: see ``gated``.
    """
    hidden = block_product(scheme.quantise(x), *gate_up, operands=x.dtype)
    hidden = gated(hidden[..., 0, :], hidden[..., 1, :], limit).astype(x.dtype)
    return block_product(scheme.quantise(hidden), *down, operands=x.dtype)
