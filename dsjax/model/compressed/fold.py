"""Compression of tokens to entries: a fold over a row's tokens, whose state is the partial sum of an unfinished window.

Each value has an accumulator, as in online softmax: the gates' maximum, the sum of weights relative to it, and the sum of weighted values.
A window's entry is the third divided by the second. With two series (rate 4) there are two accumulators: a token adds its second gate and
value to the current window's and its first to the next window's, which becomes the current one when the window is complete.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EMPTY = (-1e30, 0.0, 0.0)
"""A new accumulator. Its maximum is finite, so a gate of −inf gives no NaN."""


def empty(series: int, width: int) -> Float[Array, "a Y"]:
    """Return the state before position 0: ``a`` = 3 × series rows, three for each accumulator."""
    return jnp.broadcast_to(jnp.array(EMPTY * series, jnp.float32)[:, None], (3 * series, width))


def take(accumulator: Float[Array, "3 Y"], gate: Float[Array, "Y"], value: Float[Array, "Y"]) -> Float[Array, "3 Y"]:
    """Add one token's gate and value to an accumulator."""
    maximum, weights, values = accumulator
    higher = jnp.maximum(maximum, gate)
    kept, own = jnp.exp(maximum - higher), jnp.exp(gate - higher)
    return jnp.stack([higher, weights * kept + own, values * kept + value * own])


def fold_token(
    state: Float[Array, "a Y"],
    gate: Float[Array, "series Y"],
    value: Float[Array, "series Y"],
    closes: Bool[Array, ""],
) -> tuple[Float[Array, "a Y"], Float[Array, "Y"]]:
    """Return the state after a token, and the weighted mean of its window so far: the entry's if the token completes the window."""
    own, series = take(state[:3], gate[-1], value[-1]), len(gate)
    after = take(state[3:], gate[0], value[0]) if series == 2 else jnp.zeros((0, own.shape[1]))
    next_own = after if series == 2 else empty(1, own.shape[1])
    following = jnp.concatenate([next_own, *([empty(1, own.shape[1])] * (series - 1))])
    return jnp.where(closes, following, jnp.concatenate([own, after])), own[2] / own[1]


def fold_row(
    state: Float[Array, "a Y"],
    gates: Float[Array, "C series Y"],
    values: Float[Array, "C series Y"],
    start: Int[Array, ""],
    length: Int[Array, ""],
    kept: Int[Array, "C"],
    places: int,
    rate: int,
) -> tuple[Float[Array, "places a Y"], Float[Array, "C Y"]]:
    """Fold the first ``length`` tokens of a row, which starts at position ``start``.

    kept: the place where each token stores its state; later tokens overwrite earlier ones. Returns the states of these places, and for each
    token the mean of its window so far, which is the entry's if the token completes the window.
    """

    def step(carry, token):
        state, states = carry
        number, gate, value, place = token
        after, mean = fold_token(state, gate, value, (start + number) % rate == rate - 1)
        state = jnp.where(number < length, after, state)
        return (state, states.at[place].set(state)), mean

    tokens = jnp.arange(len(gates)), gates, values, kept
    if len(gates) == 1:  # XLA unrolls a loop of one iteration and may then fuse multiply-adds differently
        tokens = jax.tree.map(lambda array: jnp.concatenate([array, array]), tokens)
        tokens = (jnp.arange(2), *tokens[1:])
    states = jnp.zeros((places, *state.shape), jnp.float32)
    (_, states), means = jax.lax.scan(step, (state, states), tokens)
    return states, means[: len(gates)]
