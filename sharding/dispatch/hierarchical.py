"""``hierarchical``: send a row to each host once, then forward it inside the host over the fast links; sums return the same way.

DeepEP's normal kernels do this between nodes, and group-limited routing was designed for it: a DeepSeek-V3 token has experts on about
seven of 32 ranks, but on at most four hosts. Dispatch and combine are two exchanges each:

    | stage   | group                                 | dispatch                       | combine                           |
    |---------|---------------------------------------|--------------------------------|-----------------------------------|
    | crossing| same local rank on each host          | a token to each of its hosts   | its sum over the host's ranks     |
    | inside  | the ranks of a host                   | on to the ranks of its experts | sums over a rank's experts        |

A token crosses to the rank that has the same local rank on the other host as the token's own rank. That rank reads the destinations of a
row from the expert ids in the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.collectives import Collective, spread
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import goes_to
from sharding.dispatch.padded import Padded
from sharding.dispatch.route import Route, add_returned, cells_of, fill_cells, plan_route
from sharding.dispatch.transit import ExchangePlan, Stage, Transit
from sharding.dispatch.wire import WireFormat


class _Handle(NamedTuple):
    """For each choice of each row that crossed to this rank: its cell in the forwarding buffer, and whether it has one."""

    cell_NK: Int[Array, "N K"]
    here_NK: Bool[Array, "N K"]


@dataclass(frozen=True)
class Hierarchical(Padded):
    """``Padded`` in two stages, which delivers the same rows to each rank's experts.

    The forwarding rank keeps a separate run of cells per sender, so a sender can compute how many rounds its rows need.

    A round sends one block of ``plan.crossing`` rows of each host's queue and forwards one run of ``plan.capacity`` rows of it to each
    rank. All blocks with their first run come first, then all blocks with their second run. A block crosses again for each run.
    """

    name = "hierarchical"

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

        width = cls._over_width(group, wire, plan, arriving, rounds)
        return [*stages("dispatch", wire.row_bytes), *width, *reversed(stages("combine", wire.answer_bytes))]

    @cached_property
    def _stages(self) -> tuple[ExpertGroup, ExpertGroup]:
        """The groups of the two stages: between hosts, and inside a host."""
        return self.group.in_two_stages()

    @property
    def dispatch_stages(self) -> tuple[Stage, ...]:
        """Exchange between hosts, then inside each host."""
        return self.send, self._relay

    @property
    def combine_stages(self) -> tuple[Stage, ...]:
        """Exchange inside each host, then between hosts."""
        return self.answer, self._relay_back

    @property
    def _blocks(self) -> int:
        """Number of blocks of the longest possible queue."""
        return -(-self.plan.rows // self.plan.crossing)

    @property
    def _num_cells(self) -> int:
        return self._stages[0].size * self.plan.crossing

    def _needs_one_round(self, tokens: int) -> bool:
        return min(self.plan.crossing, self.plan.capacity) >= tokens

    def _plan(self, slots_TK) -> tuple[Route, Int[Array, "G"], Array]:
        route, sent_G = plan_route(self._stages[0], slots_TK), jnp.sum(goes_to(self.group, slots_TK), axis=0)
        blocks = -(-jnp.max(route.counts_G) // self.plan.crossing)
        # At most all rows of a block go to one rank.
        turns = -(-jnp.minimum(jnp.max(sent_G), self.plan.crossing) // self.plan.capacity)
        return route, sent_G, jnp.maximum(turns - 1, 0) * self._blocks + blocks

    def _cells(self, route: Route, r: jax.Array | int) -> tuple[Int[Array, "T K"], Bool[Array, "T K"]]:
        return cells_of(route, self.plan.crossing, r % self._blocks)

    def send(self, transit: Transit) -> Transit:
        """Run one ``all_to_all`` between hosts."""
        return Transit(self._stages[0].exchange(transit.rows), transit.kept)

    def _relay(self, transit: Transit) -> Transit:
        """Run one ``all_to_all`` inside each host, then gather the arrived rows over ``tp``."""
        arrived, handle = self._spread(transit.rows, 0)
        return self._gather_arrived(arrived, transit.kept._replace(handle=handle))

    def answer(self, transit: Transit) -> Transit:
        """Reduce the sums over the parts of the experts' width, then run one ``all_to_all`` inside each host."""
        sums_ND, kept = self._reduce_sums(transit)
        return Transit(self._stages[1].exchange(sums_ND), kept)

    def _relay_back(self, transit: Transit) -> Transit:
        """Add the sums over the ranks of a host, then run one ``all_to_all`` between hosts."""
        return Transit(self._crossed_back(transit.rows, transit.kept.handle), transit.kept)

    def _dispatch(self, rows: Array, r: jax.Array | int) -> tuple[Array, _Handle]:
        return self._spread(self._stages[0].exchange(rows), r)

    def _combine(self, sums_ND: Float[Array, "N D"], handle: _Handle) -> Array:
        return self._crossed_back(self._stages[1].exchange(sums_ND), handle)

    def _spread(self, arrived_NW: Array, r: jax.Array | int) -> tuple[Array, _Handle]:
        """Forward the rows that crossed in round ``r`` to their ranks inside this host. Also return their cells for combine."""
        inside = self._stages[1]
        _, slots_NK, _, needed_N = self.wire.unpack(arrived_NW)
        handle = self._onward(slots_NK, r // self._blocks)
        # Empty cells carry the maximum number of rounds too, so that a rank without rows also learns it.
        packed = jnp.concatenate([arrived_NW, self.wire.empty_row(jnp.max(needed_N))])
        cells = fill_cells(handle.cell_NK, self.group.size * self.plan.capacity)
        return inside.exchange(packed.take(cells, axis=0, mode="clip")), handle

    def _crossed_back(self, returned: Array, handle: _Handle) -> Array:
        """Add the results of this host's ranks for each row that crossed, and return the sums to the rows' hosts."""
        return self._stages[0].exchange(add_returned(returned, *handle).astype(self.wire.dtype))

    def _add_round(self, y_TD: Array, more_TD: Array, now_TK: Bool[Array, "T K"]) -> Array:
        # A block returns in each of its rounds, with zeros for rows that this round does not forward.
        return y_TD + more_TD

    def _onward(self, slots_NK: Int[Array, "N K"], turn: jax.Array | int) -> _Handle:
        """Return the cells of the rows that crossed, for forwarding: for each rank of this host, a run of cells per sender."""
        (between, inside), capacity = self._stages, self.plan.capacity
        here_NK = (slots_NK >= 0) & (slots_NK // between.experts == between.index())
        local_NK = jnp.where(here_NK, slots_NK - between.index() * between.experts, -1)
        senders = rearrange(local_NK, "(sender n) k -> sender n k", sender=between.size)
        route = jax.vmap(partial(plan_route, inside))(senders)
        place = route.place_TK - turn * capacity
        now = route.sends_TK & (place >= 0) & (place < capacity)
        run = route.rank_TK * between.size + jnp.arange(between.size)[:, None, None]
        cell = jnp.where(now, run * capacity + place, self.group.size * capacity)
        return _Handle(*(rearrange(a, "sender n k -> (sender n) k") for a in (cell, now)))
