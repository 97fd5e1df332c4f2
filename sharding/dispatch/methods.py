"""``Alone`` and ``Memory``: methods that send nothing. ``ByChoice`` and ``InChunks``: wrappers of another method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from sharding.dispatch.collectives import Collective
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, sent_to_experts, shared_slots
from sharding.dispatch.transit import ExchangePlan, FurtherRounds, Method, PlannedMethod, Stage, Transit, whole_exchange
from sharding.dispatch.wire import WireFormat
from sharding.sums import add_in_order


class _NothingSent(PlannedMethod):
    """Base of the methods without collectives, whose ``compute`` returns the sums."""

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """Return an empty list."""
        return []

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums and counts unchanged."""
        return transit.rows, transit.kept


class Alone(_NothingSent):
    """``Method`` of a rank that holds all experts."""

    name = "local"

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pass on the tokens, with an additional choice if the rank has a fused shared expert."""
        if self.plan.shared:
            own_TK, one_TK = shared_slots(slots_TK)
            slots_TK, weights_TK = (
                jnp.concatenate(pair, axis=1) for pair in ((slots_TK, own_TK[:, :1]), (weights_TK, one_TK[:, :1]))
            )
        return Transit((x_TD, slots_TK, weights_TK), None)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the tokens' weighted sums."""
        return Transit(*experts(*transit.rows))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums unchanged, and the counts with no rows and no rounds."""
        nothing = dict.fromkeys(("rows_sent", "rows_received", "rounds"), jnp.int32(0))
        return transit.rows, transit.kept and transit.kept | nothing


class Memory(_NothingSent):
    """``Method`` of emulated devices, whose experts read all ranks' tokens in place and add terms in the order of choices."""

    name = "memory"
    keeps_choices = True

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pass on the tokens without packing them."""
        return Transit((x_TD, weights_TK), slots_TK)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the weighted sums of this rank's tokens over the experts of all ranks."""
        (x_TD, weights_TK), slots_TK = transit.rows, transit.kept
        y_TD, seen = experts.together(x_TD, slots_TK, weights_TK)
        return Transit(y_TD, sent_to_experts(self.group, seen, slots_TK, 1))


class _WithShared(NamedTuple):
    """What the inner method keeps, and the shared expert's inputs, then its sums (one array); None if it is not fused."""

    inner: Any
    shared: Any


@dataclass(frozen=True)
class ByChoice(Method):
    """``Method`` that adds the results of a token's experts in the order of its choices (``DispatchConfig.by_choice``).

    method: exchanges the rows. apart: whether ``method`` sends a separate row for each choice of a token. top_k: choices per token.
    fused_shared: see ``dispatch``. The shared expert's sum is added last and does not pass through ``method``.
    """

    group: ExpertGroup
    method: Method
    apart: bool
    fused_shared: bool
    top_k: int

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pack a row for each token or for each choice."""
        shared = (x_TD, *shared_slots(slots_TK)) if self.fused_shared else None
        if self.apart:
            x_TD = jnp.repeat(x_TD, self.top_k, axis=0)
            slots_TK, weights_TK = (rearrange(a, "t k -> (t k) 1") for a in (slots_TK, weights_TK))
        inner = self.method.prepare(x_TD, slots_TK, weights_TK)
        return Transit(inner.rows, _WithShared(inner.kept, shared))

    @property
    def dispatch_stages(self) -> tuple[Stage, ...]:
        """The stages of ``method``."""
        return self.send, *(partial(self._run, stage) for stage in self.method.dispatch_stages[1:])

    @property
    def combine_stages(self) -> tuple[Stage, ...]:
        """The stages of ``method``."""
        return self.answer, *(partial(self._run, stage) for stage in self.method.combine_stages[1:])

    def send(self, transit: Transit) -> Transit:
        """Run ``method.send``, and gather the rank's own tokens over ``tp`` for the shared expert."""
        return self._run(self.method.send, transit, lambda shared: tuple(map(self.group.pool_width, shared)))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Run ``method.compute``, and apply the shared expert to the rank's own tokens."""
        compute = partial(self.method.compute, experts=experts.without_shared)
        return self._run(compute, transit, lambda shared: experts(*shared)[0])

    def answer(self, transit: Transit) -> Transit:
        """Run ``method.answer``, and reduce the shared expert's sums over the parts of its width."""
        return self._run(self.method.answer, transit, self.group.share_width)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Add the terms in the order of choices, then the shared expert's sum."""
        shared_sums = transit.kept.shared
        y, counts = self.method.add(self._inner(transit), experts.without_shared)
        if self.apart:
            terms = rearrange(y, "(t k) d -> t k d", k=self.top_k)
            y = add_in_order(terms.astype(jnp.float32), axis=1).astype(y.dtype)
        return y if shared_sums is None else y + shared_sums, counts

    def further(self, transit: Transit) -> FurtherRounds | None:
        """Return the rounds of ``method``."""
        inner = self.method.further(self._inner(transit))
        return inner and inner._replace(
            run=lambda r, so_far, experts: inner.run(r, so_far, experts.without_shared),
            finish=lambda so_far: self._run(lambda _: inner.finish(so_far), transit),
        )

    def _run(self, stage: Stage, transit: Transit, on_shared: Callable[[Any], Any] = lambda shared: shared) -> Transit:
        """Run a stage of ``method``, and ``on_shared`` on the shared expert's inputs or sums."""
        inner, shared = stage(self._inner(transit)), transit.kept.shared
        return Transit(inner.rows, _WithShared(inner.kept, None if shared is None else on_shared(shared)))

    def _inner(self, transit: Transit) -> Transit:
        return Transit(transit.rows, transit.kept.inner)


@dataclass(frozen=True)
class InChunks(Method):
    """``Method`` that exchanges a rank's tokens chunk by chunk. All of it runs in ``compute``, so no collective overlaps with other work.

    method: exchanges one chunk. tokens: number of the rank's tokens, split into ``chunks`` chunks of ``chunk`` tokens.
    """

    method: Method
    tokens: int
    chunk: int
    chunks: int

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Cut the tokens into chunks."""
        inputs, more = ((x_TD, 0), (slots_TK, -1), (weights_TK, 0)), self.chunks * self.chunk - self.tokens
        padded = [jnp.pad(array, ((0, more), (0, 0)), constant_values=fill) for array, fill in inputs]
        return Transit([rearrange(array, "(chunks t) w -> chunks t w", t=self.chunk) for array in padded], None)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Exchange and compute the chunks one after the other."""
        _, (y, counts) = lax.scan(
            lambda _, inputs: (None, whole_exchange(self.method, *inputs, experts)), None, transit.rows
        )
        return Transit(rearrange(y, "chunks t d -> (chunks t) d")[: self.tokens], counts)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums unchanged, and the counts summed over chunks."""
        return transit.rows, jax.tree.map(lambda count: jnp.sum(count, axis=0), transit.kept)
