"""``ragged``: each rank sends every other rank exactly the rows for its experts, which arrive in one contiguous layout.

Prefill on GPUs works this way: no padding on the wire, and contiguous rows for the local product. A third collective tells the ranks the
sizes. Buffers have room for the worst case, every token of the group on one rank; ``chunk_tokens`` bounds it.
``lax.ragged_all_to_all`` exists for GPU and TPU. Elsewhere a padded ``all_to_all`` and a masked scatter emulate it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from sharding.dispatch.collectives import Collective, gathered, spread
from sharding.dispatch.config import even_routing_rows
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent
from sharding.dispatch.route import Route, add_returned, fill_cells, plan_route
from sharding.dispatch.transit import ExchangePlan, PlannedMethod, Transit
from sharding.dispatch.wire import WireFormat

NATIVE_PLATFORMS = ("gpu", "cuda", "rocm", "tpu")


class _InFlight(NamedTuple):
    """What a rank keeps while its rows are in flight.

    sent_G, received_G: number of rows to and from each rank. dispatch_offsets_G, combine_offsets_G: row of each rank's receive buffer at
    which this rank's rows begin. cell_TK: row of a choice in the send buffer, and of its sum in the buffer of returned rows. shared_rows:
    this rank's packed tokens for its fused shared expert, until ``send``, or None. counts: set by ``compute``. shared_sums: the shared
    expert's sums, set by ``answer``.
    """

    route: Route
    sent_G: Array
    received_G: Array
    dispatch_offsets_G: Array
    combine_offsets_G: Array
    cell_TK: Array
    shared_rows: Array | None
    counts: Counts | None = None
    shared_sums: Array | None = None


@dataclass(frozen=True)
class Ragged(PlannedMethod):
    """``Method`` of ``ragged``: sends every row that is needed, and no other. ``prepare`` exchanges the sizes."""

    name = "ragged"

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        arriving, times = group.size * plan.rows, plan.chunks
        inner = cls._over_width(group, wire, plan, arriving)
        if group.size == 1:
            return inner

        def exchange(purpose: str, operand_rows: int, row_bytes: int) -> Collective:
            if group.platform not in NATIVE_PLATFORMS:
                return spread("all_to_all", purpose, group.axes, group.size, arriving * row_bytes, times)
            mean = even_routing_rows(plan.rows, plan.choices, group.size) * (group.size - 1) * row_bytes
            operand = operand_rows * row_bytes
            return Collective("ragged_all_to_all", purpose, group.axes, group.size, operand, round(mean), times)

        sizes = gathered("sizes", group.axes, group.size, 4 * group.size, times)
        sending = plan.rows * min(plan.choices, group.size)
        return [
            sizes,
            exchange("dispatch", sending, wire.row_bytes),
            *inner,
            exchange("combine", arriving, wire.answer_bytes),
        ]

    @classmethod
    def sends_padding(cls, group: ExpertGroup) -> bool:
        """As ``Method.sends_padding``."""
        return group.platform not in NATIVE_PLATFORMS or group.width > 1

    @property
    def _rows(self) -> tuple[int, int]:
        """(most rows that a rank sends, most rows that it receives)."""
        return self.plan.rows * min(self.plan.choices, self.group.size), self.plan.rows * self.group.size

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Exchange the sizes, and order this rank's rows by destination rank."""
        route = plan_route(self.group, slots_TK)
        counts_SG = self.group.gather(route.counts_G[None])
        me = self.group.index()
        sent_G, received_G = counts_SG[me], counts_SG[:, me]
        before_G = _exclusive_sums(sent_G)  # first row for each rank in this rank's send buffer
        cell_TK = jnp.where(
            route.sends_TK, before_G[route.rank_TK] + route.place_TK, self.plan.rows * self.plan.choices
        )
        packed = jnp.concatenate(
            [self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0)), self.wire.empty_row(jnp.int32(0))]
        )
        shared_rows = self._pack_shared(x_TD, slots_TK, jnp.int32(0))
        rows = packed.take(fill_cells(cell_TK, self._rows[0]), axis=0, mode="clip")
        dispatch_offsets_G = _exclusive_sums(counts_SG, axis=0)[me]
        combine_offsets_G = _exclusive_sums(counts_SG, axis=1)[:, me]
        return Transit(
            rows, _InFlight(route, sent_G, received_G, dispatch_offsets_G, combine_offsets_G, cell_TK, shared_rows)
        )

    def send(self, transit: Transit) -> Transit:
        """Exchange the rows in one collective, then gather the arrived rows over ``tp``."""
        kept = transit.kept
        empty = self.wire.empty_row(jnp.int32(0))
        arrived = ragged_exchange(
            self.group,
            transit.rows,
            jnp.broadcast_to(empty, (self._rows[1], empty.shape[1])),
            kept.sent_G,
            kept.received_G,
            offsets_G=kept.dispatch_offsets_G,
            most=self.plan.rows,
        )
        return self._gather_arrived(arrived, kept)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the weighted sums of this rank's experts for each row."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        sums_ND, counts = experts(rows, slots_NK, weights_NK)
        return Transit(sums_ND, transit.kept._replace(counts=counts))

    def answer(self, transit: Transit) -> Transit:
        """Reduce the sums over the parts of the experts' width, then return them in one collective."""
        kept = transit.kept
        out_rows, in_rows = self._rows
        sums_ND = self.group.share_width(transit.rows)
        returned = ragged_exchange(
            self.group,
            sums_ND[:in_rows],
            jnp.zeros((out_rows, sums_ND.shape[1]), sums_ND.dtype),
            kept.received_G,
            kept.sent_G,
            offsets_G=kept.combine_offsets_G,
            most=self.plan.rows,
        )
        return Transit(returned, kept._replace(shared_sums=sums_ND[in_rows:] if self.plan.shared else None))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Add the returned sums of each token, in float32."""
        kept = transit.kept
        y_TD = add_returned(transit.rows, kept.cell_TK, kept.route.sends_TK)
        if kept.shared_sums is not None:
            y_TD += kept.shared_sums.astype(jnp.float32)
        return y_TD.astype(self.wire.dtype), add_sent(self.group, kept.counts, kept.route.counts_G, 1)


def ragged_exchange(
    group: ExpertGroup,
    rows_MW: jax.Array,
    out_NW: jax.Array,
    sent_G: Int[Array, "G"],
    received_G: Int[Array, "G"],
    *,
    offsets_G: Int[Array, "G"],
    most: int,
) -> jax.Array:
    """Send the first ``sent_G[0]`` rows to rank 0, the next ``sent_G[1]`` to rank 1, and so on; they arrive in ``out_NW``, by sending rank.

    received_G: number of rows from each rank. offsets_G: row of each rank's ``out_NW`` at which its rows begin. most: upper bound of
    every entry of ``sent_G`` (the emulation pads to it). The remaining rows of ``out_NW`` are unchanged.
    """
    if group.size == 1:
        return out_NW.at[: rows_MW.shape[0]].set(rows_MW[: out_NW.shape[0]])
    if group.platform in NATIVE_PLATFORMS:
        return lax.ragged_all_to_all(
            rows_MW, out_NW, _exclusive_sums(sent_G), sent_G, offsets_G, received_G, axis_name=group.axes
        )
    place_GC = _exclusive_sums(sent_G)[:, None] + jnp.arange(most)
    arrived_NW = group.exchange(rows_MW.take(place_GC.reshape(-1), axis=0, mode="clip"))
    used_GC = jnp.arange(most) < received_G[:, None]
    target_GC = jnp.where(used_GC, _exclusive_sums(received_G)[:, None] + jnp.arange(most), out_NW.shape[0])
    return out_NW.at[target_GC.reshape(-1)].set(arrived_NW, mode="drop")


def _exclusive_sums(counts: jax.Array, axis: int = -1) -> jax.Array:
    return jnp.cumsum(counts, axis=axis) - counts
