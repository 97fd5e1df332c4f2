"""FP8 matrix products, as ``--activation-scheme dynamic`` defines them: activations in blocks of 1 × 128, weights of 128 × 128.

As in DeepSeek-V3's technical report, section 3.3 (``act_quant`` and ``fp8_gemm`` of its inference code): e4m3 operands, and a float32 sum
over the blocks of the contraction axis. float32 holds each e4m3 value and each product of two exactly. Devices without FP8 therefore
cast the operands and get the same result, up to the order of the 128 additions within a block.
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

    # True: activations are quantised, with scales from their values at run time. False: they are not, and weights are dequantised
    dynamic: bool = False
    powers: bool = False  # scales are powers of two (``scale_fmt`` "ue8m0")
    # format of the routed experts' activations if it is not FP8, one of ``dsjax.config.weights.ROW_FORMATS``
    experts: str | None = None

    def __str__(self) -> str:
        return self.experts or ("dynamic" if self.dynamic else "none")

    def quantise(self, x: Float[Array, "*n K"]) -> fp8.Quantised:
        """Quantise rows for ``block_product``."""
        return fp8.quantise(x, powers=self.powers)


WIDEN = ActivationScheme()  # activations are not quantised


def block_product(
    x: fp8.Quantised, weight: Float[Array, "K *m"], scale: Float[Array, "S *mb"], operands: jnp.dtype
) -> Float[Array, "*n *m"]:
    """Return ``Σ_b (values[b] @ weight[b]) × scales[b] × scale[b]`` in float32, over the ``S = ⌈K / 128⌉`` blocks b of axis K.

    x: values ``[*n, K]``, scales ``[*n, S]``. weight: e4m3, ``[K, N]`` or ``[K, 2, F]``, with the scale ``[S, ⌈N / 128⌉]`` or
    ``[S, 2, ⌈F / 128⌉]``. operands: dtype to which e4m3 values are cast, exactly, for the matrix product: bfloat16 or float32.
    """
    column_scales = expand_blocks(scale, scale.ndim - 1, weight.shape[-1])
    num_blocks, padding = column_scales.shape[0], -weight.shape[0] % fp8.BLOCK if column_scales.shape[0] > 1 else 0
    batch_shape = x.values.shape[:-1]
    values = jnp.pad(x.values, [(0, 0)] * len(batch_shape) + [(0, padding)]).reshape(*batch_shape, num_blocks, -1)
    weight = jnp.pad(weight, [(0, padding)] + [(0, 0)] * (weight.ndim - 1)).reshape(num_blocks, -1, *weight.shape[1:])
    scale_index = (..., *[None] * (weight.ndim - 2))

    def deeper(total, block):  # the scan's body: adds one block's product
        values, scales, weight, column_scales = block
        product = jnp.tensordot(
            values.astype(operands), weight.astype(operands), axes=1, preferred_element_type=jnp.float32
        )
        return total + product * scales[scale_index] * column_scales, None

    xs = jnp.moveaxis(values, -2, 0), jnp.moveaxis(x.scales, -1, 0), weight, column_scales
    zeros = jnp.zeros((*batch_shape, *weight.shape[2:]), jnp.float32)
    if num_blocks == 1:
        return deeper(zeros, jax.tree.map(lambda array: array[0], xs))[0]
    return lax.scan(deeper, zeros, xs)[0]


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
