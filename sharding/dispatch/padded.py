"""``padded``: a fixed number of row slots from each rank to each other rank, in one ``all_to_all`` each way.

What low-latency decode does on GPUs: shapes are static, nothing is negotiated first. A token goes once to a rank that
holds several of its experts; their weighted sum is formed there and returns as one row. Tokens over capacity go in
further rounds of the same two collectives. Each row of the first round carries the number of rounds its sender needs, so
every rank of the group learns the maximum, and runs the same number, without a collective of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent
from sharding.dispatch.route import add_returned, fill_cells, plan_route, total_counts
from sharding.dispatch.wire import WireFormat


def padded_dispatch(
    group: ExpertGroup,
    wire: WireFormat,
    capacity: int,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """Inside ``shard_map``: weighted expert outputs of this rank's T tokens, and counts.

    Where an expert's width is split over ``tp``, tokens travel between ranks of the same ``tp`` index; the ``tp`` ranks of
    the destination pool what arrived at each, and afterwards share out the sums.
    """
    tokens, cells = x_TD.shape[0], group.size * capacity
    route = plan_route(group, slots_TK)
    needed = -(-jnp.max(route.counts_G) // capacity)
    # Empty slots carry the number of rounds too: a rank that receives no token must still know when to stop.
    packed = jnp.concatenate([wire.pack(x_TD, slots_TK, weights_TK, needed), wire.empty_row(needed)])

    def one_round(r: jax.Array | int, home: bool = False) -> tuple[Float[Array, "T D"], Counts, Int[Array, ""]]:
        place_TK = route.place_TK - r * capacity
        now_TK = route.sends_TK & (place_TK >= 0) & (place_TK < capacity)
        cell_TK = jnp.where(now_TK, route.rank_TK * capacity + place_TK, cells)
        arrived = group.exchange(packed.take(fill_cells(cell_TK, cells), axis=0, mode="clip"))
        if home:
            arrived = jnp.concatenate([arrived, wire.pack(x_TD, *experts.home_slots(slots_TK), needed)])
        rows, slots_NK, weights_NK, needed_N = wire.unpack(group.pool_width(arrived))
        sums_ND, seen = experts(rows, slots_NK, weights_NK)
        sums_ND = group.share_width(sums_ND)
        y_TD = add_returned(group.exchange(sums_ND[:cells]), cell_TK, now_TK)
        if home:
            y_TD += sums_ND[cells:].astype(jnp.float32)
        return y_TD, seen, jnp.max(needed_N)

    y_TD, seen, rounds = one_round(0, experts.home)
    rounds = jnp.maximum(rounds, 1)
    if capacity < tokens:

        def further(state):
            r, y_TD, seen = state
            more_TD, more_seen, _ = one_round(r)
            return r + 1, y_TD + more_TD, total_counts(seen, more_seen)

        # The trip count is the same on all ranks that meet in the body's collectives.
        _, y_TD, seen = lax.while_loop(lambda state: state[0] < rounds, further, (jnp.int32(1), y_TD, seen))
    return y_TD.astype(x_TD.dtype), add_sent(group, seen, route.counts_G, rounds)
