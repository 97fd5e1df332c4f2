"""Micro-batches of a step: which steps are split, and the rows of each part.

Two-batch overlap has two; attention–FFN disaggregation (AFD) may have more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dsjax.model.rows import GroupShape, RowGroup


@dataclass(frozen=True)
class TwoBatchOverlap:
    """Decides from a step's shapes alone whether to compute it in two halves, so that all ranks decide alike."""

    decode_tokens: int = 32  # fewest tokens of a DP rank, padding included, for a step of decodes alone
    prefill_tokens: int = 512  # the same for a step with prompts
    decode_chunk: int = 1  # most tokens of a decode row: one plus its drafts
    stages: int = 2  # most micro-batches of a split step with AFD

    def halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Whether to split a step with these row groups: it has enough tokens, and a group with at least two."""
        least = self.decode_tokens if all(one.chunk <= self.decode_chunk for one in shapes) else self.prefill_tokens
        return sum(one.tokens for one in shapes) >= least and any(one.tokens > 1 for one in shapes)


@dataclass(frozen=True)
class MicroBatches:
    """Row groups cut into micro-batches."""

    groups: Sequence[Sequence[RowGroup]]  # the row groups of each micro-batch
    # ``[T]``: for each token slot of the micro-batches, concatenated in order, its token slot in the step
    places: Int[np.ndarray, "T"]

    @property
    def borders(self) -> list[int]:
        """The index in ``places`` at which each micro-batch but the first begins."""
        sizes = [sum(group.shape.tokens for group in groups) for groups in self.groups]
        return np.cumsum(sizes)[:-1].tolist()

    @classmethod
    def of(cls, groups: Sequence[RowGroup], most: int) -> MicroBatches:
        """Cut groups into at most ``most`` micro-batches.

        Rows are dealt round-robin, so that padded rows, which come last, spread evenly. A group with one row is split along its chunk.
        """
        row_groups: list[list[RowGroup]] = [[] for _ in range(most)]
        places_of: list[list[np.ndarray]] = [[] for _ in range(most)]
        start = 0
        for group in groups:
            R, C = group.shape.rows, group.shape.chunk
            places = start + np.arange(R * C).reshape(R, C)
            start += R * C
            pieces = _pieces(group.shape, most)
            for part in range(pieces):
                if R > 1:
                    row_groups[part].append(_rows(group, part, most))
                    places_of[part].append(places[part::most])
                else:
                    first, stop = -(-C * part // pieces), -(-C * (part + 1) // pieces)
                    row_groups[part].append(_columns(group, first, stop))
                    places_of[part].append(places[:, first:stop])
        filled = count_micro_batches([group.shape for group in groups], most)
        return cls(row_groups[:filled], np.concatenate([array.reshape(-1) for arrays in places_of for array in arrays]))


def count_micro_batches(shapes: Sequence[GroupShape], most: int) -> int:
    """Return the number of micro-batches into which ``MicroBatches.of`` splits groups of these shapes."""
    return max(_pieces(shape, most) for shape in shapes)


def _pieces(shape: GroupShape, most: int) -> int:
    return min(most, shape.rows if shape.rows > 1 else shape.chunk)


def _rows(group: RowGroup, first: int, step: int) -> RowGroup:
    """Return every ``step``-th row of a group, from row ``first`` on. The arrays are ``[B, R, …]``, with B DP ranks."""
    rows = jax.tree.map(lambda array: array[:, first::step], group)
    return replace(rows, shape=replace(group.shape, rows=len(range(first, group.shape.rows, step))))


def _columns(group: RowGroup, first: int, end: int) -> RowGroup:
    """Return tokens ``first`` to ``end`` of each row's chunk, which follow the tokens before ``first`` in the cache."""
    length = jnp.clip(group.length - first, 0, end - first)
    shape = replace(group.shape, chunk=end - first)
    tokens, start = group.tokens[:, :, first:end], group.start + first
    return replace(group, tokens=tokens, start=start, length=length, shape=shape)
