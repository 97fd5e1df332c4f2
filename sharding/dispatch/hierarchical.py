"""``hierarchical``: a row crosses to a host once, and is spread inside it over the fast links; sums come back the same way.

What DeepEP's normal kernels do between nodes, and what group-limited routing was made for: a token of DeepSeek-V3 has experts on about
seven of 32 ranks, but on at most four hosts. The way there and the way back are two exchanges each:

    | stage   | meet                                  | there                          | back                              |
    |---------|---------------------------------------|--------------------------------|-----------------------------------|
    | crossing| the ranks with one place on each host | a token to each of its hosts   | its sum over the host's ranks     |
    | inside  | the ranks of a host                   | on to the ranks of its experts | what the experts of a rank give   |

The rank of a host that a token crosses to has the same place there as the token's own rank has at home. It finds out where each row goes
from the expert ids in it, as every row brings them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.collectives import Collective, over_width, spread
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import goes_to
from sharding.dispatch.padded import Padded
from sharding.dispatch.route import Route, add_returned, cells_of, fill_cells, plan_route
from sharding.dispatch.transit import ExchangePlan, Stage, Transit
from sharding.dispatch.wire import WireFormat


class _Way(NamedTuple):
    """For each choice of each row that crossed to this rank: its cell among those that went on, and whether it has one."""

    cell_NK: Int[Array, "N K"]
    here_NK: Bool[Array, "N K"]


@dataclass(frozen=True)
class Hierarchical(Padded):
    """``Padded`` in two stages, with the same rows for each rank's experts.

    capacity: rows of one rank for one other, as of ``Padded``: the rank that passes them on keeps the rows of each sender apart, so that
    a sender knows by itself how many rounds its rows need. crossing: rows of one rank for one host in a round. tokens: rows of a rank.

    A round is a block of ``crossing`` rows of each host's queue, and of these the first, second … ``capacity`` rows for each rank: first
    all blocks with their first rows, then all with their second ones. A block crosses again for each.
    """

    crossing: int
    tokens: int

    name = "hierarchical"

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, home: bool) -> Hierarchical:
        """As ``Method.of``."""
        return cls(group, wire, plan.capacity, home, plan.crossing, plan.rows)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        times, hosts, arriving = plan.chunks * rounds, group.size // group.on_host, group.size * plan.capacity

        def stages(purpose: str, row_bytes: int) -> list[Collective]:
            crossing = hosts * plan.crossing * row_bytes
            return [
                spread("all_to_all", purpose, group.axes, hosts, crossing, times, "between"),
                spread("all_to_all", purpose, group.axes, group.on_host, arriving * row_bytes, times, "inside"),
            ]

        there, back = wire.row_bytes, wire.answer_bytes
        width = over_width(group, arriving, there, back, times)
        return [*stages("dispatch", there), *width, *reversed(stages("combine", back))]

    @cached_property
    def stages(self) -> tuple[ExpertGroup, ExpertGroup]:
        """Who meets between hosts, and inside one."""
        return self.group.in_two_stages()

    @property
    def there(self) -> tuple[Stage, ...]:
        """Between hosts, and then inside each."""
        return self.send, self.relay

    @property
    def back(self) -> tuple[Stage, ...]:
        """Inside each host, and then between them."""
        return self.answer, self.relay_back

    @property
    def _blocks(self) -> int:
        """Blocks of the longest queue that there can be."""
        return -(-self.tokens // self.crossing)

    @property
    def _cells(self) -> int:
        return self.stages[0].size * self.crossing

    def _holds_all(self, tokens: int) -> bool:
        return self.crossing >= tokens and self.capacity >= tokens

    def _plan(self, slots_TK) -> tuple[Route, Int[Array, "G"], Array]:
        route, sent_G = plan_route(self.stages[0], slots_TK), jnp.sum(goes_to(self.group, slots_TK), axis=0)
        blocks = -(-jnp.max(route.counts_G) // self.crossing)
        # No more rows of a block can be for one rank than a block has.
        turns = -(-jnp.minimum(jnp.max(sent_G), self.crossing) // self.capacity)
        return route, sent_G, jnp.maximum(turns - 1, 0) * self._blocks + blocks

    def _cell(self, route: Route, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
        return cells_of(route, self.crossing, r % self._blocks)

    def send(self, transit: Transit) -> Transit:
        """One ``all_to_all`` between hosts."""
        return Transit(self.stages[0].exchange(transit.rows), transit.kept)

    def relay(self, transit: Transit) -> Transit:
        """One ``all_to_all`` inside each host, and the pooling of what arrived over ``tp``."""
        return self._pooled(*self._spread(transit.rows, 0), transit.kept)

    def answer(self, transit: Transit) -> Transit:
        """The sums over parts of a width, and one ``all_to_all`` inside each host."""
        sums_ND, kept = self._shared(transit)
        return Transit(self.stages[1].exchange(sums_ND), kept)

    def relay_back(self, transit: Transit) -> Transit:
        """The sums over the ranks of a host, and one ``all_to_all`` between hosts."""
        return Transit(self._crossed_back(transit.rows, transit.kept.way), transit.kept)

    def _there(self, rows: Array, r: jax.Array | int) -> tuple[Array, _Way]:
        return self._spread(self.stages[0].exchange(rows), r)

    def _back(self, sums_ND: Float[Array, "N D"], way: _Way) -> Array:
        return self._crossed_back(self.stages[1].exchange(sums_ND), way)

    def _spread(self, arrived_NW: Array, r: jax.Array | int) -> tuple[Array, _Way]:
        """Bring the rows that crossed in round ``r`` to their ranks inside this host."""
        inside = self.stages[1]
        _, slots_NK, _, needed_N = self.wire.unpack(arrived_NW)
        way = self._onward(slots_NK, r // self._blocks)
        # A rank that gets no row of a sender still learns here how many rounds that one needs.
        packed = jnp.concatenate([arrived_NW, self.wire.empty_row(jnp.max(needed_N))])
        cells = fill_cells(way.cell_NK, self.group.size * self.capacity)
        return inside.exchange(packed.take(cells, axis=0, mode="clip")), way

    def _crossed_back(self, returned: Array, way: _Way) -> Array:
        """Add up what the ranks of this host gave of each row that crossed, and bring the sums back."""
        return self.stages[0].exchange(add_returned(returned, *way).astype(self.wire.dtype))

    def _joined(self, y_TD: Array, more_TD: Array, now_TK: Bool[Array, "T K"]) -> Array:
        # A block comes in every one of its rounds, with zeros for the rows whose turn it is not.
        return y_TD + more_TD

    def _onward(self, slots_NK: Int[Array, "N K"], turn: jax.Array | int) -> _Way:
        """Where the rows that crossed go inside this host: to each rank a run of cells of each sender."""
        between, inside = self.stages
        here_NK = (slots_NK >= 0) & (slots_NK // between.experts == between.index())
        local_NK = jnp.where(here_NK, slots_NK - between.index() * between.experts, -1)
        senders = rearrange(local_NK, "(sender n) k -> sender n k", sender=between.size)
        route = jax.vmap(partial(plan_route, inside))(senders)
        place = route.place_TK - turn * self.capacity
        now = route.sends_TK & (place >= 0) & (place < self.capacity)
        run = route.rank_TK * between.size + jnp.arange(between.size)[:, None, None]
        cell = jnp.where(now, run * self.capacity + place, self.group.size * self.capacity)
        return _Way(*(rearrange(a, "sender n k -> (sender n) k") for a in (cell, now)))
