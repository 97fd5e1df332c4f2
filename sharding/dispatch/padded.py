"""``padded``: a fixed number of row slots from each rank to each other rank, in one ``all_to_all`` each way.

What low-latency decode does on GPUs: shapes are static, nothing is negotiated first. A token goes once to a rank that
holds several of its experts; their weighted sum is formed there and returns as one row. Tokens over capacity go in
further rounds of the same two collectives. Each row of the first round carries the number of rounds its sender needs, so
every rank of the group learns the maximum, and runs the same number, without a collective of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, add_sent, home_slots
from sharding.dispatch.route import Route, add_returned, fill_cells, plan_route, total_counts
from sharding.dispatch.transit import Transit
from sharding.dispatch.wire import WireFormat


class _Kept(NamedTuple):
    """What a rank keeps while its first round is on its way.

    packed: its tokens, and an empty row behind them; home: those for the expert that it has for them, or None.
    From ``compute`` on, seen: counts; rounds: how many all ranks need. From ``answer`` on, own: what ``home`` gave.
    """

    packed: Array
    home: Array | None
    route: Route
    seen: Counts | None = None
    rounds: Array | None = None
    own: Array | None = None


@dataclass(frozen=True)
class Padded:
    """``Method`` of ``padded``, with room for ``capacity`` rows from each rank to each other in a round.

    Where an expert's width is split over ``tp``, tokens travel between ranks of the same ``tp`` index; the ``tp`` ranks of
    the destination pool what arrived at each, and afterwards share out the sums.
    """

    group: ExpertGroup
    wire: WireFormat
    capacity: int
    home: bool

    @property
    def _cells(self) -> int:
        return self.group.size * self.capacity

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Fill the cells of the first round, and pack all tokens for further ones."""
        route = plan_route(self.group, slots_TK)
        needed = -(-jnp.max(route.counts_G) // self.capacity)
        # Empty slots carry the number of rounds too: a rank that receives no token must still know when to stop.
        packed = jnp.concatenate([self.wire.pack(x_TD, slots_TK, weights_TK, needed), self.wire.empty_row(needed)])
        home = self.wire.pack(x_TD, *home_slots(slots_TK), needed) if self.home else None
        return Transit(self._fill(packed, route, 0), _Kept(packed, home, route))

    def send(self, transit: Transit) -> Transit:
        """One ``all_to_all``, and the pooling of what arrived over ``tp``."""
        kept, arrived = transit.kept, self.group.exchange(transit.rows)
        if kept.home is not None:
            arrived = jnp.concatenate([arrived, kept.home])
        return Transit(self.group.pool_width(arrived), kept._replace(home=None))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """The weighted sums of this rank's experts, and how many rounds the senders need."""
        rows, slots_NK, weights_NK, needed_N = self.wire.unpack(transit.rows)
        sums_ND, seen = experts(rows, slots_NK, weights_NK)
        return Transit(sums_ND, transit.kept._replace(seen=seen, rounds=jnp.max(needed_N)))

    def answer(self, transit: Transit) -> Transit:
        """The sums over parts of a width, and one ``all_to_all``."""
        sums_ND = self.group.share_width(transit.rows)
        own = sums_ND[self._cells :] if self.home else None
        return Transit(self.group.exchange(sums_ND[: self._cells]), transit.kept._replace(own=own))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """The sums of the first round, and those of further rounds, which come and go here."""
        packed, _, route, seen, rounds, own = transit.kept
        y_TD = add_returned(transit.rows, *self._cell(route, 0))
        if own is not None:
            y_TD += own.astype(jnp.float32)
        rounds = jnp.maximum(rounds, 1)
        if self.capacity < packed.shape[0] - 1:

            def further(state):
                r, y_TD, seen = state
                arrived = self.group.exchange(self._fill(packed, route, r))
                rows, slots_NK, weights_NK, _ = self.wire.unpack(self.group.pool_width(arrived))
                sums_ND, more_seen = experts(rows, slots_NK, weights_NK)
                returned = self.group.exchange(self.group.share_width(sums_ND))
                cell_TK, now_TK = self._cell(route, r)
                more_TD = add_returned(returned, cell_TK, now_TK)
                # A row of one choice is sent in one round.
                y_TD = jnp.where(now_TK, more_TD, y_TD) if now_TK.shape[1] == 1 else y_TD + more_TD
                return r + 1, y_TD, total_counts(seen, more_seen)

            # The trip count is the same on all ranks that meet in the body's collectives.
            _, y_TD, seen = lax.while_loop(lambda state: state[0] < rounds, further, (jnp.int32(1), y_TD, seen))
        return y_TD.astype(self.wire.dtype), add_sent(self.group, seen, route.counts_G, rounds)

    def _cell(self, route: Route, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
        """In which cell of round ``r`` each choice's row goes and comes back, and whether it does."""
        place_TK = route.place_TK - r * self.capacity
        now_TK = route.sends_TK & (place_TK >= 0) & (place_TK < self.capacity)
        return jnp.where(now_TK, route.rank_TK * self.capacity + place_TK, self._cells), now_TK

    def _fill(self, packed: Array, route: Route, r: jax.Array | int) -> Array:
        cell_TK, _ = self._cell(route, r)
        return packed.take(fill_cells(cell_TK, self._cells), axis=0, mode="clip")
