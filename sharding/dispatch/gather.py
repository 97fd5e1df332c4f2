"""``gather``: every rank sees every token of the EP group, computes what its experts add, and the sums are scattered.

Two collectives whatever the routing: one ``all_gather`` of packed rows, one reduce-scatter. It moves each token to
all ranks, so it suits few tokens per rank (decode), where a fixed number of small messages beats fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from sharding.dispatch.collectives import Collective, gathered, spread
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, home_slots, sent_to_experts
from sharding.dispatch.transit import ExchangePlan, Method, Transit
from sharding.dispatch.wire import WireFormat
from sharding.sums import add_as_tree, add_in_order

IN_MEMORY_COLUMNS = 4
"""Between devices that share a memory, terms come back as columns where these are at most so many times as long as a queue. This saves 15 %
of the processor's time of 256 prompts on ``dp=32``."""


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
class Gather(Method):
    """``Method`` of ``gather``.

    Where an expert's width is split over ``tp``, the gather and the scatter simply run over those ranks too: each
    holds a part of the width, so the one reduction adds parts of widths and parts of experts alike.

    tokens: of this rank.
    """

    group: ExpertGroup
    wire: WireFormat
    tokens: int
    home: bool

    name = "gather"

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, home: bool) -> Gather:
        """As ``Method.of``."""
        return cls(group, wire, plan.chunk, home)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        axes, ranks, times = group.all_axes, group.all_ranks, plan.chunks
        return [
            gathered("dispatch", axes, ranks, plan.chunk * wire.row_bytes, times),
            spread("reduce_scatter", "combine", axes, ranks, ranks * plan.chunk * wire.answer_bytes, times),
        ]

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


@dataclass(frozen=True)
class GatherByChoice(Method):
    """``Gather``, with what each expert gives returned apart, and added in the order of a token's choices.

    Terms come back as columns of the gathered tokens, whether a rank has any or not. ``fits`` says where that is worth while; elsewhere
    ``padded`` takes its place.
    """

    group: ExpertGroup
    wire: WireFormat
    tokens: int
    top_k: int

    name = "gather"
    keeps_choices = True

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, home: bool) -> GatherByChoice:
        """As ``Method.of``; ``ByChoice`` sees to ``home``."""
        return cls(group, wire, plan.chunk, plan.choices)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        axes, ranks, times = group.all_axes, group.all_ranks, plan.chunks
        columns = ranks * plan.chunk * min(plan.choices, group.experts)
        return [
            gathered("dispatch", axes, ranks, plan.chunk * wire.row_bytes, times),
            spread("all_to_all", "combine", axes, ranks, columns * wire.answer_bytes, times),
        ]

    @staticmethod
    def fits(group: ExpertGroup, tokens: int, top_k: int, capacity: int) -> bool:
        """Whether so many tokens of a rank have no more columns than ``padded`` would have cells for another rank.

        Between devices that share a memory bytes cost less than queues do (``IN_MEMORY_COLUMNS``).
        """
        return tokens * min(top_k, group.experts) <= capacity * (1 if group.in_memory is None else IN_MEMORY_COLUMNS)

    @property
    def _columns(self) -> int:
        """Terms that a rank can have for one token."""
        return min(self.top_k, self.group.experts)

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pack this rank's tokens."""
        return Transit(self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0)), _Kept(slots_TK, None))

    def send(self, transit: Transit) -> Transit:
        """One ``all_gather``."""
        return Transit(self.group.gather_all(transit.rows), transit.kept)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """The terms of this rank's experts."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        terms_NJD, seen = experts.terms(rows, slots_NK, weights_NK)
        return Transit(rearrange(terms_NJD, "n j d -> (n j) d"), transit.kept._replace(seen=seen))

    def answer(self, transit: Transit) -> Transit:
        """One ``all_to_all``, and the sums over parts of a width."""
        sizes = {"g": self.group.size, "w": self.group.width}
        returned = rearrange(self.group.exchange_all(transit.rows), "(g w each) d -> w g each d", **sizes)
        return Transit(rearrange(add_as_tree(returned), "g each d -> (g each) d"), transit.kept)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Each token's terms in the order of its choices."""
        slots_TK, group, J = transit.kept.slots_TK, self.group, self._columns
        T, K = slots_TK.shape
        rank_TK, column_TK = slots_TK // group.experts, slots_TK % group.experts if J < K else jnp.arange(K)
        cell_TK = (rank_TK * T + jnp.arange(T)[:, None]) * J + column_TK
        chosen_TKD = transit.rows.take(jnp.where(slots_TK >= 0, cell_TK, 0), axis=0, mode="clip")
        terms_TKD = jnp.where(slots_TK[:, :, None] >= 0, chosen_TKD, 0)
        y_TD = add_in_order(terms_TKD.astype(jnp.float32), axis=1).astype(self.wire.dtype)
        return y_TD, sent_to_experts(group, transit.kept.seen, slots_TK, 1)
