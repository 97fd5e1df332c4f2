"""The routed experts of one MoE layer for training: every expert's tokens in one batched product, and all gathers.

XLA's CPU backend runs scatters on one core, element by element, so neither the way to the experts nor its gradient may
be one. Tokens are sorted by expert once; from then on moving rows to experts and back is a gather in both directions:
where a slot's row comes from, and where a token's copies have gone, are each other's inverse.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsjax.kernels.gate import gated
from dsjax.model.transformer import RoutedExperts


class Slots(NamedTuple):
    """A way of T × K token copies into E × C slots; a number past the end (`E*C`, `T`) means nowhere."""

    of_copy: Int[Array, "T K"]  # the slot of a token's k-th copy
    token: Int[Array, "EC"]  # the token in a slot
    copy: Int[Array, "EC"]  # which copy, t * K + k, is in a slot


def assign_slots(ids_TK: Int[Array, "T K"], experts: int, capacity: int) -> Slots:
    """Give each expert's copies its slots in order of the tokens; copies over `capacity` get none (they are dropped)."""
    tokens, k = ids_TK.shape
    copies = tokens * k
    flat = ids_TK.reshape(-1)
    # One sort of packed keys, four times as fast as a stable sort by expert; the low digits are the permutation.
    order = jax.lax.sort(flat * copies + jnp.arange(copies), is_stable=False) % copies
    position = jnp.zeros(copies, jnp.int32).at[order].set(jnp.arange(copies, dtype=jnp.int32), unique_indices=True)
    loads = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0)
    first = jnp.cumsum(loads) - loads
    expert, place = jnp.divmod(jnp.arange(experts * capacity), capacity)
    copy = jnp.where(place < loads[expert], order[jnp.minimum(first[expert] + place, copies - 1)], copies)
    rank = position - first[flat]  # a copy's place among its expert's
    of_copy = jnp.where(rank < capacity, flat * capacity + rank, experts * capacity)
    return Slots(of_copy.reshape(tokens, k), copy // k, copy)


@jax.custom_vjp
def spread(x_TD: Float[Array, "T D"], slots: Slots) -> Float[Array, "EC D"]:
    """Copy each token's row to its slots; empty slots are zero."""
    return _rows(x_TD, slots.token)


@jax.custom_vjp
def collect(out_SD: Float[Array, "EC D"], slots: Slots) -> Float[Array, "T D"]:
    """Sum each token's rows from its slots; dropped copies add nothing. The transpose of `spread`."""
    total = _rows(out_SD, slots.of_copy[:, 0])
    for k in range(1, slots.of_copy.shape[1]):
        total = total + _rows(out_SD, slots.of_copy[:, k])
    return total


spread.defvjp(lambda x, slots: (spread(x, slots), slots), lambda slots, dy: (collect(dy, slots), None))
collect.defvjp(lambda out, slots: (collect(out, slots), slots), lambda slots, dy: (spread(dy, slots), None))


@jax.custom_vjp
def weights_of_slots(weights_TK: Float[Array, "T K"], slots: Slots) -> Float[Array, "EC"]:
    """The routing weight of the copy in each slot; 0 in empty ones."""
    return _rows(weights_TK.reshape(-1), slots.copy)


weights_of_slots.defvjp(
    lambda weights, slots: (weights_of_slots(weights, slots), slots), lambda slots, dw: (_rows(dw, slots.of_copy), None)
)


def _rows(table: Array, indices: Array) -> Array:
    """`table[indices]`, zero where an index is past the end."""
    return jnp.take(table, indices, axis=0, mode="fill", fill_value=0)


def capacity_of(factor: float, tokens: int, k: int, experts: int) -> int:
    """How many copies an expert takes at most: `factor` times the mean load."""
    return max(8, round(factor * tokens * k / experts))


def apply_experts(
    gate_up: Float[Array, "E D 2 F"],
    down: Float[Array, "E F D"],
    x_TD: Float[Array, "T D"],
    ids_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    capacity_factor: float,
    limit: float | None = None,
) -> Float[Array, "T D"]:
    """Sum of each token's experts by weight; an expert takes at most `capacity_factor` times the mean load. limit: as of `gated`."""
    experts, width, _, hidden = gate_up.shape
    capacity = capacity_of(capacity_factor, *ids_TK.shape, experts)
    slots = assign_slots(ids_TK, experts, capacity)
    rows = spread(x_TD, slots).reshape(experts, capacity, width)
    both = jnp.einsum("ecd,edf->ecf", rows, gate_up.reshape(experts, width, 2 * hidden))
    activated = gated(both[..., :hidden], both[..., hidden:], limit)
    activated = activated * weights_of_slots(weights_TK, slots).reshape(experts, capacity, 1)
    out = jnp.einsum("ecf,efd->ecd", activated, down).reshape(experts * capacity, width)
    return collect(out, slots)


def experts_within(capacity_factor: float):
    """`apply_experts` as the product of a forward pass (`XlaProducts.experts`)."""

    def experts(weights: RoutedExperts, x_TD, ids_TK, weights_TK):
        matrices = weights.gate_up.value(x_TD.dtype), weights.down.value(x_TD.dtype)
        return apply_experts(*matrices, x_TD, ids_TK, weights_TK, capacity_factor, weights.limit)

    return experts
