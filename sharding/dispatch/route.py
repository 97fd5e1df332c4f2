"""``Route``: destinations of a rank's tokens, with one row for each rank that holds any of a token's experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import goes_to


class Route(NamedTuple):
    """For each of a token's K choices: the destination rank, and the token's position in the queue for that rank (in token order).

    Of several choices on one rank, only the first sends a row (``sends_TK``). ``counts_G``: lengths of the queues.
    """

    rank_TK: Int[Array, "T K"]
    place_TK: Int[Array, "T K"]
    sends_TK: Bool[Array, "T K"]
    counts_G: Int[Array, "G"]


def plan_route(group: ExpertGroup, slots_TK: Int[Array, "T K"]) -> Route:
    """Queue this rank's tokens for each rank of the group. Negative slots are no choices."""
    valid_TK = slots_TK >= 0
    rank_TK = jnp.where(valid_TK, lax.div(slots_TK, group.experts), 0)
    earlier_TKK = jnp.tri(slots_TK.shape[1], k=-1, dtype=bool) & valid_TK[:, None, :]
    repeated_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_TKK, axis=2)
    lengths_TG = jnp.cumsum(goes_to(group, slots_TK).astype(jnp.int32), axis=0)
    place_TK = jnp.take_along_axis(lengths_TG, rank_TK, axis=1, mode="promise_in_bounds") - 1
    return Route(rank_TK, place_TK, valid_TK & ~repeated_TK, lengths_TG[-1])


def cells_of(route: Route, capacity: int, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
    """Return each choice's send-buffer cell in round ``r`` (``capacity`` per rank; past the last if not sent), and whether it is sent."""
    place_TK = route.place_TK - r * capacity
    sent_TK = route.sends_TK & (place_TK >= 0) & (place_TK < capacity)
    return jnp.where(sent_TK, route.rank_TK * capacity + place_TK, route.counts_G.shape[0] * capacity), sent_TK


def fill_cells(cell_TK: Int[Array, "T K"], cells: int) -> Int[Array, "cells"]:
    """Return the token in each cell of a send buffer, T if none: the inverse of ``cell_TK``. Cells out of range are dropped."""
    tokens = cell_TK.shape[0]
    token_TK = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], cell_TK.shape)
    return jnp.full((cells,), tokens, jnp.int32).at[cell_TK].set(token_TK, mode="drop", wrap_negative_indices=False)


def add_returned(
    returned_ND: Float[Array, "N D"], cell_TK: Int[Array, "T K"], here_TK: Bool[Array, "T K"]
) -> Float[Array, "T D"]:
    """Return each token's float32 sum of the rows returned to its cells. Choices with ``here_TK`` False have no cell."""
    parts_TKD = returned_ND.take(jnp.where(here_TK, cell_TK, 0), axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(jnp.where(here_TK[:, :, None], parts_TKD, 0), axis=1)
