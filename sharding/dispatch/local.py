"""What a rank does with rows that have arrived: find those of its own experts, apply them, and count them if asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.wire import PackedRows
from sharding.indices import counted, pick

Rows = Float[Array, "N D"] | PackedRows
LocalExperts = Callable[[Any, Rows, Int[Array, "N K"], Float[Array, "N K"]], Float[Array, "N D"]]
Counts = dict[str, jax.Array]
"""Counts of one exchange on one rank, int32; empty when no report is asked for."""


HOME = 2**15 - 1
"""What stands in the place of a slot for the expert that each rank has for its own tokens. A packed row's ids have 16 bits."""


@dataclass(frozen=True)
class RankExperts:
    """A rank's experts: ``local_experts`` with its weights.

    count: whether calls also return how many tokens each local expert got and how many rows used any.
    home: whether the rank holds one expert more, behind the others, for its own tokens; it is counted nowhere.
    """

    group: ExpertGroup
    local_experts: LocalExperts
    params: Any
    count: bool
    home: bool = False

    def __call__(
        self, rows_ND: Rows, slots_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> tuple[Float[Array, "N D"], Counts]:
        """Weighted sums over this rank's experts of each row, zero where it uses none; and the counts."""
        ids, weights = fewer_columns(self._local(slots_NK), weights_NK, self.group.experts + self.home)
        return self.local_experts(self.params, rows_ND, ids, weights), self._seen(ids)

    def terms(
        self, rows_ND: Rows, slots_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> tuple[Float[Array, "N J D"], Counts]:
        """What each of this rank's experts gives for each row, with its weight, zero where there is none; and the counts.

        J is K, or the number of experts that the rank has, where that is less: then column j is expert j. A method ``terms`` of
        ``local_experts`` gives this; where there is none, or it gives None, ``local_experts`` is called with every row J times.
        """
        ids, weights = fewer_columns(self._local(slots_NK), weights_NK, self.group.experts + self.home)
        terms = getattr(self.local_experts, "terms", None)
        found = None if terms is None else terms(self.params, rows_ND, ids, weights)
        if found is None:
            repeated = rows_ND.take(jnp.repeat(jnp.arange(len(ids)), ids.shape[1]), axis=0)
            single = (rearrange(array, "n j -> (n j) 1") for array in (ids, weights))
            found = rearrange(self.local_experts(self.params, repeated, *single), "(n j) d -> n j d", n=len(ids))
        return found, self._seen(ids)

    def together(
        self, rows_ND: Float[Array, "N D"], slots_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> tuple[Float[Array, "N D"], Counts]:
        """Weighted sums of this rank's tokens over the experts of the whole group, all of whose ranks call this; and the counts."""
        axes, ranks, held = self.group.all_axes, self.group.size, self.group.experts
        group, place = self.group.in_memory.meeting(axes)
        y_ND, per_expert, received = self.local_experts.together(
            self.params, rows_ND, slots_NK, weights_NK, place, group, ranks=ranks, held=held
        )
        return y_ND, {"tokens_per_expert": per_expert, "rows_received": received} if self.count else {}

    @property
    def without_home(self) -> RankExperts:
        """The same, as they are for tokens that do not use the one expert more."""
        return replace(self, home=False)

    def _seen(self, ids: Int[Array, "N J"]) -> Counts:
        if not self.count:
            return {}
        per_expert = counted(ids, self.group.experts)  # without the expert for own tokens
        used_N = jnp.any((ids >= 0) & (ids < self.group.experts), axis=1)
        return {"tokens_per_expert": per_expert, "rows_received": jnp.sum(used_N)}

    def _local(self, slots_NK: Int[Array, "N K"]) -> Int[Array, "N K"]:
        """Slots as numbers of this rank's experts, -1 for what is not here."""
        local_NK = slots_NK - self.group.index() * self.group.experts
        local_NK = jnp.where((slots_NK >= 0) & (local_NK >= 0) & (local_NK < self.group.experts), local_NK, -1)
        return jnp.where(slots_NK == HOME, self.group.experts, local_NK) if self.home else local_NK


def home_slots(slots_TK: Int[Array, "T K"]) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Slots and weights with which a rank's own tokens use the expert that it has for them: active ones, with weight 1."""
    first_K = jnp.arange(slots_TK.shape[1]) == 0
    uses_TK = jnp.any(slots_TK >= 0, axis=1)[:, None] & first_K
    return jnp.where(uses_TK, HOME, -1), uses_TK.astype(jnp.float32)


def fewer_columns(
    ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"], experts: int
) -> tuple[Int[Array, "N J"], Float[Array, "N J"]]:
    """At most ``experts`` columns of ids and weights, where a rank holds fewer experts than a token uses.

    A row's ids are distinct, so column ``x`` of the result says whether the row uses expert ``x``: ``[N, experts]``.
    """
    if experts >= ids_NK.shape[1]:
        return ids_NK, weights_NK
    chosen_NKX = ids_NK[:, :, None] == jnp.arange(experts)
    weights_NX = jnp.sum(jnp.where(chosen_NKX, weights_NK[:, :, None], 0), axis=1)
    return jnp.where(chosen_NKX.any(1), jnp.arange(experts), -1), weights_NX


def goes_to(group: ExpertGroup, slots_TK: Int[Array, "T K"]) -> Bool[Array, "T G"]:
    """Whether a token has an expert on each rank of the group."""
    rank_TK = jnp.where(slots_TK >= 0, lax.div(slots_TK, group.experts), -1)
    return jnp.any(rank_TK[:, :, None] == jnp.arange(group.size), axis=1)


def add_sent(group: ExpertGroup, seen: Counts, to_G: Int[Array, "G"], rounds: jax.Array | int) -> Counts:
    """Complete ``seen`` with the rows that had to leave their rank for this rank's tokens, and the rounds.

    to_G: rows for each rank of the group, this one included. A row that every part of an expert's width must see counts
    once for each part. What a rank sends to itself counts nowhere.
    """
    if not seen:
        return seen
    sent_here = pick(to_G, group.index())
    return seen | {
        "rows_sent": jnp.sum(to_G) * group.width - sent_here,
        "rows_received": seen["rows_received"] - sent_here,
        "rounds": jnp.int32(rounds),
    }


def sent_to_experts(group: ExpertGroup, seen: Counts, slots_TK: Int[Array, "T K"], rounds: jax.Array | int) -> Counts:
    """``add_sent`` where a token's row is for all of its experts on a rank."""
    return add_sent(group, seen, jnp.sum(goes_to(group, slots_TK), axis=0), rounds) if seen else seen
