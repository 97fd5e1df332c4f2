"""``Alone``: no exchange, all experts on one rank. ``ByChoice`` and ``InChunks``: wrappers of another method."""

from __future__ import annotations

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
from sharding.dispatch.local import Counts, RankExperts, shared_slots
from sharding.dispatch.transit import ExchangePlan, Method, Stage, Transit, whole_exchange
from sharding.dispatch.wire import WireFormat
from sharding.sums import add_in_order


@dataclass(frozen=True)
class Alone(Method):
    """``Method`` of a rank that holds all experts: nothing travels."""

    fused_shared: bool

    name = "local"

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, fused_shared: bool) -> Alone:
        """As ``Method.of``."""
        return cls(fused_shared)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """Return an empty list."""
        return []

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pass on the tokens, with an additional choice if the rank has a fused shared expert."""
        if self.fused_shared:
            own_TK, one_TK = shared_slots(slots_TK)
            slots_TK, weights_TK = (
                jnp.concatenate(pair, axis=1) for pair in ((slots_TK, own_TK[:, :1]), (weights_TK, one_TK[:, :1]))
            )
        return Transit((x_TD, slots_TK, weights_TK), None)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the tokens' weighted sums."""
        return Transit(*experts(*transit.rows))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums unchanged."""
        counts = transit.kept
        if counts:
            counts = counts | dict.fromkeys(("rows_sent", "rows_received", "rounds"), jnp.int32(0))
        return transit.rows, counts


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
        return self.send, *map(self._on_inner, self.method.dispatch_stages[1:])

    @property
    def combine_stages(self) -> tuple[Stage, ...]:
        """The stages of ``method``."""
        return self.answer, *map(self._on_inner, self.method.combine_stages[1:])

    def send(self, transit: Transit) -> Transit:
        """Run ``method.send``, and gather the rank's own tokens over ``tp`` for the shared expert."""
        shared = transit.kept.shared
        inner = self.method.send(self._inner(transit))
        return Transit(inner.rows, _WithShared(inner.kept, shared and tuple(map(self.group.pool_width, shared))))

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Run ``method.compute``, and apply the shared expert to the rank's own tokens."""
        shared = transit.kept.shared
        inner = self.method.compute(self._inner(transit), experts.without_shared)
        return Transit(inner.rows, _WithShared(inner.kept, shared and experts(*shared)[0]))

    def answer(self, transit: Transit) -> Transit:
        """Run ``method.answer``, and reduce the shared expert's sums over the parts of its width."""
        sums = transit.kept.shared
        inner = self.method.answer(self._inner(transit))
        return Transit(inner.rows, _WithShared(inner.kept, None if sums is None else self.group.share_width(sums)))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Add the terms in the order of choices, then the shared expert's sum."""
        shared_sums = transit.kept.shared
        y, counts = self.method.add(self._inner(transit), experts.without_shared)
        if self.apart:
            terms = rearrange(y, "(t k) d -> t k d", k=self.top_k)
            y = add_in_order(terms.astype(jnp.float32), axis=1).astype(y.dtype)
        return y if shared_sums is None else y + shared_sums, counts

    def rounds(self, transit: Transit) -> Array | None:
        """Return ``method.rounds``."""
        return self.method.rounds(self._inner(transit))

    def before_further(self, transit: Transit) -> Any:
        """Return ``method.before_further``."""
        return self.method.before_further(self._inner(transit))

    def round(self, transit: Transit, r: Array, so_far: Any, experts: RankExperts) -> Any:
        """Run ``method.round``."""
        return self.method.round(self._inner(transit), r, so_far, experts.without_shared)

    def after_further(self, transit: Transit, so_far: Any) -> Transit:
        """Run ``method.after_further``."""
        return self._on_inner(lambda inner: self.method.after_further(inner, so_far))(transit)

    def _on_inner(self, stage: Stage) -> Stage:
        """Return a stage of ``method`` that passes the shared expert's rows or sums on unchanged."""

        def run(transit: Transit) -> Transit:
            inner = stage(self._inner(transit))
            return Transit(inner.rows, _WithShared(inner.kept, transit.kept.shared))

        return run

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
        pad = partial(pad_rows, rows=self.chunks * self.chunk)
        inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK, fill=0)
        return Transit([rearrange(array, "(chunks t) w -> chunks t w", t=self.chunk) for array in inputs], None)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Exchange and compute the chunks one after the other."""
        _, (y, counts) = lax.scan(
            lambda _, inputs: (None, whole_exchange(self.method, *inputs, experts)), None, transit.rows
        )
        return Transit(rearrange(y, "chunks t d -> (chunks t) d")[: self.tokens], counts)

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums unchanged, and the counts summed over chunks."""
        return transit.rows, jax.tree.map(lambda count: jnp.sum(count, axis=0), transit.kept)


def pad_rows(array: jax.Array, *, rows: int, fill: int) -> jax.Array:
    """Pad ``array`` with rows of ``fill`` to ``rows`` rows."""
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0)), constant_values=fill)
