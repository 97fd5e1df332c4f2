"""The contract between scheduler and runner: what to compute in a step, and what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dsjax.engine.request import Request
from dsjax.engine.stats import RunnerCounts


class ScheduledRow(NamedTuple):
    """Tokens [start, start + length) of `request.token_ids`, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def sampled(self) -> bool:
        """Whether the row reaches the end of the known tokens and so yields the next one (until that is appended)."""
        return self.start + self.length == len(self.request.token_ids)


class RankPlan(NamedTuple):
    """One rank's work in a step. Both lists are empty on an idle rank, which still takes part.

    `decodes` are rows of one token that yield the next one; `prefills` are all other rows.
    """

    decodes: list[ScheduledRow]
    prefills: list[ScheduledRow]

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding not counted."""
        return len(self.decodes) + sum(row.length for row in self.prefills)


class StepPlan(NamedTuple):
    """One step's work: one `RankPlan` for every DP rank, idle ones included."""

    ranks: list[RankPlan]

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to do."""
        return not any(rank.decodes or rank.prefills for rank in self.ranks)


PromptLogprob = tuple[int, float, int, list[tuple[int, float]]]
"""(token, log-probability, its place among all tokens, the most probable tokens with theirs)."""

NO_TOKEN = -1
"""`RowResult.token_id` of a row that is not sampled."""


class RowResult(NamedTuple):
    """What a row yielded. A row that is not sampled has a result only if it is not finite, or gave prompt log-probabilities.

    Attributes:
        token_id: the next token; `NO_TOKEN` for a row that is not sampled.
        logprob: its log-probability under the raw logits; None where the request asked for none.
        top_logprobs: (token, log-probability), most probable first, as many as the request asked for.
        finite: False where the logits held a NaN or an infinity; the request then fails. Said of every row, sampled or not:
            the pages of a row without a result are taken to be finite, and may be shared.
        rank: the token's place among all tokens by probability, 1 for the most probable; None where not computed.
        prompt_logprobs: where asked for, one entry for each prompt token that this row's positions predict: of positions
            [start, start + length) the tokens start + 1 …, as far as the prompt goes. An entry is (token, log-probability,
            its place, [(token, log-probability), …] of the most probable ones).
        error: why the request fails although its logits are finite: its structured output came to no legal token, or cost
            too much. Its pages are as good as any.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    finite: bool = True
    rank: int | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the request ends with this result, without a token."""
        return not self.finite or self.error is not None


@dataclass(frozen=True)
class RunnerLimits:
    """The shapes a runner has room for, all per DP rank. Page 0 of each rank is never allocated."""

    max_rows_decode: int
    max_rows_prefill: int
    max_chunk: int
    page_size: int
    pages_per_rank: int
    num_ranks: int
    max_model_len: int
    vocab_size: int


Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)` between the programs that a runner compiles to warm up. What it raises ends the warm-up."""


class Runner(Protocol):
    """Computes steps. One thread at a time calls it, not always the same one: the server warms up in its main thread and
    then steps in the engine's. Whatever is bound to a thread, such as `jax.set_mesh`, is entered inside each method.
    """

    limits: RunnerLimits

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        """Compute a step; give results by request id: of every row that is `sampled`, and of others as `RowResult` says.

        Of a request whose result is not finite, the pages from `num_sealed_pages` on are zeroed before this returns.
        """

    def launch(self, plan: StepPlan) -> Any:
        """Start a step that is not empty, and return while the device computes it. The plan's requests stay as they are
        until `collect` has returned, except that `pages` may grow. No second step is launched before.
        """

    def collect(self, pending: Any) -> dict[str, RowResult]:
        """Wait for a launched step, and give what `execute` gives."""

    def clear_pages(self, dirty: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Zero pages, given as (rank, its pages). Freed pages must hold finite values: attention weights them by 0."""

    def counts(self) -> RunnerCounts:
        """What the last step did, and what happened since the start."""

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape that `execute` can meet."""

    def shutdown(self) -> None:
        """Give back what the runner holds."""
