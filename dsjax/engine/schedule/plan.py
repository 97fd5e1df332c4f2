"""What the scheduler decides: which tokens of which requests a step computes. Live requests, in one process."""

from collections.abc import Sequence
from typing import NamedTuple

from dsjax.engine.contract.commands import Command
from dsjax.engine.schedule.request import Request


class ScheduledRow(NamedTuple):
    """Tokens of a request to be computed in this step.

    Attributes:
        start: the first one's position; of a decode row whose request has a row under way, the most that it can be.
        length: how many at most: of a decode row 1 and the drafts.
        sampled: whether the row makes a token.
    """

    request: Request
    start: int
    length: int
    sampled: bool = True


class RankPlan(NamedTuple):
    """One rank's work in a step. Both lists are empty on an idle rank, which still takes part.

    `decodes` are rows that compute a request's last token and make the next one; `prefills` are all other rows. `copies` are pairs of
    pages (from, to) to be copied before.
    """

    decodes: list[ScheduledRow]
    prefills: list[ScheduledRow]
    copies: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Most tokens computed, padding not counted."""
        return sum(row.length for rows in (self.decodes, self.prefills) for row in rows)


class StepPlan(NamedTuple):
    """One step's work: one `RankPlan` for every DP rank, idle ones included.

    Attributes:
        num_drafts: drafts that a decode row verifies at most.
        proposes: drafts to be made for the next step.
        page_commands: what goes before all else, for pages that come from a source or go there.
    """

    ranks: list[RankPlan]
    num_drafts: int = 0
    proposes: int = 0
    page_commands: Sequence[Command] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts that the step computes on all ranks."""
        return sum(row.length for rank in self.ranks for row in rank.prefills)

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to compute. Pages may have to be moved all the same."""
        return not any(rank.decodes or rank.prefills for rank in self.ranks)
