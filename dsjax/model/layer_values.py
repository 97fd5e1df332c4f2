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
    """Inputs of all layers for the token slots of a step."""

    groups: Sequence[RowGroup]
    ids: Int[Array, "B T"]
    active: Bool[Array, "B T"]
    slots: Int[Array, "B T"]  # cache slots of the tokens' entries on context pages; −1 for padding
    rotation: AnyRotation
    filled: Bool[Array, "P G"] | None = None  # see ``Rows.filled``
    window_slots: Int[Array, "B T"] | None = None  # cache slots of the tokens' entries on window pages; −1 for padding


@dataclass(frozen=True)
class Layer:
    """One decoder layer and the tokens that pass through it."""

    block: DecoderLayer  # its modules
    index: Int[Array, ""]  # its number in their stack
    cache_layer: Int[Array, ""]  # its number in the cache
    tokens: Tokens
    copies: CopyTables | None  # locations of its experts' copies
    # builds the modules from the stack again; None if a scan has sliced them
    bind: Callable[[], DecoderLayer] | None = None

    def rebind(self) -> Layer:
        """Return this layer for the branch being traced, so that weights are sliced from the stack only in that branch."""
        return self if self.bind is None else replace(self, block=self.bind())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
    """Tokens before attention's heads."""

    x: Float[Array, "B T *n D"]  # the layer's input
    mix: Any  # pytree from ``Residual.pre``, for ``Residual.post``
    projections: Projections  # queries, and the values written to the cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sent:
    """Dispatched tokens: the result of ``send`` and the input of ``compute``."""

    x: Float[Array, "B T *n D"]  # the tokens after attention
    mix: Any  # as in ``Projected``, for the MLP
    normed: Float[Array, "B T D"]  # the normalised tokens, input of the experts
    transit: Transit  # the same tokens, packed or received


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Computed:
    """Outputs of the experts: the result of ``compute`` and the input of ``receive``."""

    x: Float[Array, "B T *n D"]  # as in ``Sent``
    mix: Any  # as in ``Sent``
    transit: Transit  # the routed experts' sums, on the expert ranks or returned
    shared: Float[Array, "B T D"] | None  # the shared experts' output, if any
