"""Products for the model's plain forward pass (``transformer.py``), bitwise equal to the engine's on a CPU, with derivatives.

A trainer that uses them computes exactly the engine's log-probabilities. The forward pass, also under ``jax.grad`` and ``jax.vjp``, runs
the native kernels of the engine's step. The backward pass runs XLA's derivative of the same function in plain JAX, at the same point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from dsjax.kernels.native_calls import NativeKernels
from dsjax.model.forms import FORMS
from dsjax.model.in_place import SHARED_DEPTHS
from dsjax.model.norm import HeadNorm, LayerNorm, RMSNorm
from dsjax.model.parameters import GroupedMatrix, Matrix, value_of
from dsjax.model.transformer import (
    MLA,
    ExpertRouter,
    Projections,
    RoutedExperts,
    Transformer,
    attend,
    weighted_sum,
)
from sharding.sums import pieces_of


@dataclass(frozen=True)
class NativeProducts:
    """The engine's float32 products on one CPU device, for ``Transformer(…)(tokens, products=…)`` instead of ``XlaProducts``.

    Weights may have any format: they are converted to float32 first, which gives the same bits as kernels that convert them on reading.
    Not bitwise equal: packed experts, whose kernel multiplies by blocks, and DeepSeek-V4, whose attention, head norms, grouped
    product and hyper-connections XLA computes. Sparse attention chooses as with ``--index-scores float``.
    """

    observe: ClassVar[None] = None

    kernels: NativeKernels  # as loaded by ``choose_kernels("native", "cpu", …).native``
    # the MLA form of attention's sums. ``A_CC_ME`` matches an engine with ``batch_invariant=True``; ``CC`` matches prompts of an engine
    # without it (the default of ``--mla-prefill``)
    form: Literal["CC", "A_CC_ME"] = "A_CC_ME"

    def multiply(self, matrix: Matrix | ExpertRouter, x: Float[Array, "*b K"]) -> Float[Array, "*b *columns"]:
        """Compute ``Matrix.product``. Sums over depths that a mesh may shard are trees, as in the engine."""
        if isinstance(matrix, GroupedMatrix):
            return matrix.product(x)
        weight = matrix.value(jnp.float32) if isinstance(matrix, Matrix) else value_of(matrix.weight)
        axes = [axis for axis in matrix.weight.info.logical_axes if axis != "layers"]
        return self._product(x, weight.astype(jnp.float32), pieces_of(x.shape[-1]) if axes[0] in SHARED_DEPTHS else 1)

    def normalise(self, norm: RMSNorm | LayerNorm | HeadNorm, x: Float[Array, "*b W"]) -> Float[Array, "*b W"]:
        """Apply the norm."""
        if isinstance(norm, HeadNorm):
            return norm(x)

        def native(x, scale, *bias):
            return self.kernels.norm(x.reshape(-1, x.shape[-1]), scale, norm.eps, *bias).reshape(x.shape)

        def plain(x, scale, *bias):
            x = x - jnp.mean(x, axis=-1, keepdims=True) if bias else x
            normed = scale * (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps))
            return normed + bias[0] if bias else normed

        parameters = [norm.scale, norm.bias] if isinstance(norm, LayerNorm) else [norm.scale]
        return _with_derivative(native, plain)(x, *(value_of(parameter).astype(x.dtype) for parameter in parameters))

    def attend(self, mla: MLA, p: Projections) -> tuple[Float[Array, "B S H U"], None]:
        """Apply causal self-attention. Each sequence is a row of the kernel, with one page of a temporary cache."""
        config, (B, S) = mla.config, p.latent.shape[:2]
        form, is_sparse = FORMS[self.form], p.index is not None and config.mla.indexer.topk < S

        def native(q_nope, q_rope, latent, k_rope, weight, index):
            layer, tables = jnp.int32(0), jnp.arange(B)[:, None]
            # arguments of ``attention`` after the cache: layer, start, length, tables, filled, and optionally chosen
            cache_args = layer, jnp.zeros(B, jnp.int32), jnp.full(B, S), tables, None
            if is_sparse:
                positions = jnp.broadcast_to(jnp.arange(S), (B, S))
                index_args = {"index": index.key[None]}, layer, positions, tables, None, config.mla.indexer.topk
                chosen, count, chosen_bits = self.kernels.index_choice(index.query, index.weight, *index_args)
                if form.masks:
                    cache_args = *cache_args, chosen_bits
                else:  # each query becomes a row, whose page holds only its chosen entries, in the order of positions
                    q_nope, q_rope = (rearrange(q, "b s h n -> (b s) 1 h n") for q in (q_nope, q_rope))
                    latent, k_rope = (
                        rearrange(jax.vmap(lambda array, chosen: array[chosen])(array, chosen), "b s k w -> (b s) k w")
                        for array in (latent, k_rope)
                    )
                    cache_args = layer, count.reshape(-1) - 1, jnp.ones(B * S), jnp.arange(B * S)[:, None], None
            cache = {"latent": latent[None], "rope": k_rope[None]}
            name, scale = form.kernels["native"], config.softmax_scale
            weights = {"weight": rearrange(weight, "m h n -> 1 m (h n)")}
            out = self.kernels.attention(name, q_nope, q_rope, weights, layer, cache, *cache_args, scale=scale)
            return out.reshape(B, S, *out.shape[2:])

        def plain(q_nope, q_rope, latent, k_rope, weight, index):
            N = config.mla.qk_nope_head_dim
            whole = Projections(q_nope, q_rope, latent, latent, k_rope, index)
            return attend(config, whole, weight[..., :N], weight[..., N:])[0]

        weight = jnp.concatenate(mla.key_value_weight(jnp.float32), axis=-1)
        return _with_derivative(native, plain)(p.q_nope, p.q_rope, p.latent, p.k_rope, weight, p.index), None

    def experts(
        self,
        experts: RoutedExperts,
        x_TD: Float[Array, "T D"],
        ids_TK: Int[Array, "T K"],
        weights_TK: Float[Array, "T K"],
    ) -> Float[Array, "T D"]:
        """Return the weighted sum of each token's experts."""

        def native(x, ids, weights, gate_up, down):
            stack = {"gate_up.weight": gate_up[None], "down.weight": down[None]}
            return self.kernels.experts(
                stack, jnp.int32(0), x, ids, weights, pieces=pieces_of(down.shape[1]), limit=experts.limit
            )

        matrices = experts.gate_up.value(jnp.float32), experts.down.value(jnp.float32)
        return _with_derivative(native, partial(weighted_sum, limit=experts.limit))(x_TD, ids_TK, weights_TK, *matrices)

    def project(self, model: Transformer, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Return float32 logits."""
        return self._product(x, model.head_weight(jnp.float32), 1)

    def _product(self, x: Float[Array, "*b K"], weight: Float[Array, "K *columns"], pieces: int):
        def native(x, weight):
            rows = x.reshape(-1, x.shape[-1])
            out = self.kernels.dense(weight[None], None, jnp.int32(0), rows, pieces=pieces)
            return out.reshape(*x.shape[:-1], *weight.shape[1:])

        return _with_derivative(native, lambda x, weight: jnp.tensordot(x, weight, axes=1))(x, weight)


def _with_derivative(native: Callable[..., Array], plain: Callable[..., Array]) -> Callable[..., Array]:
    """Return ``native`` with the derivative of ``plain``, which computes the same function. Both take only arrays."""
    function = jax.custom_vjp(native)
    function.defvjp(lambda *args: (native(*args), args), lambda args, cotangent: jax.vjp(plain, *args)[1](cotangent))
    return function
