"""``padded``: a fixed number of row slots from each rank to each other rank, in one ``all_to_all`` each way.

Low-latency decode on GPUs works like this: shapes are static, and no sizes are exchanged first. A token goes once to a rank that
holds several of its experts, and their weighted sum returns as one row. Tokens over capacity go in further rounds of the same two
collectives. Each row of the first round carries the number of rounds that its sender needs, so every rank of the group learns the
maximum without another collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from sharding.dispatch.collectives import Collective, spread
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent
from sharding.dispatch.route import Route, add_returned, cells_of, fill_cells, plan_route
from sharding.dispatch.transit import ExchangePlan, FurtherRounds, PlannedMethod, Transit, in_rounds
from sharding.dispatch.wire import WireFormat


class _InFlight(NamedTuple):
    """What a rank keeps while its first round is in flight.

    packed: its packed tokens, then an empty row. shared_rows: packed tokens for the rank's fused shared expert, or None.
    sent_G: number of its rows for each rank. handle: what combine needs from dispatch; set by ``send``. counts, rounds: token counts, and
    the maximum of the senders' rounds; set by ``compute``. shared_sums: results of ``shared_rows``; set by ``answer``. further_sums:
    float32 sums of further rounds that ran before ``add``.
    """

    packed: Array
    shared_rows: Array | None
    route: Route
    sent_G: Array
    handle: Any = None
    counts: Counts | None = None
    rounds: Array | None = None
    shared_sums: Array | None = None
    further_sums: Array | None = None


@dataclass(frozen=True)
class Padded(PlannedMethod):
    """``Method`` of ``padded``, with room for ``plan.capacity`` rows from each rank to each other in a round.

    If an expert's width is split over ``tp``, tokens travel between ranks with the same ``tp`` index. The ``tp`` ranks of
    the destination all-gather the arrived rows, and reduce-scatter the sums. ``Hierarchical`` overrides private methods.
    """

    name = "padded"

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        arriving, times = group.size * plan.capacity, plan.chunks * rounds
        inner = cls._over_width(group, wire, plan, arriving, rounds)
        if group.size == 1:
            return inner

        def all_to_all(purpose: str, row_bytes: int) -> Collective:
            return spread("all_to_all", purpose, group.axes, group.size, arriving * row_bytes, times)

        return [all_to_all("dispatch", wire.row_bytes), *inner, all_to_all("combine", wire.answer_bytes)]

    @property
    def _num_cells(self) -> int:
        """Number of row slots (cells) that a rank sends in a round."""
        return self.group.size * self.plan.capacity

    def _needs_one_round(self, tokens: int) -> bool:
        """Whether one round is enough for any routing of ``tokens`` tokens per rank."""
        return self.plan.capacity >= tokens

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Fill the cells of the first round, and pack all tokens for further ones."""
        route, sent_G, needed = self._plan(slots_TK)
        # Empty slots carry the number of rounds too: a rank that receives no token must still know when to stop.
        packed = jnp.concatenate([self.wire.pack(x_TD, slots_TK, weights_TK, needed), self.wire.empty_row(needed)])
        shared_rows = self._pack_shared(x_TD, slots_TK, needed)
        return Transit(self._send_buffer(packed, route, 0), _InFlight(packed, shared_rows, route, sent_G))

    def send(self, transit: Transit) -> Transit:
        """Exchange the rows in one ``all_to_all``, then all-gather the arrived rows over the ranks that share a width."""
        arrived, handle = self._dispatch(transit.rows, 0)
        return self._gather_arrived(arrived, transit.kept._replace(handle=handle))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the weighted sums of this rank's experts, and read how many rounds the senders need."""
        rows, slots_NK, weights_NK, needed_N = self.wire.unpack(transit.rows)
        sums_ND, counts = experts(rows, slots_NK, weights_NK)
        return Transit(sums_ND, transit.kept._replace(counts=counts, rounds=jnp.max(needed_N)))

    def answer(self, transit: Transit) -> Transit:
        """Reduce-scatter the sums over the ranks that share a width, then return them in one ``all_to_all``."""
        sums_ND, kept = self._reduce_sums(transit)
        return Transit(self._combine(sums_ND, kept.handle), kept)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Add the sums of the first round to their tokens, and run further rounds unless they ran before."""
        kept = transit.kept
        cell_TK, first_TK = self._cells(kept.route, 0)
        y_TD, counts = add_returned(transit.rows, cell_TK, first_TK), kept.counts
        if kept.shared_sums is not None:
            y_TD += kept.shared_sums.astype(jnp.float32)
        if kept.further_sums is not None:
            y_TD = self._add_round(kept.further_sums, y_TD, first_TK)
        elif (more := self.further(transit)) is not None:
            y_TD, counts = in_rounds(more.rounds, lambda r, so_far: more.run(r, so_far, experts), (y_TD, counts))
        return y_TD.astype(self.wire.dtype), add_sent(self.group, counts, kept.sent_G, jnp.maximum(kept.rounds, 1))

    def further(self, transit: Transit) -> FurtherRounds | None:
        """Return the rounds that all ranks need after the first; None if one is always enough. Their sums start at zero."""
        kept, tokens = transit.kept, len(transit.kept.route.rank_TK)
        if self._needs_one_round(tokens):
            return None

        def begin() -> tuple[Array, Counts]:
            return jnp.zeros((tokens, transit.rows.shape[1]), jnp.float32), kept.counts

        def finish(so_far: tuple[Array, Counts]) -> Transit:
            sums, counts = so_far
            return Transit(transit.rows, kept._replace(further_sums=sums, counts=counts))

        return FurtherRounds(jnp.maximum(kept.rounds, 1), begin, partial(self._round, transit), finish)

    def _round(
        self, transit: Transit, r: jax.Array, so_far: tuple[Array, Counts], experts: RankExperts
    ) -> tuple[Array, Counts]:
        """Run round ``r``: dispatch, experts, combine; add its sums and counts."""
        packed, route = transit.kept.packed, transit.kept.route
        y_TD, counts = so_far
        arrived, handle = self._dispatch(self._send_buffer(packed, route, r), r)
        rows, slots_NK, weights_NK, _ = self.wire.unpack(self.group.pool_width(arrived))
        sums_ND, round_counts = experts(rows, slots_NK, weights_NK)
        returned = self._combine(self.group.share_width(sums_ND), handle)
        cell_TK, now_TK = self._cells(route, r)
        y_TD = self._add_round(y_TD, add_returned(returned, cell_TK, now_TK), now_TK)
        return y_TD, jax.tree.map(jnp.add, counts, round_counts)

    def _reduce_sums(self, transit: Transit) -> tuple[Array, _InFlight]:
        """Invert ``_gather_arrived``: reduce-scatter the sums, and keep those of ``shared_rows`` on the rank."""
        sums_ND, arrived = self.group.share_width(transit.rows), self.group.size * self.plan.capacity
        return sums_ND[:arrived], transit.kept._replace(shared_sums=sums_ND[arrived:] if self.plan.shared else None)

    def _plan(self, slots_TK: Int[Array, "T K"]) -> tuple[Route, Int[Array, "G"], Array]:
        """Return the route of the rank's tokens, the number of rows for each rank, and how many rounds they need."""
        route, capacity = plan_route(self.group, slots_TK), self.plan.capacity
        return route, route.counts_G, lax.div(jnp.max(route.counts_G) + (capacity - 1), capacity)

    def _dispatch(self, rows: Array, r: jax.Array | int) -> tuple[Array, Any]:
        """Send round ``r``'s rows to the ranks of their experts. Also return the handle that ``_combine`` needs."""
        return self.group.exchange(rows), None

    def _combine(self, sums_ND: Array, handle: Any) -> Array:
        """Return the sums to the cells that their rows came from."""
        return self.group.exchange(sums_ND)

    def _add_round(self, y_TD: Array, more_TD: Array, now_TK: Bool[Array, "T K"]) -> Array:
        """Add a round's sums. With one choice per row, each row gets its sum from exactly one round."""
        return jnp.where(now_TK, more_TD, y_TD) if now_TK.shape[1] == 1 else y_TD + more_TD

    def _cells(self, route: Route, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
        """Return the cell of each choice's row in round ``r``, and whether that round sends the row."""
        return cells_of(route, self.plan.capacity, r)

    def _send_buffer(self, packed: Array, route: Route, r: jax.Array | int) -> Array:
        cell_TK, _ = self._cells(route, r)
        return packed.take(fill_cells(cell_TK, self._num_cells), axis=0, mode="clip")
