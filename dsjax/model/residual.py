"""What passes from layer to layer, and how attention and the MLP read it and add to it: plain addition, and what others inherit."""

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
    """Plain addition; and what another residual connection inherits and overrides.

    Each of a layer's two blocks has one, ``attn_residual`` and ``mlp_residual``, with parameters of its own if it declares any; the model
    and the MTP module have one, ``residual``, for where tokens enter and leave (``ends``). X is the stream between layers: ``[B, T, D]``
    here, ``[B, T, n, D]`` of n streams.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, ends: bool = False):
        pass

    def with_kernels(self, kernels: NativeKernels, mesh: Mesh, tokens: P) -> Residual:
        """This connection with ``pre``, ``post`` and ``leave`` by native kernels, where it has some.

        tokens: how the first two axes of arrays lie over the mesh.
        """
        return self

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T *n D"]:
        """The stream that the first layer reads."""
        return x

    def pre(self, x: Float[Array, "B T *n D"]) -> tuple[Float[Array, "B T D"], Any]:
        """What a block reads of the stream, before its norm; and a pytree that ``post`` is given, whose leaves lead with B and T."""
        return x, None

    def post(self, x: Float[Array, "B T *n D"], mix: Any, y: Float[Array, "B T D"]) -> Float[Array, "B T *n D"]:
        """The stream after a block that gave ``y``."""
        return x + y

    def unmixed(self, mix: Any) -> Any:
        """``mix`` with values by which ``post`` leaves the stream as it is, where a block gave zeros."""
        return mix

    def leave(self, x: Float[Array, "B T *n D"]) -> Float[Array, "B T D"]:
        """What the final norm reads of the last layer's stream."""
        return x
