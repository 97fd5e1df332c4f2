"""``Transit`` and ``Method``: an exchange taken apart, so that others may compute between its beginning and its end.

Each way of dispatch is five functions of one rank, inside ``shard_map``: ``prepare`` and ``send`` begin it, ``compute`` applies the
experts to what arrived, ``answer`` and ``add`` finish it. ``send`` and ``answer`` hold the collectives that carry rows and nothing that
computes, so that a program may run something else beside them (``docs/architecture.md``, "A layer in four parts").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from sharding.dispatch.local import Counts, RankExperts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transit:
    """Rows between two parts of an exchange.

    rows: what is about to travel, or has just arrived. kept: what the rank keeps until its tokens' sums are back; a pytree that
    only the method which made it reads.
    """

    rows: Any
    kept: Any


class Method(Protocol):
    """One way of dispatch, seen from one rank."""

    def prepare(
        self, x_TD: Float[Array, "T D"], slots_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"]
    ) -> Transit:
        """Pack this rank's tokens in the order in which they travel."""

    def send(self, transit: Transit) -> Transit:
        """Exchange packed tokens."""

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Apply this rank's experts to what arrived."""

    def answer(self, transit: Transit) -> Transit:
        """Exchange what the experts gave."""

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Float[Array, "T D"], Counts]:
        """Add what came back of each token, in further rounds too where there was no room for all; give the sums and the counts."""


def whole_exchange(
    method: Method,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """All five parts, one after the other."""
    transit = method.compute(method.send(method.prepare(x_TD, slots_TK, weights_TK)), experts)
    return method.add(method.answer(transit), experts)
