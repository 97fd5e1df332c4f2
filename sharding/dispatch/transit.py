"""``Transit`` and ``Method``: an exchange taken apart, so that others may compute between its beginning and its end.

Each way of dispatch is five functions of one rank, inside ``shard_map``: ``prepare`` and ``send`` begin it, ``compute`` applies the experts
to what arrived, ``answer`` and ``add`` finish it. ``send`` and ``answer`` hold the collectives that carry rows and next to nothing that
computes, so that a program may run something else beside each of them (``docs/architecture.md``, "A layer in four parts"); rows that go
by way of another rank have two of each (``there``, ``back``). Four more run the rounds after the first, where ``add`` is not to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding.dispatch.collectives import Collective
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts
from sharding.dispatch.wire import WireFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transit:
    """Rows between two parts of an exchange.

    rows: what is about to travel, or has just arrived. kept: what the rank keeps until its tokens' sums are back; a pytree that
    only the method which made it reads.
    """

    rows: Any
    kept: Any


Stage = Callable[[Transit], Transit]
"""An exchange of rows."""


class Method:
    """One way of dispatch, seen from one rank: what a new one inherits, and overrides.

    ``sharding/dispatch/entry.py`` has the table of ours. Another is given to ``DispatchConfig(method=...)`` as a class.

    name: in reports.
    keeps_choices: whether it adds a token's terms in the order of its choices (``DispatchConfig.by_choice``) from one row for all of
        them. Of other methods each choice is then a row of its own, and ``ByChoice`` adds what they give.
    """

    name: ClassVar[str]
    keeps_choices: ClassVar[bool] = False

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, home: bool) -> Method:
        """The method for a rank's tokens. home: see ``dispatch``."""
        raise NotImplementedError

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """Its collectives in one layer, in program order; rounds: of a chunk, where it has further ones."""
        raise NotImplementedError

    @classmethod
    def sends_padding(cls, group: ExpertGroup) -> bool:
        """Whether more than the rows that there are goes over the wire."""
        return True

    def prepare(
        self, x_TD: Float[Array, "T D"], slots_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"]
    ) -> Transit:
        """Pack this rank's tokens in the order in which they travel."""
        raise NotImplementedError

    def send(self, transit: Transit) -> Transit:
        """Exchange packed tokens."""
        return transit

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Apply this rank's experts to what arrived."""
        raise NotImplementedError

    def answer(self, transit: Transit) -> Transit:
        """Exchange what the experts gave."""
        return transit

    @property
    def there(self) -> tuple[Stage, ...]:
        """The exchanges of packed tokens, one after the other."""
        return (self.send,)

    @property
    def back(self) -> tuple[Stage, ...]:
        """The exchanges of what the experts gave."""
        return (self.answer,)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Float[Array, "T D"], Counts]:
        """Add what came back of each token, in further rounds too where there was no room for all; give the sums and the counts."""
        raise NotImplementedError

    def rounds(self, transit: Transit) -> Array | None:
        """Rounds that all ranks need, where others than the first can be run before ``add``; else None, without the next three."""
        return None

    def before_further(self, transit: Transit) -> Any:
        """What ``round`` adds to."""
        raise NotImplementedError

    def round(self, transit: Transit, r: jax.Array, so_far: Any, experts: RankExperts) -> Any:
        """Run round ``r``, the second being 1, and add it to what the rounds before gave."""
        raise NotImplementedError

    def after_further(self, transit: Transit, so_far: Any) -> Transit:
        """Hand the further rounds' sums to ``add``, which then runs none."""
        raise NotImplementedError


class ExchangePlan(NamedTuple):
    """How a rank's tokens are exchanged.

    kind: the method. chunk, chunks: tokens of an exchange, and how many follow one another. capacity: rows that a rank may send to another
    in a round. rows, choices: what is sent of a chunk, and for how many of a token's choices a row is: for all of them, or for each
    of them. crossing: rows that a rank may send to another host in a round of ``hierarchical``.
    """

    kind: type[Method]
    chunk: int
    chunks: int
    capacity: int
    rows: int
    choices: int
    crossing: int = 0


def in_rounds(rounds: Array, run: Callable[[Array, Any], Any], so_far: Any) -> Any:
    """``run(r, so_far)`` for each round after the first, which is number 0. All ranks that meet in it have the same ``rounds``."""
    last = jax.lax.while_loop(
        lambda state: state[0] < rounds, lambda state: (state[0] + 1, run(*state)), (jnp.int32(1), so_far)
    )
    return last[1]


def run_together(exchanges: Sequence[tuple[Method, Transit, RankExperts]]) -> list[Transit]:
    """Run the further rounds of several exchanges in one loop: one question for the host, and at a place that the caller chooses."""
    rounds = [method.rounds(transit) for method, transit, _ in exchanges]
    some = [one for one, needed in zip(exchanges, rounds, strict=True) if needed is not None]
    if not some:
        return [transit for _, transit, _ in exchanges]

    def run(r: Array, so_far: list) -> list:
        return [
            method.round(transit, r, one, experts) for (method, transit, experts), one in zip(some, so_far, strict=True)
        ]

    most = functools.reduce(jnp.maximum, [needed for needed in rounds if needed is not None])
    gave = iter(in_rounds(most, run, [method.before_further(transit) for method, transit, _ in some]))
    return [
        transit if needed is None else method.after_further(transit, next(gave))
        for (method, transit, _), needed in zip(exchanges, rounds, strict=True)
    ]


def whole_exchange(
    method: Method,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """All parts, one after the other."""
    arrived = in_turn(method.there, method.prepare(x_TD, slots_TK, weights_TK))
    return method.add(in_turn(method.back, method.compute(arrived, experts)), experts)


def in_turn(stages: Sequence[Callable[[Any], Any]], transit: Any) -> Any:
    """Run exchanges one after the other."""
    for stage in stages:
        transit = stage(transit)
    return transit
