"""Shapes that an executor compiles, and the packing of a step's rows into them. No JAX.

A *launch* is one run of the compiled step: a decode rectangle, a prefill rectangle, or both. All DP ranks run it, each with its own
rows, and with padding for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.commands import PrefillRow, RankStep, Step
from dsjax.engine.contract.speculative import SpeculativeConfig

SCORED_CHUNK = 64
"""Maximum number of prompt tokens scored in one launch, which holds the logits of all at once: 33 MB for V3's vocabulary."""

SMALLEST_CHUNK = 32
"""Narrower prefill rectangles would only save padding on very short prompts."""

CPU_LAUNCH_TOKENS = 16
"""Fixed cost of a launch, in tokens of a rank: the demo on dp=32 takes 85 ms for 8 tokens, 1,000 ms for 256."""

ACCELERATOR_LAUNCH_TOKENS = 256
"""Fixed cost if every launch reads the weights: an H200 reads a bf16 weight in the time of 206 tokens' operations with it."""


class Rectangle(NamedTuple):
    """``rows`` requests of up to ``chunk`` tokens, per DP rank. For decodes, the chunk is the last token and its drafts."""

    rows: int
    chunk: int


class RowPiece(NamedTuple):
    """A part of a prefill row: index of the row in its rank, first token, and number of tokens."""

    row: int
    first: int
    length: int


class Launch(NamedTuple):
    """Rectangles of one program (None: absent), and each DP rank's pieces of prefill rows in them."""

    decode: Rectangle | None  # has all decode rows of the step
    prefill: Rectangle | None
    pieces: list[Sequence[RowPiece]]
    scored: bool = False  # whether prompt tokens are also scored; then each rank has one row


@dataclass(frozen=True)
class Buckets:
    """Launch shapes: decode row counts, ascending, and prefill rectangles, widest chunk first."""

    decode: tuple[int, ...]
    prefill: tuple[Rectangle, ...]
    # whether decodes and prompts of a step share a launch, which reads the weights once instead of twice, but compiles each prefill
    # rectangle twice
    mixed: bool
    single: tuple[Rectangle, ...] = ()  # rectangles of one row, one for each narrower width, for a short prompt alone
    speculation: SpeculativeConfig | None = None  # determines the numbers of drafts

    @classmethod
    def covering(
        cls, max_num_seqs: int, prefill_chunk: int, *, mixed: bool, speculation: SpeculativeConfig | None = None
    ) -> Buckets:
        """Return 1, 8, then doubling decode rows, and prefill rectangles of ``prefill_chunk`` tokens, from one row to narrow rows.

        Doubling bounds padding to a factor of 2 where steps are expensive; below 8 rows a step costs about the same.
        """
        decode = [1] if max_num_seqs > 1 else []
        rows = 8
        while rows < max_num_seqs:
            decode.append(rows)
            rows *= 2
        rectangles, chunk, rows = [], prefill_chunk, 1
        while True:
            rectangles.append(Rectangle(rows, chunk))
            if chunk <= SMALLEST_CHUNK or rows >= max_num_seqs:
                break
            chunk, rows = -(-chunk // 2), rows * 2
        single = tuple(Rectangle(1, rectangle.chunk) for rectangle in rectangles[1:])
        return cls((*decode, max_num_seqs), tuple(rectangles), mixed, single, speculation)

    @property
    def scored(self) -> Rectangle:
        """Rectangle of launches that score prompts."""
        return Rectangle(1, min(SCORED_CHUNK, self.prefill[0].chunk))

    @property
    def proposals(self) -> tuple[int, ...]:
        """Numbers of drafts that may be proposed after prompts."""
        return tuple(count for count in self._draft_counts(1) if count)

    def shapes(self) -> list[tuple[Rectangle | None, Rectangle | None, tuple[int, ...]]]:
        """Return every (decode, prefill) pair of ``launches`` except scoring ones, with the numbers of drafts proposed after it."""
        decode_shapes, largest, below = [], self.decode[-1], 0
        for rows in self.decode:
            # More requests than these rows may be running, because others may still be in their prompt.
            decode_shapes += [
                (Rectangle(rows, 1 + count), None, (count,) if count else ()) for count in self._draft_counts(below + 1)
            ]
            below = rows
        prompts = dict.fromkeys((*self.prefill, *self.single))
        with_prompts = [(None, rectangle, self.proposals) for rectangle in prompts]
        after_prompts = 0 if self.speculation is None else self.speculation.after_prompts
        if self.mixed:
            with_prompts += [
                (Rectangle(largest, 1 + count), rectangle, tuple(filter(None, (count or after_prompts,))))
                for rectangle in prompts
                for count in self._draft_counts(1)
            ]
        return decode_shapes + with_prompts

    def serves_one(self, decode: Rectangle | None, prefill: Rectangle | None) -> bool:
        """Whether a request alone on its rank needs a pair of `shapes`, for its decodes and a prompt of any length."""
        prompts = (self.prefill[0], *(self.single or self.prefill))
        return (decode is None or decode.rows == self.decode[0]) and prefill in (None, *prompts)

    def launches(self, step: Step) -> list[Launch]:
        """Pack a step into launches. If ``mixed``, the decodes join the first prefill rectangle, if there is one.

        Prompts are taken longest first, so that prompts of similar length share a rectangle. Scored prompts come last.
        """
        ranks, width = step.ranks, 1 + step.num_drafts
        scored = [[(i, row) for i, row in enumerate(rank.prefills) if row.scored] for rank in ranks]
        pending = [
            sorted(
                (RowPiece(i, 0, row.length) for i, row in enumerate(rank.prefills) if not row.scored),
                key=lambda piece: -piece.length,
            )
            for rank in ranks
        ]
        no_pieces: list[Sequence[RowPiece]] = [()] * len(ranks)
        most_decodes = max(num_decodes(rank) for rank in ranks)
        launches = []
        for rectangle, pieces in self._pack_prefills(pending):
            joined = self.mixed and not launches and most_decodes > 0
            launches.append(Launch(Rectangle(self.decode[-1], width) if joined else None, rectangle, pieces))
        if most_decodes and not (launches and self.mixed):
            rows = next(rows for rows in self.decode if rows >= most_decodes)
            launches.insert(0, Launch(Rectangle(rows, width), None, no_pieces))
        return launches + self._scored_launches(scored)

    def _scored_launches(self, scored: list[list[tuple[int, PrefillRow]]]) -> list[Launch]:
        """Split rows into pieces of the scored rectangle's chunk; each launch takes one piece per rank, in order."""
        chunk = self.scored.chunk
        pieces = [
            [
                RowPiece(index, first, min(chunk, row.length - first))
                for index, row in rows
                for first in range(0, row.length, chunk)
            ]
            for rows in scored
        ]
        return [
            Launch(None, self.scored, [rank_pieces[index : index + 1] for rank_pieces in pieces], scored=True)
            for index in range(max(map(len, pieces)))
        ]

    def _draft_counts(self, least: int) -> list[int]:
        """Return the numbers of drafts per row while ``least`` or more requests are running, ascending."""
        return [0] if self.speculation is None else self.speculation.counts(least, self.decode[-1])

    def _pack_prefills(self, pending: list[list[RowPiece]]) -> list[tuple[Rectangle, list[list[RowPiece]]]]:
        """Return rectangles with each rank's pieces in them. Use single rows if that costs less for the whole step."""
        packed = self._pack_into(self.prefill + self.single, pending)
        if any(rectangle not in self.prefill for rectangle, _ in packed):
            # The greedy choice takes all waiting pieces to be as long as the longest, so it may not be the cheapest for the whole step.
            packed = min(packed, self._pack_into(self.prefill, pending), key=self._cost)
        return packed

    def _pack_into(
        self, rectangles: Sequence[Rectangle], pending: list[list[RowPiece]]
    ) -> list[tuple[Rectangle, list[list[RowPiece]]]]:
        packed = []
        while any(pending):
            length = max(rank_pieces[0].length for rank_pieces in pending if rank_pieces)
            rectangle = self._cheapest(rectangles, length, max(map(len, pending)))
            packed.append((rectangle, [rank_pieces[: rectangle.rows] for rank_pieces in pending]))
            pending = [rank_pieces[rectangle.rows :] for rank_pieces in pending]
        return packed

    def _cost(self, packed: list[tuple[Rectangle, list[list[RowPiece]]]]) -> int:
        return sum(self._tokens_per_launch + rectangle.rows * rectangle.chunk for rectangle, _ in packed)

    def _cheapest(self, rectangles: Sequence[Rectangle], length: int, rows: int) -> Rectangle:
        """Return the rectangle that takes ``rows`` rows of up to ``length`` tokens at the least cost, in tokens and launches.

        At equal cost, take the rectangle with more rows, which is narrower.
        """

        def cost(rectangle: Rectangle) -> tuple[int, int]:
            num_launches = -(-rows // rectangle.rows)
            return num_launches * (self._tokens_per_launch + rectangle.rows * rectangle.chunk), -rectangle.rows

        return min((rectangle for rectangle in rectangles if rectangle.chunk >= length), key=cost)

    @property
    def _tokens_per_launch(self) -> int:
        return ACCELERATOR_LAUNCH_TOKENS if self.mixed else CPU_LAUNCH_TOKENS


FEW_PROMPTS = 8
"""Minimum number of prompts for which sampling programs of several rows have room, if decodes can have as many rows."""


def sampling_room(decode: Rectangle | None, prefill: Rectangle | None, most_rows: int, most_drafts: int) -> int:
    """Return the positions per DP rank that a launch's sampling programs must have room for. most_rows: maximum number of decode rows.

    Launches with prompts share the sampling programs of decode launches of one row, or of `FEW_PROMPTS` rows, with all drafts.
    """
    if prefill is None:
        return 0
    rows = max(prefill.rows, min(FEW_PROMPTS, most_rows)) if decode or prefill.rows > 1 else 1
    return decode.rows * decode.chunk + rows if decode else rows * (1 + most_drafts)


def num_decodes(rank: RankStep) -> int:
    """Return the number of decode rows of a rank."""
    return len(rank.decodes) // 8


def padded_pieces(ranks: Sequence[np.ndarray], size: int, padding: int) -> Iterator[np.ndarray]:
    """Yield ``[B, size, W]`` int32 pieces of each rank's ``[n, W]`` rows, filled up with ``padding``."""
    for start in range(0, max(map(len, ranks)), size):
        piece = np.full((len(ranks), size, ranks[0].shape[1]), padding, np.int32)
        for rank, rows in enumerate(ranks):
            part = rows[start : start + size]
            piece[rank, : len(part)] = part
        yield piece
