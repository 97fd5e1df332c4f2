"""RMSNorm and LayerNorm."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsjax.model.parameters import Declaration, value_of

LATENT_EPS = 1e-6
"""Epsilon of the norms on the query and key-value latents. As in the reference, it does not depend on ``rms_norm_eps``."""


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) × scale`` over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, declare: Declaration, width: int, eps: float, axis: str = "embed"):
        self.scale = declare.parameter((width,), (axis,), init="ones")
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalise; keeps the dtype of ``x``."""
        return value_of(self.scale).astype(x.dtype) * unweighted(x, self.eps)


def unweighted(x: Float[Array, "*batch width"], eps: float) -> Float[Array, "*batch width"]:
    """Return ``x / sqrt(mean(x²) + eps)`` over the last dimension, computed in float32, in the dtype of ``x``."""
    x_f32 = x.astype(jnp.float32)
    return (x_f32 * jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


@dataclass(frozen=True)
class HeadNorm:
    """``unweighted`` norm of each head's values ``[..., H, W]``; heads may be sharded over ``tp``."""

    eps: float

    def __call__(self, x: Float[Array, "*b H W"]) -> Float[Array, "*b H W"]:
        """Normalise; keeps the dtype of ``x``."""
        return unweighted(x, self.eps)


class LayerNorm(nnx.Module):
    """``(x - mean) / sqrt(variance + eps) × scale + bias`` over the last dimension, computed in float32 (arXiv 1607.06450)."""

    def __init__(self, declare: Declaration, width: int, eps: float):
        self.scale = declare.parameter((width,), (None,), init="ones")
        self.bias = declare.parameter((width,), (None,), init="zeros")
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalise; keeps the dtype of ``x``."""
        x_f32 = x.astype(jnp.float32)
        apart = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
        normed = apart * jax.lax.rsqrt(jnp.mean(jnp.square(apart), axis=-1, keepdims=True) + self.eps)
        scale, bias = (value_of(parameter).astype(jnp.float32) for parameter in (self.scale, self.bias))
        return (normed * scale + bias).astype(x.dtype)


Normalise = Callable[[Callable[[Array], Array], Array], Array]
"""Applies a norm: directly, or with a kernel."""


def normalise(norm: Callable[[Array], Array], x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Apply the norm directly."""
    return norm(x)
