"""What passes between the four parts of a layer: attention, send, compute and receive (``docs/architecture.md``)."""

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
    """What a pass through the layers needs to know of its token slots.

    slots, window_slots: where the cache has their entries, on context pages and on window pages; −1 for padding.
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

    block: its modules. index: its number in their stack; layer: in the cache. copies: where the copies of its experts are.
    bind: makes the modules anew from the stack; None where a scan has sliced them.
    """

    block: DecoderLayer
    index: Int[Array, ""]
    layer: Int[Array, ""]
    tokens: Tokens
    copies: CopyTables | None
    bind: Callable[[], DecoderLayer] | None = None

    def here(self) -> Layer:
        """This layer for the branch that is being traced, so that what it reads of the stack is sliced in that branch alone."""
        return self if self.bind is None else replace(self, block=self.bind())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
    """Tokens before attention's heads.

    x: as the layer got them; mix: what ``Residual.pre`` gave for ``post``; projections: queries, and what was written to the cache.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    projections: Projections


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sent:
    """Tokens on their way to their experts: what ``send`` gives, and ``compute`` takes.

    x: the tokens after attention; mix: as of ``Projected``, of the MLP; normed: normalised, as experts read them; transit: the same, packed
    or arrived.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    normed: Float[Array, "B T D"]
    transit: Transit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Computed:
    """What experts gave for tokens, on its way back to them: what ``compute`` gives, and ``receive`` takes.

    x, mix: as of ``Sent``; transit: the routed experts' sums, where these are or returned; shared: the shared experts', if any.
    """

    x: Float[Array, "B T *n D"]
    mix: Any
    transit: Transit
    shared: Float[Array, "B T D"] | None
