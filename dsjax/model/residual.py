"""Residual connection between layers: plain addition, and the base class of other connections."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.kernels.native_calls import NativeKernels
from dsjax.model.parameters import Declaration


class Residual(nnx.Module):
    """Residual connection by plain addition, and the base class of other connections.

    Each of a layer's two blocks has one, ``attn_residual`` and ``mlp_residual``, with separate parameters if it declares any. The model
    and the MTP module have one, ``residual``, at the entry and exit of tokens (``ends``). x is the stream between layers: ``[B, T, D]``
    here, ``[B, T, n, D]`` for n streams.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, ends: bool = False):
        pass

    def with_kernels(self, kernels: NativeKernels, mesh: Mesh, tokens: P) -> Residual:
        """Return this connection with ``pre``, ``post`` and ``leave`` computed by native kernels, if it has any.

        tokens: sharding of the first two axes of arrays.
        """
        return self

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T *n D"]:
        """Return the first layer's input stream."""
        return x

    def pre(self, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any]:
        """Return a block's input before its norm, and a pytree ``mix`` for ``post``, whose leaves have leading axes B and T."""
        return x, None

    def post(self, x: Float[Array, "B T *n D"], mix: Any, y: Float[Array, "B T D"]) -> Float[Array, "B T *n D"]:
        """Return the stream after a block with output ``y``."""
        return x + y

    def unmixed(self, mix: Any) -> Any:
        """Return a ``mix`` with which ``post`` leaves the stream unchanged if the block's output is zero."""
        return mix

    def leave(self, x: Float[Array, "B T *n D"]) -> Float[Array, "B T D"]:
        """Return the final norm's input from the last layer's stream."""
        return x
