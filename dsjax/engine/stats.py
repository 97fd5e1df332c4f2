"""What a step did, for whoever watches: metrics, load, the live views."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsjax.engine.contract.executor import ExpertCounts, RankResults
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.text.outputs import RequestOutput


@dataclass(frozen=True)
class DraftCounts:
    """What came of the drafts that a step verified; vLLM's names. num_drafts: rows that had any, with num_draft_tokens.

    accepted_per_position: of the first, second, … draft of each row, how many were accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, results: Sequence[RankResults]) -> "DraftCounts":
        """Count a step's decode rows. A row's last token is the model's own; a row that failed has none, its tokens are all drafts."""
        rows = [row for rank in results for row in rank.decodes if row.num_drafts]
        accepted = [max(0, min(row.num_drafts, len(row.token_ids) - (not row.failed))) for row in rows]
        most = max((row.num_drafts for row in rows), default=0)
        per_position = tuple(sum(count > place for count in accepted) for place in range(most))
        return cls(len(rows), sum(row.num_drafts for row in rows), sum(accepted), per_position)


@dataclass(frozen=True, eq=False)
class StepStats:
    """One step of the engine. All counts are of this step alone unless said otherwise.

    Attributes:
        time: seconds of the engine's clock when its results were entered.
        duration: seconds from planning to entering. With asynchronous scheduling two steps overlap.
        host_seconds: by part: `plan`, `launch` (inputs laid out and sent), `device` (behind the step before, and computing), `enter`.
        num_decode_tokens, num_prompt_tokens: computed; a preempted request's tokens are prompt tokens when computed again.
            num_padding_tokens: computed for nothing.
        compilations_after_warm_up: total so far; must stay 0. ranks: after the step.
        drafts: None where none were to be verified.
        parts: what the core's attachments have done so far, by their names: `balance` (`BalanceStats`), `disk` (`DiskCounts`), `transfers`
            (`TransferCounts`).
        page_waits: (tier, seconds) that requests have waited for pages to come from there, since the stats before.
    """

    time: float
    duration: float
    host_seconds: dict[str, float]
    num_decode_tokens: int
    num_prompt_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    compilations_after_warm_up: int
    ranks: list[RankLoad]
    experts: ExpertCounts | None = None
    drafts: DraftCounts | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    page_waits: list[tuple[str, float]] = field(default_factory=list)


class EngineObserver(Protocol):
    """Told of everything that `AsyncEngine` does, in the event loop's thread. Must be quick: streams wait meanwhile."""

    def on_step(self, stats: StepStats) -> None:
        """A step has ended."""

    def on_updates(self, updates: Sequence[Update]) -> None:
        """A step did this to completions that somebody waits for, whether or not their outputs are delivered yet."""

    def on_ended(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """These completions ended outside a step: a stop string was found in their text, or nobody waits for them any more."""

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """These outputs were delivered: first tokens, further ones, ends."""

    def on_rejected(self, reason: str) -> None:
        """A request was turned away before it reached the engine."""
