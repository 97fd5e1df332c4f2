"""What a dry run takes for granted where a loop's length hangs on the requests."""

from __future__ import annotations

from sharding.program.text import Operation
from sharding.program.walk import TripCount

TEXT = {
    "attention": "every row attends to its whole context",
    "dispatch": "no exchange needs a second round",
    "experts": "loops of the expert product run once",
}
"""The assumptions in words, as reports show them."""


def trip_counts(context: int, pages: int, page_size: int, block_tokens: int) -> TripCount:
    """Trip counts of the step's loops that XLA cannot know, told apart by the scopes that the model names.

    context: positions that each row attends to; pages: of a row's page table; block_tokens: as ``Step.block_tokens``.
    """
    block = max(1, min(pages, block_tokens // page_size)) * page_size
    blocks = -(-context // block)

    def count(loop: Operation) -> float | None:
        if "/attend_" in loop.op_name:
            return blocks
        if loop.op_name.endswith("/dispatch/shard_map/while"):
            return 0
        return None

    return count
