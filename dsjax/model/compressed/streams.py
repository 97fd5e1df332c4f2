"""Hyper-connections: a ``Residual`` of n streams instead of one, in JAX and with native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.kernels.native_calls import NativeKernels
from dsjax.model.norm import unweighted
from dsjax.model.parameters import Declaration, value_of
from dsjax.model.residual import Residual
from sharding.on_ranks import on_ranks


class Streams(Residual):
    """Hyper-connections (DeepSeek-V4's report, section 2.2): n residual streams, mixed by token-dependent weights in float32.

    One projection of all streams, normalised together, gives three groups of weights for a block: ``read`` (n) sums the streams to the
    block's input, ``spread`` (n) adds its output to each stream, and ``mixing`` (n × n, made doubly stochastic by the Sinkhorn–Knopp
    algorithm) mixes the streams. With ``ends``, the projection gives ``read`` only, for ``leave``.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, ends: bool = False):
        self.config, self.v4 = config, config.v4
        n = self.v4.hc_mult
        num_weights, num_groups = (n, 1) if ends else (n + n + n * n, 3)
        dtype = jnp.dtype(jnp.float32)
        self.weight = declare.parameter((n * config.hidden_size, num_weights), (None, None), dtype=dtype)
        self.base = declare.parameter((num_weights,), (None,), init="zeros", dtype=dtype)
        self.scale = declare.parameter((num_groups,), (None,), init="ones", dtype=dtype)

    def with_kernels(self, kernels: NativeKernels, mesh: Mesh, tokens: P) -> NativeStreams:
        """Return this connection computed by the kernels of ``native/streams.h``; see ``Residual.with_kernels``."""
        return NativeStreams(self, kernels, mesh, tokens)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T n D"]:
        """Copy ``x`` to each stream."""
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.v4.hc_mult, x.shape[-1]))

    def pre(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """Return a block's input, and ``(spread, mixing)`` for ``post``: ``[B, T, n]`` and ``[B, T, n, n]``."""
        n, eps, weights = self.v4.hc_mult, self.v4.hc_eps, self._project(x)
        base, scale = value_of(self.base), value_of(self.scale)
        read = jax.nn.sigmoid(weights[..., :n] * scale[0] + base[:n]) + eps
        spread = 2 * jax.nn.sigmoid(weights[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        square = (*weights.shape[:-1], n, n)
        mixing = jax.nn.softmax((weights[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(square), axis=-1) + eps
        mixing = mixing / (jnp.sum(mixing, axis=-2, keepdims=True) + eps)

        def balance(_, mixing):
            mixing = mixing / (jnp.sum(mixing, axis=-1, keepdims=True) + eps)
            return mixing / (jnp.sum(mixing, axis=-2, keepdims=True) + eps)

        return _weighted_sum(read, x), (spread, jax.lax.fori_loop(1, self.v4.hc_sinkhorn_iters, balance, mixing))

    def post(self, x: Float[Array, "B T n D"], mix, y: Float[Array, "B T D"]) -> Float[Array, "B T n D"]:
        """Return ``spread ⊗ y + mixingᵀ x``."""
        spread, mixing = (weights.astype(x.dtype) for weights in mix)
        mixed = jnp.einsum("btjk,btjd->btkd", mixing, x, preferred_element_type=jnp.float32)
        return spread[..., None] * y[..., None, :] + mixed.astype(x.dtype)

    def unmixed(self, mix: tuple[Array, Array]) -> tuple[Array, Array]:
        """Replace the mixing matrix by the identity."""
        spread, mixing = mix
        return spread, jnp.broadcast_to(jnp.eye(self.v4.hc_mult, dtype=mixing.dtype), mixing.shape)

    def leave(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        """Return the ``read`` sum of the streams after the last layer."""
        read = jax.nn.sigmoid(self._project(x) * value_of(self.scale) + value_of(self.base)) + self.v4.hc_eps
        return _weighted_sum(read, x)

    def _project(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T w"]:
        """Return the weights before scale and base."""
        flat = unweighted(x.reshape(*x.shape[:-2], -1).astype(jnp.float32), self.config.rms_norm_eps)
        return jnp.einsum("btd,dw->btw", flat, value_of(self.weight), precision=jax.lax.Precision.HIGHEST)


def _weighted_sum(weights: Float[Array, "B T n"], x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
    return jnp.sum(weights[..., None] * x.astype(jnp.float32), axis=-2).astype(x.dtype)


@dataclass(frozen=True)
class NativeStreams:
    """``Streams`` by native kernels: a token's bits do not depend on the batch or the mesh. tokens: sharding of the first two axes."""

    streams: Streams
    kernels: NativeKernels
    mesh: Mesh
    tokens: P

    def pre(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """``Streams.pre``."""
        block_input, spread, mixing = self._read(x, 3)
        return block_input, (spread, mixing)

    def leave(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        """``Streams.leave``."""
        return self._read(x, 1)[0]

    def post(
        self, x: Float[Array, "B T n D"], mix: tuple[Array, Array], y: Float[Array, "B T D"]
    ) -> Float[Array, "B T n D"]:
        """``Streams.post``."""
        return self._on_ranks(lambda *arrays: [self.kernels.streams_after(*arrays)], 1, x, *mix, y)[0]

    def _read(self, x: Float[Array, "B T n D"], num_results: int) -> list[Array]:
        plain, v4 = self.streams, self.streams.v4
        settings = {"rounds": v4.hc_sinkhorn_iters, "norm_eps": plain.config.rms_norm_eps, "eps": v4.hc_eps}
        params = [value_of(parameter) for parameter in (plain.weight, plain.base, plain.scale)]
        kernel = lambda x, *params: self.kernels.streams(x, *params, **settings)  # noqa: E731
        return self._on_ranks(kernel, num_results, x, params=params)

    def _on_ranks(
        self, kernel: Callable[..., list[Array]], num_results: int, *arrays: Array, params: Sequence[Array] = ()
    ) -> list[Array]:
        """Apply ``kernel`` to each device's tokens, with axes B and T merged. params: replicated arrays."""

        def local(arrays, params):
            batch = arrays[0].shape[:2]
            results = kernel(*(array.reshape(-1, *array.shape[2:]) for array in arrays), *params)
            return [array.reshape(*batch, *array.shape[1:]) for array in results]

        specs = [self.tokens] * len(arrays), [P()] * len(params)
        return on_ranks(local, self.mesh, specs, [self.tokens] * num_results)(list(arrays), list(params))
