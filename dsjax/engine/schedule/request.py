"""`Request`: one completion in progress. `StepPlan`: the tokens of each request that a step computes."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsjax.addresses import split_address
from dsjax.engine.contract.commands import Command
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.errors import UserError


class Status(enum.Enum):
    """State of a request."""

    WAITING = "waiting"  # in a rank's queue, without pages or a slot
    RUNNING = "running"  # holds a slot, and pages for every known token
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client disconnected, or the server is shutting down
    ERROR = "error"  # see `ErrorKind`


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's options besides its prompt and its sampling parameters.

    Raises:
        UserError: priority is not an integer, salt or session is not text, or `prefill` has no valid address and transfer.
    """

    priority: int = 0  # lower runs first under the `priority` policy
    cache_salt: str | None = None  # only requests with the same salt share pages
    session: str | None = None  # requests of one session go to one DP rank
    # DP rank chosen by an external router, used if the mesh has it; None: the engine's router chooses
    dp_rank: int | None = None
    # address and transfer, if a prefill engine computes the prompt (`PrefillServer.prefill`). Transfer None: a new one
    prefill: Mapping[str, str | None] | None = None

    def __post_init__(self):
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise UserError(f"priority: found {self.priority!r}, expected an integer")
        for name in ("cache_salt", "session"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"{name}: found {getattr(self, name)!r}, expected text")
        if self.prefill is None:
            return
        # The engine's thread opens the connection; an error there would end all requests.
        given = {name: self.prefill.get(name) for name in ("address", "transfer")}
        is_new = "transfer" in self.prefill and given["transfer"] is None
        if not isinstance(given["address"], str) or not (is_new or isinstance(given["transfer"], str)):
            raise UserError(
                f"the prompt is said to be computed elsewhere, by {given}, expected address and transfer as text"
            )
        split_address(given["address"], "the address of a prefill engine")


DEFAULT_OPTIONS = RequestOptions()


@dataclass(slots=True, eq=False)
class Request:
    """One completion. The first group of fields comes from the caller and never changes; only the scheduler writes the second."""

    request_id: str  # unique among unfinished requests
    token_ids: list[int]  # the prompt (`num_prompt_tokens`), then the output, in one append-only list
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int  # `params.max_tokens`; None is resolved to the limit of model and cache
    seed: int  # uint64
    # `params.stop_token_ids`, and the model's end-of-sequence tokens unless `ignore_eos`. `rules` mask them before `params.min_tokens`
    stop_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0  # seconds on the engine's clock
    options: RequestOptions = DEFAULT_OPTIONS
    rules: Any = None  # the `LogitRules` that change the logits before sampling; None: no rules

    # priority in the queue: smaller runs first, larger is preempted first. Unique in a scheduler
    order: tuple[int, float, int] = (0, 0.0, 0)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    rank: int = -1  # its DP rank, fixed unless the mesh changes; -1 before it is assigned
    slot: int = -1  # row of the rank's persistent arrays while running, in [0, max_num_seqs); -1 otherwise
    # number of admissions to a slot. (request, admissions) identifies a slot's contents, since a preempted request may get the same slot
    # again
    admissions: int = 0
    pages: list[int] = field(default_factory=list)  # rank-local, in token order; append-only between two admissions
    # window pages of its pages from index `first_window`, in models that have them. The first is freed when the whole page after it is
    # confirmed: until then a row's window may reach into it, and the request may end at its border
    window_pages: list[int] = field(default_factory=list)
    first_window: int = 0
    missed_window_border: int = 0  # number of pages that its last admission found cached without their last window page
    # cached pages held for a waiting request while a source loads the missing ones
    held_pages: list[int] = field(default_factory=list)
    is_loading: bool = False  # whether to skip a waiting request until a source has loaded its missing pages
    # leading pages that are full, computed and finite: shared and read-only. Later pages belong to this request alone
    num_sealed_pages: int = 0
    page_hashes: list[bytes] = field(default_factory=list)  # names of the full pages of `token_ids`, computed as needed
    num_promised: int = 0  # pages that its rank expects to be cached
    backlog: int = 0  # tokens that its rank still expects to compute before the next output token
    num_computed_tokens: int = 0  # tokens in the cache, confirmed by results
    num_in_flight: int = 0  # most tokens that steps in flight can add to the cache
    num_rows_in_flight: int = 0  # steps in flight with a row of it; until they end it keeps its pages and slot
    num_tokens_due: int = 0  # number of rows in flight that will produce a token
    drafts: Sequence[int] = ()  # the MTP module's next drafts, if rules must check them
    should_preempt: bool = False  # preempt it as soon as no step in flight has a row of it
    # number of its sound pages after non-finite values; its other pages are cleared before reuse
    num_clean_pages: int | None = None
    num_cached_tokens: int | None = None  # prefix cache hit of its first admission, in tokens; None before
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities were returned
    max_total_tokens: int = field(init=False)  # prompt + max_tokens
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self):
        self.set_max_tokens(self.max_tokens)

    def set_max_tokens(self, max_tokens: int) -> None:
        """Set the maximum number of output tokens."""
        self.max_tokens = max_tokens
        self.max_total_tokens = self.num_prompt_tokens + max_tokens

    def reset(self) -> None:
        """Reset placement and computed state for a new executor. Keep tokens and statistics."""
        if self.status is Status.RUNNING:
            self.num_preemptions += 1
        self.status = Status.WAITING
        self.rank = self.slot = -1
        self.pages, self.window_pages, self.held_pages, self.is_loading, self.num_sealed_pages = [], [], [], False, 0
        self.num_promised = self.backlog = 0
        self.num_computed_tokens = self.num_in_flight = self.num_rows_in_flight = self.num_tokens_due = 0
        self.drafts, self.should_preempt, self.num_clean_pages = (), False, None

    def finish(self, reason: FinishReason, now: float) -> None:
        """Mark the request as finished."""
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.finish_time = now

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Return why the token just appended ends the request; None if it does not. Stop strings are checked at detokenization.

        Rules mask stop tokens before `min_tokens`, unless a structured output is complete and allows nothing else.
        """
        if token_id in self.stop_ids and (self.rules is not None or self.num_output_tokens > self.params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_total_tokens else None

    @property
    def num_writable_pages(self) -> int:
        """Number of leading pages with allocated memory: with window pages, up to the last window page."""
        return self.first_window + len(self.window_pages) if self.window_pages else len(self.pages)

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still missing; such a request does not read the prefix cache."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def max_cached_tokens(self) -> int:
        """Maximum tokens that it can have in the cache; the last output token is never computed."""
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)


class ScheduledRow(NamedTuple):
    """Tokens of a request to compute in this step."""

    request: Request
    start: int  # position of the first one, or its upper bound
    length: int  # maximum, with drafts
    sampled: bool = True  # whether the row makes a token


class RankPlan(NamedTuple):
    """One rank's work in a step. An idle rank has no rows and still takes part."""

    decodes: list[ScheduledRow]  # rows that compute a request's last token and make the next one
    prefills: list[ScheduledRow]  # all others
    copies: list[tuple[int, int]]  # of pages (from, to), run first


class StepPlan(NamedTuple):
    """One step's work: one `RankPlan` for every DP rank, including idle ones."""

    ranks: list[RankPlan]
    num_drafts: int = 0  # maximum drafts that a decode row verifies and that are made for the next step
    page_commands: Sequence[Command] = ()  # of page sources; they run first
    after_prompts: int = 0  # drafts made after prompts if `num_drafts` is 0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens that the step computes on all ranks."""
        return sum(row.length for rank in self.ranks for row in rank.prefills)

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to compute. The step may still have page commands."""
        return not any(rank.decodes or rank.prefills for rank in self.ranks)
