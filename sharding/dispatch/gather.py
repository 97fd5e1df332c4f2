"""``gather``: every rank sees every token of the EP group, computes what its experts add, and the sums are scattered.

Two collectives whatever the routing: one ``all_gather`` of packed rows, one reduce-scatter. It moves each token to
all ranks, so it suits few tokens per rank (decode), where a fixed number of small messages beats fewer bytes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent, goes_to
from sharding.dispatch.wire import WireFormat


def gather_dispatch(
    group: ExpertGroup,
    wire: WireFormat,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """Inside ``shard_map``: this rank's T tokens in, their weighted expert outputs back; and counts.

    Where an expert's width is split over ``tp``, the gather and the scatter simply run over those ranks too: each
    holds a part of the width, so the one reduction adds parts of widths and parts of experts alike.
    """
    packed = wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0))
    arrived = lax.all_gather(packed, group.all_axes, axis=0, tiled=True)
    everybodys = arrived.shape[0]
    if experts.home:
        own_rows = wire.pack(x_TD, *experts.home_slots(slots_TK), jnp.int32(0))
        arrived = jnp.concatenate([arrived, group.pool_width(own_rows)])
    rows, slots_NK, weights_NK, _ = wire.unpack(arrived)
    partial_ND, seen = experts(rows, slots_NK, weights_NK)
    y_TD = lax.psum_scatter(partial_ND[:everybodys], group.all_axes, scatter_dimension=0, tiled=True)
    if experts.home:
        y_TD += group.share_width(partial_ND[everybodys:])
    if seen:
        seen = add_sent(group, seen, jnp.sum(goes_to(group, slots_TK), axis=0), 1)
    return y_TD, seen
