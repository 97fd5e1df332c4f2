"""``padded``: a fixed number of row slots from each rank to each other rank, in one ``all_to_all`` each way.

What low-latency decode does on GPUs: shapes are static, nothing is negotiated first. A token goes once to a rank that
holds several of its experts; their weighted sum is formed there and returns as one row. Tokens over capacity go in
further rounds of the same two collectives. Each row of the first round carries the number of rounds its sender needs, so
every rank of the group learns the maximum, and runs the same number, without a collective of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.group import ExpertGroup, Product, fewer_columns
from sharding.dispatch.wire import WireFormat


@dataclass(frozen=True)
class Route:
    """Where a rank's tokens go: for each of a token's K choices the rank, and the place in the queue for that rank.

    Of several choices on one rank only the first counts (``sends``). Leaves are arrays [T, K]; ``counts`` is [G].
    """

    rank_TK: Int[Array, "T K"]
    place_TK: Int[Array, "T K"]
    sends_TK: Bool[Array, "T K"]
    counts_G: Int[Array, "G"]


def plan_route(group: ExpertGroup, slots_TK: Int[Array, "T K"]) -> Route:
    """Queue this rank's tokens for each rank of the group, in token order."""
    valid_TK = slots_TK >= 0
    rank_TK = jnp.where(valid_TK, slots_TK // group.experts, group.size)
    earlier_KK = jnp.tri(slots_TK.shape[1], k=-1, dtype=bool)
    repeated_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK, axis=2)
    sends_TK = valid_TK & ~repeated_TK
    goes_TG = jnp.any((rank_TK[:, :, None] == jnp.arange(group.size)) & valid_TK[:, :, None], axis=1)
    queue_TG = jnp.cumsum(goes_TG.astype(jnp.int32), axis=0)
    place_TK = jnp.take_along_axis(queue_TG, jnp.minimum(rank_TK, group.size - 1), axis=1) - 1
    return Route(rank_TK, place_TK, sends_TK, queue_TG[-1])


def padded_dispatch(
    group: ExpertGroup,
    wire: WireFormat,
    capacity: int,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    product: Product,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """Inside ``shard_map``: weighted expert outputs of this rank's T tokens, and the number of rounds."""
    tokens = x_TD.shape[0]
    route = plan_route(group, slots_TK)
    needed = -(-jnp.max(route.counts_G) // capacity)
    packed = jnp.concatenate([wire.pack(x_TD, slots_TK, weights_TK, needed), wire.empty_row()])
    # Empty slots carry the number of rounds too: a rank that receives no token must still know when to stop.
    packed = packed.at[-1, -(4 // wire.word.itemsize) :].set(packed[0, -(4 // wire.word.itemsize) :])

    def one_round(r: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        place_TK = route.place_TK - r * capacity
        now_TK = route.sends_TK & (place_TK >= 0) & (place_TK < capacity)
        cell_TK = jnp.where(now_TK, route.rank_TK * capacity + place_TK, group.size * capacity)
        token_TK = jnp.broadcast_to(jnp.arange(tokens)[:, None], cell_TK.shape)
        source = jnp.full((group.size * capacity,), tokens, jnp.int32).at[cell_TK].set(token_TK, mode="drop")
        sent = packed.at[source].get(mode="promise_in_bounds")
        arrived = group.exchange(sent)
        back, rounds = _serve(group, wire, arrived, product)
        returned = group.exchange(back)
        parts_TKD = returned.at[jnp.where(now_TK, cell_TK, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
        return jnp.sum(jnp.where(now_TK[:, :, None], parts_TKD, 0), axis=1), rounds

    y_TD, rounds = one_round(0)
    if capacity < tokens:
        # The trip count is the same on all ranks that meet in the body's collectives.
        _, y_TD = lax.while_loop(
            lambda state: state[0] < rounds,
            lambda state: (state[0] + 1, state[1] + one_round(state[0])[0]),
            (jnp.int32(1), y_TD),
        )
    return y_TD.astype(x_TD.dtype), rounds


def _serve(
    group: ExpertGroup, wire: WireFormat, arrived_NW: jax.Array, product: Product
) -> tuple[jax.Array, jax.Array]:
    """Apply this rank's experts to rows that arrived; also the most rounds that any of their senders needs.

    Where an expert's width is split over ``tp``, the ``tp`` ranks first pool what arrived at each, and then share out the sums.
    """
    if group.width > 1:
        arrived_NW = lax.all_gather(arrived_NW, group.width_axes, axis=0, tiled=True)
    x_ND, slots_NK, weights_NK, needed_N = wire.unpack(arrived_NW)
    ids, weights = fewer_columns(group.local_ids(slots_NK), weights_NK, group.experts)
    back_ND = product(x_ND, ids, weights)
    if group.width > 1:
        back_ND = lax.psum_scatter(back_ND, group.width_axes, scatter_dimension=0, tiled=True)
    return back_ND, jnp.max(needed_N)
