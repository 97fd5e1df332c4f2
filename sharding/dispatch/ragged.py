"""``ragged``: each rank sends each other rank exactly the rows it has for it, into one contiguous layout.

What prefill does on GPUs: no padding on the wire, and the local product sees its rows in a row. The sizes must be known
first, hence a third collective, of four bytes per pair of ranks. Buffers hold the worst case, every token of the group
on one rank; ``chunk_tokens`` bounds it.

``lax.ragged_all_to_all`` exists for GPU and TPU. Elsewhere it is emulated, exactly, by a padded ``all_to_all`` and a masked scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent
from sharding.dispatch.route import add_returned, fill_cells, plan_route
from sharding.dispatch.wire import WireFormat

NATIVE_PLATFORMS = ("gpu", "cuda", "rocm", "tpu")


def ragged_dispatch(
    group: ExpertGroup,
    wire: WireFormat,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """Inside ``shard_map``: weighted expert outputs of this rank's T tokens, and counts."""
    tokens, top_k = slots_TK.shape
    route = plan_route(group, slots_TK)
    me = group.index()
    counts_SG = route.counts_G[None] if group.size == 1 else lax.all_gather(route.counts_G, group.axes)
    sent_G, received_S = counts_SG[me], counts_SG[:, me]
    before_G = _exclusive_sums(sent_G)  # where the rows for each rank begin in this rank's send buffer
    cell_TK = jnp.where(route.sends_TK, before_G[route.rank_TK] + route.place_TK, tokens * top_k)
    out_rows, in_rows = tokens * min(top_k, group.size), tokens * group.size
    empty = wire.empty_row(jnp.int32(0))
    packed = jnp.concatenate([wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0)), empty])
    arrived = ragged_exchange(
        group,
        packed.take(fill_cells(cell_TK, out_rows), axis=0, mode="clip"),
        jnp.broadcast_to(empty, (in_rows, empty.shape[1])),
        sent_G,
        received_S,
        lands_G=_exclusive_sums(counts_SG, axis=0)[me],
        most=tokens,
    )
    if experts.home:
        arrived = jnp.concatenate([arrived, wire.pack(x_TD, *experts.home_slots(slots_TK), jnp.int32(0))])
    rows, slots_NK, weights_NK, _ = wire.unpack(group.pool_width(arrived))
    sums_ND, seen = experts(rows, slots_NK, weights_NK)
    sums_ND = group.share_width(sums_ND)
    returned = ragged_exchange(
        group,
        sums_ND[:in_rows],
        jnp.zeros((out_rows, sums_ND.shape[1]), sums_ND.dtype),
        received_S,
        sent_G,
        lands_G=_exclusive_sums(counts_SG, axis=1)[:, me],
        most=tokens,
    )
    y_TD = add_returned(returned, cell_TK, route.sends_TK)
    if experts.home:
        y_TD += sums_ND[in_rows:].astype(jnp.float32)
    return y_TD.astype(x_TD.dtype), add_sent(group, seen, route.counts_G, 1)


def ragged_exchange(
    group: ExpertGroup,
    rows_MW: jax.Array,
    out_NW: jax.Array,
    sent_G: Int[Array, "G"],
    received_G: Int[Array, "G"],
    *,
    lands_G: Int[Array, "G"],
    most: int,
) -> jax.Array:
    """Send runs of rows: the first ``sent_G[0]`` rows to rank 0, the next ``sent_G[1]`` to rank 1, and so on.

    They arrive in ``out_NW``, contiguous and ordered by sending rank; rows beyond them stay as they are.

    received_G: rows that each rank sends here; lands_G: at which row of rank g's ``out_NW`` this rank's run begins;
    most: an upper bound of every entry of ``sent_G`` (what the emulation pads to).
    """
    if group.size == 1:
        return out_NW.at[: rows_MW.shape[0]].set(rows_MW[: out_NW.shape[0]])
    if group.platform in NATIVE_PLATFORMS:
        return lax.ragged_all_to_all(
            rows_MW, out_NW, _exclusive_sums(sent_G), sent_G, lands_G, received_G, axis_name=group.axes
        )
    place_GC = _exclusive_sums(sent_G)[:, None] + jnp.arange(most)
    arrived_NW = group.exchange(rows_MW.take(place_GC.reshape(-1), axis=0, mode="clip"))
    used_GC = jnp.arange(most) < received_G[:, None]
    target_GC = jnp.where(used_GC, _exclusive_sums(received_G)[:, None] + jnp.arange(most), out_NW.shape[0])
    return out_NW.at[target_GC.reshape(-1)].set(arrived_NW, mode="drop")


def _exclusive_sums(counts: jax.Array, axis: int = -1) -> jax.Array:
    return jnp.cumsum(counts, axis=axis) - counts
