"""``Transit`` and ``Method``: dispatch and combine split into stages, so that other computation can overlap with the collectives.

A dispatch method is five functions that run on one rank inside ``shard_map``: ``prepare`` packs and ``send`` dispatches, ``compute``
applies the experts, ``answer`` and ``add`` combine. ``send`` and ``answer`` contain the collectives that carry rows and almost no
computation, so a program can overlap them with other work (``docs/architecture.md``, "A layer in four parts"). Methods that forward rows
through another rank have two of each (``dispatch_stages``, ``combine_stages``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding.dispatch.collectives import Collective, over_width
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, shared_slots
from sharding.dispatch.wire import WireFormat
from sharding.errors import MeshError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transit:
    """Rows between two stages of an exchange.

    rows: the rows to send next, or those that have just arrived. kept: state that stays on the rank until its tokens' sums are back, as a
    pytree private to the method.
    """

    rows: Any
    kept: Any


Stage = Callable[[Transit], Transit]
"""An exchange of rows."""


class Method:
    """Base class of dispatch methods, from the view of one rank.

    ``METHODS`` in ``sharding/dispatch/entry.py`` lists the built-in ones. Pass your own class as ``DispatchConfig(method=...)``.

    name: name in reports.
    keeps_choices: whether the method adds a token's terms in the order of its choices (``DispatchConfig.by_choice``) although one row
        carries all of them. Other methods then send one row per choice, and ``ByChoice`` adds the terms.
    """

    name: ClassVar[str]
    keeps_choices: ClassVar[bool] = False

    @classmethod
    def check_members(cls) -> None:
        """Raise a ``MeshError`` if the class lacks a required member, or has a public one that nothing would call."""
        inherited, required = vars(Method), ("name", "of", "collectives", "prepare", "compute", "add")
        public = {name for name in dir(cls) if not name.startswith("_")}
        fields = getattr(cls, "__dataclass_fields__", {})
        optional = [name for name in inherited if not name.startswith("_") and name not in (*required, "check_members")]
        missing = [name for name in required if inspect.getattr_static(cls, name, None) is inherited.get(name)]
        unknown = sorted(public - {*dir(Method), *required, *fields})
        if missing or unknown:
            found = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
            raise MeshError(
                f"dispatch method {cls.__name__} {' and '.join(found)}; expected {', '.join(required)}, optionally {', '.join(optional)}, "
                "and names of your own that begin with an underscore or are fields of the dataclass"
            )

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, fused_shared: bool) -> Method:
        """Make the method for a rank's tokens. fused_shared: see ``dispatch``."""
        raise NotImplementedError

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """Return its collectives in one layer, in program order. rounds: number of rounds per chunk, for methods with rounds."""
        raise NotImplementedError

    @classmethod
    def sends_padding(cls, group: ExpertGroup) -> bool:
        """Whether the collectives also transfer padding."""
        return True

    def prepare(
        self, x_TD: Float[Array, "T D"], slots_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"]
    ) -> Transit:
        """Pack this rank's tokens in sending order."""
        raise NotImplementedError

    def send(self, transit: Transit) -> Transit:
        """Exchange packed tokens."""
        return transit

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Apply this rank's experts to the rows that arrived."""
        raise NotImplementedError

    def answer(self, transit: Transit) -> Transit:
        """Return the experts' results to the tokens' ranks."""
        return transit

    @property
    def dispatch_stages(self) -> tuple[Stage, ...]:
        """The exchanges of packed tokens, in order."""
        return (self.send,)

    @property
    def combine_stages(self) -> tuple[Stage, ...]:
        """The exchanges of the experts' results, in order."""
        return (self.answer,)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Float[Array, "T D"], Counts]:
        """Return each token's sum of the returned results, and the counts. Runs the remaining rounds if some rows did not fit."""
        raise NotImplementedError

    def further(self, transit: Transit) -> FurtherRounds | None:
        """Return the rounds after the first, which may run before ``add``; None if there are none."""
        return None


class FurtherRounds(NamedTuple):
    """The rounds of an exchange after round 0, which its stages run.

    rounds: number of all rounds, equal on all ranks. begin: returns the initial ``so_far``. run: ``(r, so_far, experts) -> so_far``, with
    the results of round ``r`` added. finish: passes the last ``so_far`` to ``add``, which then runs no round.
    """

    rounds: Array
    begin: Callable[[], Any]
    run: Callable[[Array, Any, RankExperts], Any]
    finish: Callable[[Any], Transit]


class ExchangePlan(NamedTuple):
    """How a rank's tokens are exchanged.

    kind: the method. chunk: tokens per exchange. chunks: number of exchanges, run one after the other. capacity: rows that a rank can send
    to another rank in a round. rows: rows to send of a chunk. choices: number of a token's choices that a row carries (all of them, or 1).
    crossing: rows that a rank can send to another host in a round of ``hierarchical``. shared: rows of a chunk for the rank's fused shared
    expert, which only the ranks that split its width exchange.
    """

    kind: type[Method]
    chunk: int
    chunks: int
    capacity: int
    rows: int
    choices: int
    crossing: int = 0
    shared: int = 0


@dataclass(frozen=True)
class PlannedMethod(Method):
    """Base of the built-in methods: the arguments of ``of``, and the rows of the rank's fused shared expert.

    ``send`` puts these rows behind those that arrive, and ``answer`` keeps their sums on the rank.
    """

    group: ExpertGroup
    wire: WireFormat
    plan: ExchangePlan

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, fused_shared: bool) -> PlannedMethod:
        """As ``Method.of``; ``plan.shared`` says the same as ``fused_shared``."""
        return cls(group, wire, plan)

    @classmethod
    def _over_width(
        cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, arriving: int, rounds: int = 1
    ) -> list[Collective]:
        """Return the collectives over a split width, if ``arriving`` rows arrive in each round."""
        sizes = wire.row_bytes, wire.answer_bytes
        if not plan.shared:
            return over_width(group, arriving, *sizes, plan.chunks * rounds)
        first = over_width(group, arriving + plan.shared, *sizes, plan.chunks)
        return first + (over_width(group, arriving, *sizes, plan.chunks * (rounds - 1)) if rounds > 1 else [])

    def _pack_shared(self, x_TD: Array, slots_TK: Array, extra: Array | int) -> Array | None:
        """Pack the rank's tokens for its fused shared expert, if it has one."""
        return self.wire.pack(x_TD, *shared_slots(slots_TK), extra) if self.plan.shared else None

    def _gather_arrived(self, arrived: Array, kept: Any) -> Transit:
        """All-gather the arrived rows, then ``kept.shared_rows``, over the ranks that share a width."""
        if kept.shared_rows is not None:
            arrived = jnp.concatenate([arrived, kept.shared_rows])
        return Transit(self.group.pool_width(arrived), kept._replace(shared_rows=None))


def in_rounds(rounds: Array, run: Callable[[Array, Any], Any], so_far: Any) -> Any:
    """Call ``run(r, so_far)`` for each round after round 0 and return the last result. ``rounds`` must be equal on all ranks."""
    last = jax.lax.while_loop(
        lambda state: state[0] < rounds, lambda state: (state[0] + 1, run(*state)), (jnp.int32(1), so_far)
    )
    return last[1]


def run_together(exchanges: Sequence[tuple[Method, Transit, RankExperts]]) -> list[Transit]:
    """Run the remaining rounds of several exchanges in one loop, so that the host checks one loop condition, where the caller chooses."""
    every = [(method.further(transit), transit, experts) for method, transit, experts in exchanges]
    some = [(further, experts) for further, _, experts in every if further is not None]
    if not some:
        return [transit for _, transit, _ in exchanges]

    def run(r: Array, so_far: list) -> list:
        return [further.run(r, one, experts) for (further, experts), one in zip(some, so_far, strict=True)]

    most = functools.reduce(jnp.maximum, [further.rounds for further, _ in some])
    results = iter(in_rounds(most, run, [further.begin() for further, _ in some]))
    return [transit if further is None else further.finish(next(results)) for further, transit, _ in every]


def whole_exchange(
    method: Method,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    experts: RankExperts,
) -> tuple[Float[Array, "T D"], Counts]:
    """Run all stages of an exchange, one after the other."""
    arrived = in_turn(method.dispatch_stages, method.prepare(x_TD, slots_TK, weights_TK))
    return method.add(in_turn(method.combine_stages, method.compute(arrived, experts)), experts)


def in_turn(stages: Sequence[Callable[[Any], Any]], transit: Any) -> Any:
    """Run exchanges one after the other."""
    for stage in stages:
        transit = stage(transit)
    return transit
