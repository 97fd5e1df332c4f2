"""Values passed between the four parts of a layer: attention, send, compute and receive (``docs/architecture.md``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from dsjax.model.rows import RowGroup
from dsjax.model.transformer import AnyRotation, DecoderLayer, Projections
from sharding.dispatch import Transit
from sharding.placement import CopyTables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Inputs of all layers for the token slots of a step.

    slots, window_slots: cache slots of the tokens' entries on context pages and on window pages; −1 for padding.
    """

    groups: Sequence[RowGroup]
    ids: Int[Array, "B T"]
    active: Bool[Array, "B T"]
    slots: Int[Array, "B T"]
    rotation: AnyRotation
    filled: Bool[Array, "P G"] | None = None
    window_slots: Int[Array, "B T"] | None = None


@dataclass(frozen=True)
class Layer:
    """One decoder layer and the tokens that pass through it.

    block: its modules. index: its number in their stack. cache_layer: its number in the cache. copies: locations of its experts' copies.
    bind: builds the modules from the stack again; None if a scan has sliced them.
    """

    block: DecoderLayer
    index: Int[Array, ""]
    cache_layer: Int[Array, ""]
    tokens: Tokens
    copies: CopyTables | None
    bind: Callable[[], DecoderLayer] | None = None

    def rebind(self) -> Layer:
        """Return this layer for the branch being traced, so that weights are sliced from the stack only in that branch."""
        return self if self.bind is None else replace(self, block=self.bind())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
    """Tokens before attention's heads.

    x: the layer's input. mix: from ``Residual.pre``, for ``post``. projections: queries, and the values written to the cache.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    projections: Projections


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sent:
    """Dispatched tokens: the result of ``send`` and the input of ``compute``.

    x: the tokens after attention. mix: as in ``Projected``, for the MLP. normed: the normalised tokens, input of the experts. transit: the
    same tokens, packed or received.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    normed: Float[Array, "B T D"]
    transit: Transit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Computed:
    """Outputs of the experts: the result of ``compute`` and the input of ``receive``.

    x, mix: as in ``Sent``. transit: the routed experts' sums, on the expert ranks or returned. shared: the shared experts' output, if any.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    transit: Transit
    shared: Float[Array, "B T D"] | None
