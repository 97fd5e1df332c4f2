"""What a step did, for whoever watches: metrics, load, the live views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dsjax.engine.outputs import RequestOutput

if TYPE_CHECKING:  # the scheduler's side of the engine loads neither NumPy nor JAX
    from collections.abc import Sequence

    import numpy as np

    from dsjax.engine.request import FinishReason, Request
    from dsjax.engine.scheduler import Update


class RankLoad(NamedTuple):
    """What one DP rank has to do, and has room for.

    Attributes:
        running, waiting: requests.
        waiting_tokens: known tokens of the waiting requests.
        used_pages: pages that requests hold.
        cached_pages: pages that nobody holds but the prefix cache keeps; they count as free.
        usable_pages: pages that can be held at all.
        cost: what a new request that finds nothing in this rank's cache is charged here besides its own tokens, in tokens to
            be computed (docs/scheduler.md).
    """

    rank: int
    running: int
    waiting: int
    waiting_tokens: int
    used_pages: int
    cached_pages: int
    usable_pages: int
    cost: float


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """How tokens reached their experts since recording began.

    Attributes:
        tokens_per_expert: `[layers, physical experts]`, of the MoE layers.
        rows_sent: `[ranks]`, rows of tokens that each device sent to others.
        rounds: of dispatch, of each layer the most of any rank; summed over layers and launches.
        dispatch_bytes: sent by all devices.
        padding_share: of those bytes, the share that carried no token's row; 0 to 1.
    """

    tokens_per_expert: np.ndarray
    rows_sent: np.ndarray
    rounds: int
    dispatch_bytes: int
    padding_share: float


class RunnerCounts(NamedTuple):
    """What a runner counts.

    Attributes:
        num_padding_tokens: token slots of the last step's launches, on all ranks, that held no token.
        compilations_after_warm_up: programs compiled since warm-up ended; 0 as long as there was none.
        experts: only while recording is on.
    """

    num_padding_tokens: int = 0
    compilations_after_warm_up: int = 0
    experts: ExpertCounts | None = None


@dataclass(frozen=True, eq=False)
class StepStats:
    """One step of the engine. All counts are of this step alone unless said otherwise.

    Attributes:
        time: seconds of the engine's clock when its results were entered.
        duration: seconds from planning to entering.
        host_seconds: by part: `plan`, `launch` (inputs laid out and sent), `device` (waiting for results), `enter`.
        num_decode_tokens, num_prompt_tokens: computed; a preempted request's tokens are prompt tokens when computed again.
        num_padding_tokens: computed for nothing.
        prefix_queries, prefix_hits: known tokens of requests admitted for the first time, and those found in the cache.
        num_non_finite: requests that failed because their logits were not finite.
        compilations_after_warm_up: total so far; must stay 0.
        ranks: after the step.
    """

    time: float
    duration: float
    host_seconds: dict[str, float]
    num_decode_tokens: int
    num_prompt_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_non_finite: int
    compilations_after_warm_up: int
    ranks: list[RankLoad]
    experts: ExpertCounts | None = None


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
