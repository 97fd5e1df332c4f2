"""Which steps are computed in micro-batches, and which rows each of them has: two halves that overlap, or more that take turns."""

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
    """Which steps are computed in two halves. The shapes decide, so that all ranks do it or none.

    decode_tokens, prefill_tokens: least tokens of a DP rank, padding included, of steps of decodes alone, and of steps with prompts.
    decode_chunk: most tokens of a decode's row: one, and its drafts. stages: where experts have devices of their own, how many
    micro-batches take turns in such a step, in place of two halves.
    """

    decode_tokens: int = 32
    prefill_tokens: int = 512
    decode_chunk: int = 1
    stages: int = 2

    def halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Whether a step of these groups is computed in two halves."""
        least = self.decode_tokens if all(one.chunk <= self.decode_chunk for one in shapes) else self.prefill_tokens
        return sum(one.tokens for one in shapes) >= least and any(one.tokens > 1 for one in shapes)


@dataclass(frozen=True)
class MicroBatches:
    """Row groups in micro-batches. groups: of each. places: of all token slots of a DP rank, one micro-batch after the other."""

    groups: Sequence[Sequence[RowGroup]]
    places: Int[np.ndarray, "T"]

    @property
    def borders(self) -> list[int]:
        """Where a DP rank's token slots of the second micro-batch begin, and of those behind it."""
        sizes = [sum(group.shape.tokens for group in groups) for groups in self.groups]
        return np.cumsum(sizes)[:-1].tolist()

    @classmethod
    def of(cls, groups: Sequence[RowGroup], most: int) -> MicroBatches:
        """At most so many. Rows go to each in turn, as padding comes last; a row alone is cut into equal parts of its chunk."""
        made: list[list[RowGroup]] = [[] for _ in range(most)]
        places_of: list[list[np.ndarray]] = [[] for _ in range(most)]
        start = 0
        for group in groups:
            R, C = group.shape.rows, group.shape.chunk
            places = start + np.arange(R * C).reshape(R, C)
            start += R * C
            parts = _pieces(group.shape, most)
            for part in range(parts):
                if R > 1:
                    made[part].append(_rows(group, part, most))
                    places_of[part].append(places[part::most])
                else:
                    first, end = -(-C * part // parts), -(-C * (part + 1) // parts)
                    made[part].append(_columns(group, first, end))
                    places_of[part].append(places[:, first:end])
        filled = count_micro_batches([group.shape for group in groups], most)
        return cls(made[:filled], np.concatenate([one.reshape(-1) for part in places_of for one in part]))


def count_micro_batches(shapes: Sequence[GroupShape], most: int) -> int:
    """How many ``MicroBatches.of`` makes of groups of these shapes."""
    return max(_pieces(shape, most) for shape in shapes)


def _pieces(shape: GroupShape, most: int) -> int:
    return min(most, shape.rows if shape.rows > 1 else shape.chunk)


def _rows(group: RowGroup, first: int, step: int) -> RowGroup:
    """Every ``step``-th row of a group, from row ``first`` on."""
    rows = jax.tree.map(lambda array: array[:, first::step], group)
    return replace(rows, shape=replace(group.shape, rows=len(range(first, group.shape.rows, step))))


def _columns(group: RowGroup, first: int, end: int) -> RowGroup:
    """The tokens of a group's rows from number ``first`` of the chunk to ``end``: they stand behind those before them in the cache."""
    length = jnp.clip(group.length - first, 0, end - first)
    shape = replace(group.shape, chunk=end - first)
    tokens, start = group.tokens[:, :, first:end], group.start + first
    return replace(group, tokens=tokens, start=start, length=length, shape=shape)
