"""Auxiliary-loss-free load balancing (V3 report §2.1.2, equation 16; arXiv 2408.15664)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def expert_loads(ids: Int[Array, "L B S K"], experts: int) -> Float[Array, "L E"]:
    """How many token copies each expert of each layer got."""
    flat = ids.reshape(ids.shape[0], -1)
    return jnp.sum(flat[..., None] == jnp.arange(experts), axis=1, dtype=jnp.float32)


def move_bias(bias: Float[Array, "L E"], loads: Float[Array, "L E"], speed: Array) -> Float[Array, "L E"]:
    """Raise the bias of experts under the mean load by `speed`, lower that of experts over it."""
    return bias + speed * jnp.sign(loads.mean(axis=-1, keepdims=True) - loads)


def max_violation(loads: Float[Array, "L E"]) -> Float[Array, "L"]:
    """MaxVio: by how much the busiest expert exceeds the mean load, relative to it (arXiv 2408.15664, equation 4)."""
    mean = loads.mean(axis=-1)
    return (loads.max(axis=-1) - mean) / mean


def dropped_share(loads: Float[Array, "L E"], capacity: int) -> Float[Array, ""]:
    """Share of token copies over their expert's capacity, over all layers."""
    return jnp.sum(jnp.maximum(loads - capacity, 0)) / jnp.sum(loads)
