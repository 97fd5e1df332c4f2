"""Hyper-connections: a ``Residual`` of several streams, in JAX and with native kernels."""

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
    """Hyper-connections (DeepSeek-V4's report, section 2.2): n streams with token-dependent weights, computed in float32.

    A projection of all streams, normalised together, gives a block n weights for its input, n for adding its output to each stream, and
    an n × n mixing matrix, made doubly stochastic by the Sinkhorn–Knopp algorithm. With ``ends`` there are only the first n weights.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, ends: bool = False):
        self.config, self.v4 = config, config.v4
        n = self.v4.hc_mult
        weights, scales = (n, 1) if ends else ((2 + n) * n, 3)
        own = {"dtype": jnp.dtype(jnp.float32)}
        self.weight = declare.parameter((n * config.hidden_size, weights), (None, None), **own)
        self.base = declare.parameter((weights,), (None,), init="zeros", **own)
        self.scale = declare.parameter((scales,), (None,), init="ones", **own)

    def with_kernels(self, kernels: NativeKernels, mesh: Mesh, tokens: P) -> NativeStreams:
        """Return the connection with the kernels of ``native/streams.h``."""
        return NativeStreams(self, kernels, mesh, tokens)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T n D"]:
        """Copy ``x`` to each stream."""
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.v4.hc_mult, x.shape[-1]))

    def pre(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """Return a weighted sum of the streams, and for ``post`` the output's weights ``[B, T, n]`` and the mixing ``[B, T, n, n]``."""
        n, eps, weights = self.v4.hc_mult, self.v4.hc_eps, self._weights(x)
        base, scale = value_of(self.base), value_of(self.scale)
        read = jax.nn.sigmoid(weights[..., :n] * scale[0] + base[:n]) + eps
        spread = 2 * jax.nn.sigmoid(weights[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        square = (*weights.shape[:-1], n, n)
        mixing = jax.nn.softmax((weights[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(square), axis=-1) + eps
        mixing = mixing / (jnp.sum(mixing, axis=-2, keepdims=True) + eps)

        def balance(_, mixing):
            mixing = mixing / (jnp.sum(mixing, axis=-1, keepdims=True) + eps)
            return mixing / (jnp.sum(mixing, axis=-2, keepdims=True) + eps)

        return _sum(read, x), (spread, jax.lax.fori_loop(1, self.v4.hc_sinkhorn_iters, balance, mixing))

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
        """Return a weighted sum of the streams."""
        return _sum(jax.nn.sigmoid(self._weights(x) * value_of(self.scale) + value_of(self.base)) + self.v4.hc_eps, x)

    def _weights(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T w"]:
        flat = unweighted(x.reshape(*x.shape[:-2], -1).astype(jnp.float32), self.config.rms_norm_eps)
        return jnp.einsum("btd,dw->btw", flat, value_of(self.weight), precision=jax.lax.Precision.HIGHEST)


def _sum(weights: Float[Array, "B T n"], x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
    return jnp.sum(weights[..., None] * x.astype(jnp.float32), axis=-2).astype(x.dtype)


@dataclass(frozen=True)
class NativeStreams:
    """``Streams`` with bits independent of the batch and the mesh. tokens: sharding of the first two axes."""

    streams: Streams
    kernels: NativeKernels
    mesh: Mesh
    tokens: P

    def pre(self, x: Float[Array, "B T n D"]) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        """``Streams.pre``."""
        read, *mix = self._weighed(x, 3)
        return read, tuple(mix)

    def leave(self, x: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        """``Streams.leave``."""
        return self._weighed(x, 1)[0]

    def post(
        self, x: Float[Array, "B T n D"], mix: tuple[Array, Array], y: Float[Array, "B T D"]
    ) -> Float[Array, "B T n D"]:
        """``Streams.post``."""
        return self._on_ranks(lambda *arrays: [self.kernels.streams_after(*arrays)], 1, x, *mix, y)[0]

    def _weighed(self, x: Float[Array, "B T n D"], results: int) -> list[Array]:
        config, own = self.streams.config, self.streams
        settings = {"rounds": own.v4.hc_sinkhorn_iters, "norm_eps": config.rms_norm_eps, "eps": own.v4.hc_eps}
        weights = [value_of(parameter) for parameter in (own.weight, own.base, own.scale)]
        return self._on_ranks(
            lambda x, *weights: self.kernels.streams(x, *weights, **settings), results, x, whole=weights
        )

    def _on_ranks(
        self, kernel: Callable[..., list[Array]], results: int, *arrays: Array, whole: Sequence[Array] = ()
    ) -> list[Array]:
        """Apply ``kernel`` to each device's tokens as rows. whole: replicated arrays."""

        def local(arrays, whole):
            lead = arrays[0].shape[:2]
            found = kernel(*(array.reshape(-1, *array.shape[2:]) for array in arrays), *whole)
            return [array.reshape(*lead, *array.shape[1:]) for array in found]

        specs = [self.tokens] * len(arrays), [P()] * len(whole)
        return on_ranks(local, self.mesh, specs, [self.tokens] * results)(list(arrays), list(whole))
