"""Softmax over a context that is read in blocks, so that its scores never exist all at once."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Context = TypeVar("Context")


def attend_in_blocks(
    positions: Int[Array, "R C"],
    fetch: Callable[[Int[Array, ""]], Context],
    score: Callable[[Context], Float[Array, "R H C S"]],
    weigh: Callable[[Float[Array, "R H C S"], Context], Float[Array, "R C H W"]],
    *,
    num_blocks: int,
    block: int,
) -> Float[Array, "R C H W"]:
    """Causal attention of queries at ``positions`` over ``num_blocks × block`` context positions, in float32.

    ``fetch(i)`` reads block ``i``; ``score`` gives its scaled scores, ``weigh`` the weighted sum of its values. One block is
    a plain softmax. More are accumulated with a running maximum and sum (arXiv 1805.02867, 2205.14135); blocks that no
    query can see are never read: the loop ends at the block of the largest position.
    """
    if num_blocks == 1:
        context = fetch(jnp.int32(0))
        return weigh(jax.nn.softmax(_causal(score(context), positions, 0), axis=-1), context)

    first = fetch(jnp.int32(0))
    scores = _causal(score(first), positions, 0)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - maximum)
    state = (maximum, jnp.sum(weights, axis=-1, keepdims=True), weigh(weights, first).astype(jnp.float32))

    def step(index, state):
        maximum, total, out = state
        context = fetch(index)
        scores = _causal(score(context), positions, index * block)
        higher = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(maximum - higher)
        out = out * _heads_last(shrink) + weigh(weights, context).astype(jnp.float32)
        return higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out

    needed = jnp.minimum(jnp.max(positions) // block + 1, num_blocks)
    _, total, out = jax.lax.fori_loop(1, needed, step, state)
    return out / _heads_last(total)


def _causal(scores: Float[Array, "R H C S"], positions: Int[Array, "R C"], start) -> Float[Array, "R H C S"]:
    """−inf where the context position lies after the query's. Position 0 is seen by all: no row is empty."""
    seen = positions[:, None, :, None] >= start + jnp.arange(scores.shape[-1])
    return jnp.where(seen, scores, -jnp.inf)


def _heads_last(x: Float[Array, "R H C 1"]) -> Float[Array, "R C H 1"]:
    return jnp.swapaxes(x, 1, 2)
