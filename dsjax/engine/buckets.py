"""Which shapes a runner compiles, and how a step's rows are laid into them. Plain Python, no JAX.

A *launch* is one run of the compiled step: a decode rectangle, a prefill rectangle, or both at once. All DP ranks run
the same launch, each with its own rows; what a rank does not fill is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsjax.engine.plan import ScheduledRow, StepPlan

SCORED_CHUNK = 64
"""Most prompt tokens scored in one launch, which holds logits of all of them at once: 33 MB of V3's vocabulary."""

SMALLEST_CHUNK = 32
"""Prefill rectangles narrower than this would only save padding on very short prompts."""

CPU_LAUNCH_TOKENS = 16
"""What a launch costs besides its tokens, in tokens of a rank: the demo on dp=32 takes 85 ms for 8, 1,000 for 256."""

ACCELERATOR_LAUNCH_TOKENS = 256
"""The same where every launch reads the weights: an H200 reads a bf16 weight in the time of 206 tokens' operations with it."""


class Rectangle(NamedTuple):
    """``rows`` requests of up to ``chunk`` tokens, per DP rank."""

    rows: int
    chunk: int


class Launch(NamedTuple):
    """Rectangles of one program (None: left out) and, per DP rank, the rows in them.

    scored: whether the prompt's tokens are scored too, for rows that want ``prompt_logprobs``; then there is one a rank.
    """

    decode: Rectangle | None
    prefill: Rectangle | None
    decode_rows: list[Sequence[ScheduledRow]]
    prefill_rows: list[Sequence[ScheduledRow]]
    scored: bool = False


@dataclass(frozen=True)
class Buckets:
    """The shapes: decode row counts, ascending, and prefill rectangles, widest chunk first.

    mixed: whether decodes and prompts of a step share a launch. That reads the weights once instead of twice, which pays
    on accelerators; with it, each prefill rectangle is compiled twice. single: one row of each narrower width, for the short
    prompt that comes alone: all the others wait while it computes.
    """

    decode: tuple[int, ...]
    prefill: tuple[Rectangle, ...]
    mixed: bool
    single: tuple[Rectangle, ...] = ()

    @classmethod
    def covering(cls, max_num_seqs: int, prefill_chunk: int, *, mixed: bool) -> Buckets:
        """Decode rows 1, 8, then doubling; prefill rectangles of ``prefill_chunk`` tokens, from one row to narrow rows.

        Doubling bounds padding to a factor of 2 where steps are expensive; below 8 rows a step costs about the same,
        so fewer shapes are compiled.
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
        return cls((*decode, max_num_seqs), tuple(rectangles), mixed, single)

    @property
    def scored(self) -> Rectangle:
        """The rectangle of launches that score prompts."""
        return Rectangle(1, min(SCORED_CHUNK, self.prefill[0].chunk))

    def shapes(self) -> list[tuple[Rectangle | None, Rectangle | None]]:
        """Every (decode, prefill) pair that ``launches`` can ask for, but for those that score prompts."""
        beside = (None, Rectangle(self.decode[-1], 1)) if self.mixed else (None,)
        alone = [(Rectangle(rows, 1), None) for rows in self.decode]
        return alone + [(decode, rectangle) for rectangle in self.prefill + self.single for decode in beside]

    def launches(self, plan: StepPlan) -> list[Launch]:
        """Lay a plan into rectangles; if ``mixed``, the decodes join the first prefill rectangle, if there is one.

        Prompts are taken longest first, so that those of a rectangle are of like length. Prompts to be scored come last.
        """
        decodes = [rank.decodes for rank in plan.ranks]
        scored = [[row for row in rank.prefills if _is_scored(row)] for rank in plan.ranks]
        waiting = [
            sorted((row for row in rank.prefills if not _is_scored(row)), key=lambda row: -row.length)
            for rank in plan.ranks
        ]
        nothing: list[Sequence[ScheduledRow]] = [()] * len(plan.ranks)
        most_decodes = max(map(len, decodes))
        launches = []
        while any(waiting):
            rectangle = self._cheapest(max(rows[0].length for rows in waiting if rows), max(map(len, waiting)))
            taken = [rows[: rectangle.rows] for rows in waiting]
            waiting = [rows[rectangle.rows :] for rows in waiting]
            joined = self.mixed and not launches and most_decodes > 0
            decode = Rectangle(self.decode[-1], 1) if joined else None
            launches.append(Launch(decode, rectangle, decodes if joined else nothing, taken))
        if most_decodes and not (launches and self.mixed):
            rows = next(rows for rows in self.decode if rows >= most_decodes)
            launches.insert(0, Launch(Rectangle(rows, 1), None, decodes, nothing))
        return launches + self._scored_launches(scored)

    def _scored_launches(self, scored: list[list[ScheduledRow]]) -> list[Launch]:
        """Cut rows to the scored rectangle's chunk; each launch takes one piece of each rank, in order."""
        chunk = self.scored.chunk
        pieces = [
            [
                ScheduledRow(row.request, start, min(chunk, row.start + row.length - start))
                for row in rows
                for start in range(row.start, row.start + row.length, chunk)
            ]
            for rows in scored
        ]
        nothing: list[Sequence[ScheduledRow]] = [()] * len(pieces)
        return [
            Launch(None, self.scored, nothing, [own[turn : turn + 1] for own in pieces], scored=True)
            for turn in range(max(map(len, pieces)))
        ]

    def _cheapest(self, length: int, rows: int) -> Rectangle:
        """What takes ``rows`` rows of up to ``length`` tokens at the least cost: the tokens of its launches, and the launches.

        Of two that cost the same it is the one with more rows, which is the narrower one.
        """
        each = ACCELERATOR_LAUNCH_TOKENS if self.mixed else CPU_LAUNCH_TOKENS
        fitting = (rectangle for rectangle in self.prefill + self.single if rectangle.chunk >= length)
        return min(fitting, key=lambda one: (-(-rows // one.rows) * (each + one.rows * one.chunk), -one.rows))


def _is_scored(row: ScheduledRow) -> bool:
    """Whether log-probabilities of tokens after the row's positions are wanted."""
    return row.request.wants_prompt_logprobs and row.start < row.request.num_prompt_tokens - 1
