"""``Route``: where a rank's tokens go, one row for each rank that holds any of a token's experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import goes_to


class Route(NamedTuple):
    """For each of a token's K choices: the rank, and the place in this rank's queue for that rank (in token order).

    Of several choices on one rank only the first counts (``sends_TK``), so that a token is sent there once.
    ``counts_G``: lengths of the queues.
    """

    rank_TK: Int[Array, "T K"]
    place_TK: Int[Array, "T K"]
    sends_TK: Bool[Array, "T K"]
    counts_G: Int[Array, "G"]


def plan_route(group: ExpertGroup, slots_TK: Int[Array, "T K"]) -> Route:
    """Queue this rank's tokens for each rank of the group."""
    valid_TK = slots_TK >= 0
    rank_TK = jnp.where(valid_TK, lax.div(slots_TK, group.experts), 0)
    earlier_KK = jnp.tri(slots_TK.shape[1], k=-1, dtype=bool) & valid_TK[:, None, :]
    repeated_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK, axis=2)
    queue_TG = jnp.cumsum(goes_to(group, slots_TK).astype(jnp.int32), axis=0)
    place_TK = jnp.take_along_axis(queue_TG, rank_TK, axis=1, mode="promise_in_bounds") - 1
    return Route(rank_TK, place_TK, valid_TK & ~repeated_TK, queue_TG[-1])


def cells_of(route: Route, capacity: int, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
    """In which of each rank's ``capacity`` cells a choice's row stands in round ``r`` of its queue, and whether it does in that round."""
    place_TK = route.place_TK - r * capacity
    now_TK = route.sends_TK & (place_TK >= 0) & (place_TK < capacity)
    return jnp.where(now_TK, route.rank_TK * capacity + place_TK, route.counts_G.shape[0] * capacity), now_TK


def fill_cells(cell_TK: Int[Array, "T K"], cells: int) -> Int[Array, "cells"]:
    """Which token stands in each cell of a send buffer, T where none: the inverse of ``cell_TK`` (out of range: nowhere)."""
    tokens = cell_TK.shape[0]
    token_TK = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], cell_TK.shape)
    return jnp.full((cells,), tokens, jnp.int32).at[cell_TK].set(token_TK, mode="drop", wrap_negative_indices=False)


def add_returned(
    returned_ND: Float[Array, "N D"], cell_TK: Int[Array, "T K"], here_TK: Bool[Array, "T K"]
) -> Float[Array, "T D"]:
    """Each token's sum, in float32, of the rows that came back into its cells; ``here_TK`` says which cells are its own."""
    parts_TKD = returned_ND.take(jnp.where(here_TK, cell_TK, 0), axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(jnp.where(here_TK[:, :, None], parts_TKD, 0), axis=1)


def total_counts(before: dict[str, jax.Array], after: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Counts of two rounds together."""
    return jax.tree.map(jnp.add, before, after)
