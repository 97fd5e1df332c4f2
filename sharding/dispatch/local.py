"""Apply a rank's experts to the rows that arrived, and count tokens per expert on request."""

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


SHARED_SLOT = 2**15 - 1
"""Slot number of the fused shared expert that each rank has for its own tokens. Ids in a packed row have 16 bits."""


@dataclass(frozen=True)
class RankExperts:
    """A rank's experts: ``local_experts`` with its parameters.

    count: whether calls also return the number of tokens per local expert and of rows that use any.
    fused_shared: whether the rank holds a fused shared expert, after the others, for its own tokens; no count includes it.
    """

    group: ExpertGroup
    local_experts: LocalExperts
    params: Any
    count: bool
    fused_shared: bool = False

    def __call__(
        self, rows_ND: Rows, slots_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> tuple[Float[Array, "N D"], Counts]:
        """Return each row's weighted sum over this rank's experts, zero if it uses none, and the counts."""
        ids, weights = fewer_columns(self._local(slots_NK), weights_NK, self.group.experts + self.fused_shared)
        return self.local_experts(self.params, rows_ND, ids, weights), self._seen(ids)

    def terms(
        self, rows_ND: Rows, slots_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> tuple[Float[Array, "N J D"], Counts]:
        """Return each row's weighted result per expert of this rank, zero for none, and the counts.

        J is K, or the rank's number of experts if that is smaller; column j is then expert j. Calls ``local_experts.terms``. If that does
        not exist or returns None, calls ``local_experts`` with every row repeated J times.
        """
        ids, weights = fewer_columns(self._local(slots_NK), weights_NK, self.group.experts + self.fused_shared)
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
        """Return the weighted sums of this rank's tokens over the experts of all ranks, and the counts. All ranks must call this."""
        axes, ranks, held = self.group.all_axes, self.group.size, self.group.experts
        group, place = self.group.in_memory.meeting(axes)
        y_ND, per_expert, received = self.local_experts.together(
            self.params, rows_ND, slots_NK, weights_NK, place, group, ranks=ranks, held=held
        )
        return y_ND, {"tokens_per_expert": per_expert, "rows_received": received} if self.count else {}

    @property
    def without_shared(self) -> RankExperts:
        """The same experts without the extra one."""
        return replace(self, fused_shared=False)

    def _seen(self, ids: Int[Array, "N J"]) -> Counts:
        if not self.count:
            return {}
        per_expert = counted(ids, self.group.experts)  # without the shared expert
        used_N = jnp.any((ids >= 0) & (ids < self.group.experts), axis=1)
        return {"tokens_per_expert": per_expert, "rows_received": jnp.sum(used_N)}

    def _local(self, slots_NK: Int[Array, "N K"]) -> Int[Array, "N K"]:
        """Return slots as local expert ids, -1 for experts of other ranks."""
        local_NK = slots_NK - self.group.index() * self.group.experts
        local_NK = jnp.where((slots_NK >= 0) & (local_NK >= 0) & (local_NK < self.group.experts), local_NK, -1)
        return jnp.where(slots_NK == SHARED_SLOT, self.group.experts, local_NK) if self.fused_shared else local_NK


def shared_slots(slots_TK: Int[Array, "T K"]) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Return slots and weights that send a rank's own active tokens to its shared expert, with weight 1."""
    first_K = jnp.arange(slots_TK.shape[1]) == 0
    uses_TK = jnp.any(slots_TK >= 0, axis=1)[:, None] & first_K
    return jnp.where(uses_TK, SHARED_SLOT, -1), uses_TK.astype(jnp.float32)


def fewer_columns(
    ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"], experts: int
) -> tuple[Int[Array, "N J"], Float[Array, "N J"]]:
    """Return ids and weights with one column per expert, if a rank holds fewer experts than a token uses; else unchanged.

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
    """Add to ``seen`` the rows that this rank sent to and received from other ranks, and the rounds.

    to_G: rows for each rank of the group, including this one. With a split expert width, a row counts once per part of
    the width. Rows that a rank sends to itself do not count.
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
    """Call ``add_sent`` for methods that send one row per token and rank."""
    return add_sent(group, seen, jnp.sum(goes_to(group, slots_TK), axis=0), rounds) if seen else seen
