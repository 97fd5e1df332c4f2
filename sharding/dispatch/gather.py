"""``gather``: all-gather the EP group's tokens on every rank, apply the rank's experts to them, and reduce-scatter the sums.

Any routing needs two collectives: one ``all_gather`` of packed rows and one reduce-scatter. Each token goes to all ranks, so this suits
few tokens per rank (decode), where a fixed number of small messages beats fewer bytes.
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
from sharding.dispatch.local import Counts, RankExperts, sent_to_experts
from sharding.dispatch.transit import ExchangePlan, PlannedMethod, Transit
from sharding.dispatch.wire import WireFormat
from sharding.sums import add_as_tree, add_in_order

IN_MEMORY_COLUMNS = 4
"""Factor on ``padded``'s capacity per destination rank, up to which ``GatherByChoice`` is used on devices that share memory (see
``fits``). This saves 15 % of the CPU time of 256 prompts on ``dp=32``."""


class _InFlight(NamedTuple):
    """What a rank keeps while its tokens are in flight.

    shared_rows: this rank's packed tokens for its fused shared expert, until ``send``, or None. counts: set by ``compute``. shared_sums:
    the shared expert's sums, set by ``answer``.
    """

    slots_TK: Array
    shared_rows: Array | None
    counts: Counts | None = None
    shared_sums: Array | None = None


@dataclass(frozen=True)
class Gather(PlannedMethod):
    """``Method`` of ``gather``.

    If an expert's width is split over ``tp``, both collectives also run over the ``tp`` ranks. Each rank holds a part of
    the width, so the one reduction adds the parts of the width as well as the experts.
    """

    name = "gather"

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """As ``Method.collectives``."""
        axes, ranks, times = group.all_axes, group.all_ranks, plan.chunks
        there = gathered("dispatch", axes, ranks, plan.chunk * wire.row_bytes, times)
        back = spread("reduce_scatter", "combine", axes, ranks, ranks * plan.chunk * wire.answer_bytes, times)
        shared = cls._over_width(group, wire, plan, arriving=0) if plan.shared else []
        return [there, *shared[:1], back, *shared[1:]]

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pack this rank's tokens."""
        packed = self.wire.pack(x_TD, slots_TK, weights_TK, jnp.int32(0))
        return Transit(packed, _InFlight(slots_TK, self._pack_shared(x_TD, slots_TK, jnp.int32(0))))

    def send(self, transit: Transit) -> Transit:
        """Run one ``all_gather``."""
        kept = transit.kept
        arrived = self.group.gather_all(transit.rows)
        if kept.shared_rows is not None:
            arrived = jnp.concatenate([arrived, self.group.pool_width(kept.shared_rows)])
        return Transit(arrived, kept._replace(shared_rows=None))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the weighted sums of this rank's experts for all tokens of the group."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        partial_ND, counts = experts(rows, slots_NK, weights_NK)
        return Transit(partial_ND, transit.kept._replace(counts=counts))

    def answer(self, transit: Transit) -> Transit:
        """Run one reduce-scatter over the group's rows. The rows after them, if any, are the shared expert's."""
        partial_ND, group_rows = transit.rows, self.plan.chunk * self.group.all_ranks
        y_TD = lax.psum_scatter(partial_ND[:group_rows], self.group.all_axes, scatter_dimension=0, tiled=True)
        shared_sums = self.group.share_width(partial_ND[group_rows:]) if self.plan.shared else None
        return Transit(y_TD, transit.kept._replace(shared_sums=shared_sums))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the reduced sums, plus those of the fused shared expert, and the counts."""
        kept, y_TD = transit.kept, transit.rows
        return y_TD if kept.shared_sums is None else y_TD + kept.shared_sums, sent_to_experts(
            self.group, kept.counts, kept.slots_TK, 1
        )


@dataclass(frozen=True)
class GatherByChoice(Gather):
    """``Gather`` that returns each expert's weighted result (a term) separately and adds them in the order of a token's choices.

    For every gathered token, each rank returns ``_columns`` terms, zero for experts that are not chosen. Used only if ``fits`` says that
    this pays; otherwise ``padded`` is used.
    """

    keeps_choices = True

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
        """Whether a rank's tokens have no more terms on one rank than ``padded`` has cells per destination rank (``capacity``).

        For devices that share memory, the limit is ``IN_MEMORY_COLUMNS`` times higher: there, bytes cost less than ``padded``'s queues.
        """
        return tokens * min(top_k, group.experts) <= capacity * (1 if group.in_memory is None else IN_MEMORY_COLUMNS)

    @property
    def _columns(self) -> int:
        """Number of terms that a rank returns for one token (J): one per choice, or per expert of the rank if that is fewer."""
        return min(self.plan.choices, self.group.experts)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute a row per gathered token and column: the terms of this rank's experts (``RankExperts.terms``)."""
        rows, slots_NK, weights_NK, _ = self.wire.unpack(transit.rows)
        terms_NJD, counts = experts.terms(rows, slots_NK, weights_NK)
        return Transit(rearrange(terms_NJD, "n j d -> (n j) d"), transit.kept._replace(counts=counts))

    def answer(self, transit: Transit) -> Transit:
        """Run one ``all_to_all``, then add the parts of the experts' width. Return rows in the order (rank, own token, column)."""
        sizes = {"g": self.group.size, "w": self.group.width}
        parts = rearrange(self.group.exchange_all(transit.rows), "(g w each) d -> w g each d", **sizes)
        return Transit(rearrange(add_as_tree(parts), "g each d -> (g each) d"), transit.kept)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Add each token's terms in the order of its choices. Column: the expert's number on its rank if J < K, else that of the choice."""
        slots_TK, group, J = transit.kept.slots_TK, self.group, self._columns
        T, K = slots_TK.shape
        rank_TK, column_TK = slots_TK // group.experts, slots_TK % group.experts if J < K else jnp.arange(K)
        row_TK = (rank_TK * T + jnp.arange(T)[:, None]) * J + column_TK
        chosen_TKD = transit.rows.take(jnp.where(slots_TK >= 0, row_TK, 0), axis=0, mode="clip")
        terms_TKD = jnp.where(slots_TK[:, :, None] >= 0, chosen_TKD, 0)
        y_TD = add_in_order(terms_TKD.astype(jnp.float32), axis=1).astype(self.wire.dtype)
        return y_TD, sent_to_experts(group, transit.kept.counts, slots_TK, 1)
