"""The gate of a SwiGLU MLP, for XLA and inside Pallas kernels. Native kernels have theirs in ``native/experts.h``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gated(gate: Float[Array, "*n F"], up: Float[Array, "*n F"], limit: float | None = None) -> Float[Array, "*n F"]:
    """``silu(gate) × up`` (arXiv 2002.05202).

    limit: clips ``gate`` from above and ``up`` on both sides first (DeepSeek-V4's ``swiglu_limit``).
    """
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up
