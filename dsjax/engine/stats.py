"""Statistics of a step, for metrics, load reports and live views."""

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
    """Counts of the drafts that a step verified, with vLLM's names."""

    num_drafts: int  # rows with drafts
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]  # number of rows whose first, second, … draft was accepted

    @classmethod
    def of(cls, results: Sequence[RankResults]) -> "DraftCounts":
        """Count a step's decode rows. The last token of a row is the model's own; all tokens of a failed row are drafts."""
        rows = [row for rank in results for row in rank.decodes if row.num_drafts]
        accepted = [max(0, min(row.num_drafts, len(row.token_ids) - (not row.failed))) for row in rows]
        max_drafts = max((row.num_drafts for row in rows), default=0)
        per_position = tuple(sum(count > position for count in accepted) for position in range(max_drafts))
        return cls(len(rows), sum(row.num_drafts for row in rows), sum(accepted), per_position)


@dataclass(frozen=True, eq=False)
class StepStats:
    """One step of the engine. Counts are for this step alone unless stated otherwise."""

    time: float  # when the step's results were entered, in seconds of the engine's clock
    # seconds from planning the step to entering its results. With asynchronous scheduling two steps overlap
    duration: float
    # by part: `plan`, `launch` (lay out and send inputs), `device` (wait for the previous step, and compute), `enter`
    host_seconds: dict[str, float]
    num_decode_tokens: int  # computed tokens of output
    num_prompt_tokens: int  # computed tokens of prompts, and of preempted requests that are computed again
    num_padding_tokens: int  # tokens computed for padding slots
    num_preemptions: int
    compilations_after_warm_up: int  # total so far; must stay 0
    ranks: list[RankLoad]  # loads after the step
    experts: ExpertCounts | None = None
    drafts: DraftCounts | None = None  # None if the step had no drafts to verify
    # totals so far, by engine plugin: `balance` (`BalanceStats`), `disk` (`DiskCounts`), `transfers` (`TransferCounts`)
    parts: Mapping[str, Any] = field(default_factory=dict)
    # (tier, seconds) of each wait for pages from that tier since the previous stats
    page_waits: list[tuple[str, float]] = field(default_factory=list)


class EngineObserver(Protocol):
    """Receives the events of `AsyncEngine` in the event loop's thread. Methods must return quickly, because they block all streams."""

    def on_step(self, stats: StepStats) -> None:
        """A step has ended."""

    def on_updates(self, updates: Sequence[Update]) -> None:
        """A step updated completions that a client waits for. Their outputs may not be delivered yet."""

    def on_ended(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Completions ended outside a step: their text contained a stop string, or their client is gone."""

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Outputs were delivered. Each has new tokens or the end of a completion."""

    def on_rejected(self, reason: str) -> None:
        """A request was rejected before it reached the engine."""
