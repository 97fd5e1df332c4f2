"""Row groups: which tokens of which requests a step computes, as the arrays that the device reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Int

from dsjax.model.forms import Form


@dataclass(frozen=True)
class GroupShape:
    """Static shape of a row group on one DP rank: ``rows`` requests, ``chunk`` tokens each, ``pages`` of context, a ring of ``windows``."""

    rows: int
    chunk: int
    pages: int
    form: Form
    windows: int = 0

    @property
    def tokens(self) -> int:
        """Token slots of the group on one DP rank."""
        return self.rows * self.chunk

    @property
    def packed_width(self) -> int:
        """Integers that describe the group on one DP rank: tokens, start, length, page table."""
        return self.rows * (self.chunk + 2 + self.pages + self.windows)


@jax.tree_util.register_dataclass
@dataclass
class RowGroup:
    """A row group's part of a step: ``length`` tokens of each row from position ``start`` on; ``length`` 0 is padding."""

    tokens: Int[Array, "B R C"]
    start: Int[Array, "B R"]
    length: Int[Array, "B R"]
    tables: Int[Array, "B R Pt"]  # the pages of each row's context, followed by its ring of window pages
    shape: GroupShape = field(metadata={"static": True})
    # position at which each row's output begins: tokens before it use the prefill MLA form, the others the decode form. None: all tokens
    # use ``shape.form``
    prompt_length: Int[Array, "B R"] | None = None

    @classmethod
    def unpack(cls, packed: Int[Array, "B W"], shape: GroupShape) -> RowGroup:
        """Read a group from its integers, laid out as ``pack`` does."""
        R, C = shape.rows, shape.chunk
        ends = np.cumsum([R * C, R, R])
        tokens, start, length, tables = jnp.split(packed, ends, axis=1)
        tokens, tables = (rearrange(a, "b (r c) -> b r c", r=R) for a in (tokens, tables))
        return cls(tokens, start, length, tables, shape)

    @staticmethod
    def pack(tokens: np.ndarray, start: np.ndarray, length: np.ndarray, tables: np.ndarray) -> np.ndarray:
        """Return ``[B, W]`` int32 from NumPy arrays of the fields' shapes, so that one transfer carries a step's inputs."""
        return np.concatenate(
            [rearrange(a, "b ... -> b (...)") for a in (tokens, start, length, tables)], axis=1, dtype=np.int32
        )

    @property
    def positions(self) -> Int[Array, "B R C"]:
        """Position of each token; padding continues the count and is masked by ``active``."""
        return self.start[..., None] + jnp.arange(self.shape.chunk)

    @property
    def active(self) -> Array:
        """Which token slots hold a token: ``[B, R, C]`` bool."""
        return jnp.arange(self.shape.chunk) < self.length[..., None]

    def slots(self, page_size: int) -> Int[Array, "B R C"]:
        """Cache slot of each token on its rank, −1 for padding."""
        return self._slots(page_size, lambda index: jnp.minimum(index, self.shape.pages - 1))

    def window_slots(self, page_size: int) -> Int[Array, "B R C"]:
        """Slot of each token among the window pages of its rank, −1 for padding."""
        return self._slots(page_size, lambda index: self.shape.pages + jax.lax.rem(index, self.shape.windows))

    def _slots(self, page_size: int, column: Callable[[Array], Array]) -> Int[Array, "B R C"]:
        # Positions are never negative, so division and remainder need not handle signs.
        positions = self.positions
        index, offset = jax.lax.div(positions, page_size), jax.lax.rem(positions, page_size)
        page = jnp.take_along_axis(self.tables, column(index), axis=2, mode="promise_in_bounds")
        return jnp.where(self.active, page * page_size + offset, -1)


def unpack(packed: Int[Array, "B W"], shapes: Sequence[GroupShape]) -> list[RowGroup]:
    """Return the groups of ``shapes``, whose integers are concatenated in ``packed``."""
    ends = np.cumsum([shape.packed_width for shape in shapes])[:-1]
    return [RowGroup.unpack(part, shape) for part, shape in zip(jnp.split(packed, ends, axis=1), shapes, strict=True)]


def flatten(parts: list[Array]) -> Array:
    """``[B, R, C]`` of each group → ``[B, T]`` of all: the tokens of a rank, group after group."""
    return jnp.concatenate([rearrange(part, "b r c -> b (r c)") for part in parts], axis=1)


def with_tokens(groups: Sequence[RowGroup], tokens: Int[Array, "B T"]) -> list[RowGroup]:
    """Return the groups with their tokens replaced by these, laid out as by ``flatten``."""
    ends = np.cumsum([group.shape.tokens for group in groups])[:-1]
    parts = zip(groups, jnp.split(tokens, ends, axis=1), strict=True)
    return [replace(group, tokens=rearrange(own, "b (r c) -> b r c", c=group.shape.chunk)) for group, own in parts]
