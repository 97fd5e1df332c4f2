"""Which shapes a runner compiles, and how a step's rows are laid into them. Plain Python, no JAX.

A *launch* is one run of the compiled step: a decode rectangle, a prefill rectangle, or both at once. All DP ranks run
the same launch, each with its own rows; what a rank does not fill is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsjax.engine.plan import ScheduledRow, StepPlan

SMALLEST_CHUNK = 32
"""Prefill rectangles narrower than this would only save padding on very short prompts."""


class Rectangle(NamedTuple):
    """``rows`` requests of up to ``chunk`` tokens, per DP rank."""

    rows: int
    chunk: int


class Launch(NamedTuple):
    """Rectangles of one program (None: left out) and, per DP rank, the rows in them."""

    decode: Rectangle | None
    prefill: Rectangle | None
    decode_rows: list[Sequence[ScheduledRow]]
    prefill_rows: list[Sequence[ScheduledRow]]


@dataclass(frozen=True)
class Buckets:
    """The shapes: decode row counts, ascending, and prefill rectangles, widest chunk first.

    mixed: whether decodes and prompts of a step share a launch. That reads the weights once instead of twice, which pays
    on accelerators; with it, each prefill rectangle is compiled twice.
    """

    decode: tuple[int, ...]
    prefill: tuple[Rectangle, ...]
    mixed: bool

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
        return cls((*decode, max_num_seqs), tuple(rectangles), mixed)

    def shapes(self) -> list[tuple[Rectangle | None, Rectangle | None]]:
        """Every (decode, prefill) pair that ``launches`` can ask for."""
        beside = (None, Rectangle(self.decode[-1], 1)) if self.mixed else (None,)
        alone = [(Rectangle(rows, 1), None) for rows in self.decode]
        return alone + [(decode, rectangle) for rectangle in self.prefill for decode in beside]

    def launches(self, plan: StepPlan) -> list[Launch]:
        """Lay a plan into rectangles; if ``mixed``, the decodes join the first prefill rectangle, if there is one.

        Prompts are taken longest first, so that those of a rectangle are of like length.
        """
        decodes = [rank.decodes for rank in plan.ranks]
        waiting = [sorted(rank.prefills, key=lambda row: -row.length) for rank in plan.ranks]
        nothing: list[Sequence[ScheduledRow]] = [()] * len(plan.ranks)
        most_decodes = max(map(len, decodes))
        launches = []
        while any(waiting):
            rectangle = self._narrowest(max(rows[0].length for rows in waiting if rows))
            taken = [rows[: rectangle.rows] for rows in waiting]
            waiting = [rows[rectangle.rows :] for rows in waiting]
            joined = self.mixed and not launches and most_decodes > 0
            decode = Rectangle(self.decode[-1], 1) if joined else None
            launches.append(Launch(decode, rectangle, decodes if joined else nothing, taken))
        if most_decodes and not (launches and self.mixed):
            rows = next(rows for rows in self.decode if rows >= most_decodes)
            launches.insert(0, Launch(Rectangle(rows, 1), None, decodes, nothing))
        return launches

    def _narrowest(self, length: int) -> Rectangle:
        """The rectangle with most rows that is wide enough."""
        return next(rectangle for rectangle in reversed(self.prefill) if rectangle.chunk >= length)
