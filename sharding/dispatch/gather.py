"""``gather``: every rank sees every token of the EP group, computes what its experts add, and the sums are scattered.

Two collectives whatever the routing: one ``all_gather`` of packed rows, one reduce-scatter. It moves each token to
all ranks, so it suits few tokens per rank (decode), where a fixed number of small messages beats fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, home_slots, sent_to_experts
from sharding.dispatch.route import fill_cells, total_counts
from sharding.dispatch.transit import NoRoundsApart, OneStage, Transit
from sharding.dispatch.wire import PackedRows, WireFormat
from sharding.sums import add_as_tree, add_in_order

IN_MEMORY_COLUMNS = 4
"""Between devices that share a memory, terms come back as columns where these are at most so many times as long as a queue
(``docs/dispatch.md``)."""


class _Kept(NamedTuple):
    """What a rank keeps while its tokens are on their way.

    home: its tokens for the expert that it has for them, or None. From ``compute`` on, seen: counts. From ``answer`` on, own: what
    ``home`` gave.
    """

    slots_TK: Array
    home: Array | None
    seen: Counts | None = None
    own: Array | None = None


@dataclass(frozen=True)
class Gather(OneStage, NoRoundsApart):
    """``Method`` of ``gather``.

    Where an expert's width is split over ``tp``, the gather and the scatter simply run over those ranks too: each
    holds a part of the width, so the one reduction adds parts of widths and parts of experts alike.

    tokens: of this rank.
    """

    group: ExpertGroup
    wire: WireFormat
    tokens: int
    home: bool

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pack this rank's tokens."""
        packed = self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0))
        home = self.wire.pack(x_TD, *home_slots(slots_TK), jnp.int32(0)) if self.home else None
        return Transit(packed, _Kept(slots_TK, home))

    def send(self, transit: Transit) -> Transit:
        """One ``all_gather``."""
        kept = transit.kept
        arrived = self.group.gather_all(transit.rows)
        if kept.home is not None:
            arrived = jnp.concatenate([arrived, self.group.pool_width(kept.home)])
        return Transit(arrived, kept._replace(home=None))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """What this rank's experts add to everybody's tokens."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        partial_ND, seen = experts(rows, slots_NK, weights_NK)
        return Transit(partial_ND, transit.kept._replace(seen=seen))

    def answer(self, transit: Transit) -> Transit:
        """One reduce-scatter."""
        partial_ND, everybodys = transit.rows, self.tokens * self.group.all_ranks
        y_TD = lax.psum_scatter(partial_ND[:everybodys], self.group.all_axes, scatter_dimension=0, tiled=True)
        own = self.group.share_width(partial_ND[everybodys:]) if self.home else None
        return Transit(y_TD, transit.kept._replace(own=own))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """The sums that came, and those of own tokens' own expert."""
        kept, y_TD = transit.kept, transit.rows
        return y_TD if kept.own is None else y_TD + kept.own, sent_to_experts(self.group, kept.seen, kept.slots_TK, 1)


class _KeptByChoice(NamedTuple):
    """As ``_Kept``. From ``compute`` on, queued: what arrived and the places of queues in it, where terms come back in queues."""

    slots_TK: Array
    seen: Counts | None = None
    queued: _Queued | None = None


@dataclass(frozen=True)
class GatherByChoice(OneStage, NoRoundsApart):
    """``Gather``, with what each expert gives returned apart, and added in the order of a token's choices.

    capacity: terms that a rank returns to another in a round. Where all that there can be are no more, they come back as columns of the
    gathered tokens. Otherwise a rank queues its terms for each rank by token and choice, as that rank does, too: every rank has
    everybody's choices, and so knows the places of all queues, and how many rounds the longest needs.
    """

    group: ExpertGroup
    wire: WireFormat
    tokens: int
    top_k: int
    capacity: int

    @property
    def _columns(self) -> int:
        """Terms that a rank can have for one token."""
        return min(self.top_k, self.group.experts)

    @property
    def _in_columns(self) -> bool:
        # In one memory bytes cost less than queues do, which every rank plans for all, and a second round.
        most = self.capacity * (IN_MEMORY_COLUMNS if self.group.in_memory is not None else 1)
        return self.tokens * self._columns <= most

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pack this rank's tokens."""
        return Transit(self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0)), _KeptByChoice(slots_TK))

    def send(self, transit: Transit) -> Transit:
        """One ``all_gather``."""
        return Transit(self.group.gather_all(transit.rows), transit.kept)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """The terms of this rank's experts, all of them or those of the first round."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        if self._in_columns:
            terms_NJD, seen = experts.terms(rows, slots_NK, weights_NK)
            return Transit(terms_NJD.reshape(-1, self.wire.width), transit.kept._replace(seen=seen))
        queued = self._queue(transit.rows, slots_NK, weights_NK)
        terms_CD, seen = self._terms(queued, 0, experts)
        return Transit(terms_CD, transit.kept._replace(seen=seen, queued=queued))

    def answer(self, transit: Transit) -> Transit:
        """One ``all_to_all``, and the sums over parts of a width."""
        each = self.tokens * self._columns if self._in_columns else self.capacity
        return Transit(_returned(self.group, transit.rows, each), transit.kept)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Each token's terms, those of further rounds too, in the order of its choices."""
        slots_TK, seen, queued = transit.kept
        if queued is None:
            terms_TKD, rounds = self._from_columns(transit.rows, slots_TK), 1
        else:
            terms_TKD, seen, rounds = self._from_queues(transit.rows, slots_TK, seen, queued, experts)
        y_TD = add_in_order(terms_TKD.astype(jnp.float32), axis=1).astype(self.wire.dtype)
        return y_TD, sent_to_experts(self.group, seen, slots_TK, rounds)

    def _from_columns(self, cells: Array, slots_TK: Array) -> Float[Array, "T K D"]:
        """This rank's terms, of which every rank returned a column for each choice or expert."""
        (T, K), J, group = slots_TK.shape, self._columns, self.group
        rank_TK, column_TK = slots_TK // group.experts, slots_TK % group.experts if J < K else jnp.arange(K)
        cell_TK = (rank_TK * T + jnp.arange(T)[:, None]) * J + column_TK
        chosen_TKD = cells.take(jnp.where(slots_TK >= 0, cell_TK, 0), axis=0, mode="clip")
        return jnp.where(slots_TK[:, :, None] >= 0, chosen_TKD, 0)

    def _queue(self, arrived, slots_NK, weights_NK) -> _Queued:
        """The places of everybody's terms in this rank's queues, and how many rounds the longest queue of all ranks needs."""
        group, ranks, P = self.group, self.group.all_ranks, self.tokens * self.top_k
        holder_RP = jnp.where(slots_NK >= 0, slots_NK // group.experts, -1).reshape(ranks, P)
        counts_RG = jnp.sum(holder_RP[:, :, None] == jnp.arange(group.size), axis=1)
        rounds = jnp.maximum(-(-jnp.max(counts_RG) // self.capacity), 1)
        mine_RP = holder_RP == group.index()
        return _Queued(arrived, slots_NK, weights_NK, mine_RP, jnp.cumsum(mine_RP, axis=1) - 1, rounds)

    def _terms(self, queued: _Queued, r: Array | int, experts: RankExperts) -> tuple[Float[Array, "C D"], Counts]:
        """Give the terms that this rank returns in round ``r``, and the counts."""
        K, pairs, capacity, ranks = self.top_k, queued.slots_NK.size, self.capacity, self.group.all_ranks
        place = queued.place_RP - r * capacity
        cell_RP = jnp.where(
            queued.mine_RP & (place >= 0) & (place < capacity),
            jnp.arange(ranks)[:, None] * capacity + place,
            ranks * capacity,
        )
        pair_C = fill_cells(cell_RP.reshape(-1, 1), ranks * capacity)  # which pair a cell holds; ``pairs`` for none
        here_C = jnp.minimum(pair_C, pairs - 1)
        slot_C = jnp.where(pair_C < pairs, queued.slots_NK.reshape(-1)[here_C], -1)
        rows = PackedRows(self.wire, queued.arrived.take(here_C // K, axis=0, mode="clip"))
        return experts(rows, slot_C[:, None], queued.weights_NK.reshape(-1)[here_C][:, None])

    def _from_queues(self, cells, slots_TK, seen: Counts, queued: _Queued, experts: RankExperts):
        """This rank's terms ``[T, K, D]``, of which every rank returns its own in the order of its queue; counts, and rounds."""
        (T, K), group, capacity = slots_TK.shape, self.group, self.capacity
        to_TK = jnp.where(slots_TK >= 0, slots_TK // group.experts, 0).reshape(-1)
        queue_PG = jnp.cumsum((to_TK[:, None] == jnp.arange(group.size)) & (slots_TK.reshape(-1, 1) >= 0), axis=0)
        own_P = jnp.take_along_axis(queue_PG, to_TK[:, None], axis=1)[:, 0] - 1

        def of_round(r: Array | int, cells, before_PD: Array | float = 0.0):
            own = own_P - r * capacity
            now_P = (slots_TK.reshape(-1) >= 0) & (own >= 0) & (own < capacity)
            terms_PD = cells.take(jnp.where(now_P, to_TK * capacity + own, 0), axis=0, mode="clip")
            return jnp.where(now_P[:, None], terms_PD, before_PD)

        def further(state):
            r, terms_PD, seen = state
            terms_CD, more_seen = self._terms(queued, r, experts)
            terms_PD = of_round(r, _returned(group, terms_CD, capacity), terms_PD)
            return r + 1, terms_PD, total_counts(seen, more_seen)

        # Each term comes in one round. The trip count is the same on all ranks that meet in the body's collective.
        state = jnp.int32(1), of_round(0, cells), seen
        _, terms_PD, seen = lax.while_loop(lambda state: state[0] < queued.rounds, further, state)
        if seen:  # what arrived is tokens; a round sees their pairs
            seen |= {"rows_received": jnp.sum(jnp.any(queued.mine_RP.reshape(-1, K), axis=1))}
        return terms_PD.reshape(T, K, -1), seen, queued.rounds


class _Queued(NamedTuple):
    """What arrived, and of the (token, choice) pairs P of all ranks R: whether this rank has the expert, and the place in its queue."""

    arrived: Array
    slots_NK: Array
    weights_NK: Array
    mine_RP: Array
    place_RP: Array
    rounds: Array


def _returned(group: ExpertGroup, terms_CD: Float[Array, "C D"], each: int) -> Float[Array, "cells D"]:
    """Exchange terms: give what the group's ranks return of this rank's tokens, ``each`` cells of each rank, widths added up."""
    returned = group.exchange_all(terms_CD).reshape(group.size, group.width, each, -1)
    return add_as_tree(jnp.moveaxis(returned, 1, 0)).reshape(group.size * each, -1)
