"""`Request`: one completion being made. `StepPlan`: which tokens of which requests a step computes."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsjax.addresses import split_address
from dsjax.engine.contract.commands import Command
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.errors import UserError


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # in a rank's queue; holds no page and no slot
    RUNNING = "running"  # holds a slot, and pages for every known token
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client went away, or the server is closing
    ERROR = "error"  # `ErrorKind` says which


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller says of a request beside its prompt and its sampling parameters.

    Attributes:
        priority: lower runs first under the `priority` policy. session: requests of one session go to one DP rank.
        cache_salt: pages are shared only with requests of the same salt.
        dp_rank: DP rank that a router outside has chosen, as long as the mesh has it; None: the engine's own chooses.
        prefill: address and transfer where another process computes the prompt (`PrefillServer.prefill`). A transfer of None is a new one.

    Raises:
        UserError: a priority that is no integer, a salt or session that is no text, or `prefill` names no prefill engine.
    """

    priority: int = 0
    cache_salt: str | None = None
    session: str | None = None
    dp_rank: int | None = None
    prefill: Mapping[str, str | None] | None = None

    def __post_init__(self):
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise UserError(f"priority: found {self.priority!r}, expected an integer")
        for name in ("cache_salt", "session"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"{name}: found {getattr(self, name)!r}, expected text")
        if self.prefill is None:
            return
        # The engine's thread connects to it, which an error there would end for all requests.
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
    """One completion. The first group of fields is the caller's and never changes; the second is written by the scheduler alone.

    Attributes:
        request_id: unique among unfinished requests. seed: uint64. arrival_time: seconds on the engine's clock.
        token_ids: the prompt (`num_prompt_tokens`), then the output, in one list that only grows at its end.
        max_tokens: `params.max_tokens`, with None resolved to what model and cache hold. max_total_tokens: these and the prompt's.
        stop_ids: `params.stop_token_ids`, and the model's end-of-sequence tokens unless `ignore_eos`. `rules` hold them back before
            `params.min_tokens`.
        rules: the `LogitRules` that change its logits before a token is taken; None: nothing does.
        order: place in the queue: smaller runs first, larger is preempted first. Unique in a scheduler.
        rank: number of its DP rank, for its whole life unless the mesh changes; -1 before.
        slot: row of the rank's persistent arrays while running, in [0, max_num_seqs); -1 otherwise.
        admissions: counts admissions to a slot. (request, admissions) identifies a slot's contents: a preempted request may come back to
            its slot.
        pages: rank-local, in the order of the tokens; between two admissions the list only grows at its end.
        window_pages: of a model that has them: those of its pages from number `first_window` on. The first is given back when a whole page
            behind it is confirmed: until then a row's window may reach into it, and the request may end at its border.
        missed_border: how many pages its last admission found cached, where their last window page was not.
        held_pages: cached pages that are held for a waiting request while pages that it lacks are loaded from a source.
        is_loading: whether a waiting request need not be looked at before a source has brought what it lacks.
        num_sealed_pages: full, computed and finite pages, from the first: others may read them, and nobody writes them. Later ones are its
            own.
        page_hashes: names of the full pages of `token_ids`, as far as they were needed. num_promised: those that its rank expects to be
            cached.
        backlog: tokens that its rank counts as still to be computed before its next one is made.
        num_computed_tokens: of `token_ids` in the cache, as results have confirmed. num_in_flight: the most that steps under way can add.
        num_rows_under_way: steps under way that have a row of it; meanwhile pages and slot stay its own. num_due: rows that make a token.
        drafts: what the MTP module proposes next, where rules have to check it.
        must_leave: it is to be preempted as soon as no step has a row of it.
        num_clean_pages: of a request whose values are not finite, its sound pages; all others are cleared before anybody else gets them.
        num_cached_tokens: that its first admission found in the prefix cache; None before.
        num_prompt_logprobs: tokens of the prompt after the first whose log-probabilities were given.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    options: RequestOptions = DEFAULT_OPTIONS
    rules: Any = None

    order: tuple[int, float, int] = (0, 0.0, 0)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    rank: int = -1
    slot: int = -1
    admissions: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    first_window: int = 0
    missed_border: int = 0
    held_pages: list[int] = field(default_factory=list)
    is_loading: bool = False
    num_sealed_pages: int = 0
    page_hashes: list[bytes] = field(default_factory=list)
    num_promised: int = 0
    backlog: int = 0
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_rows_under_way: int = 0
    num_due: int = 0
    drafts: Sequence[int] = ()
    must_leave: bool = False
    num_clean_pages: int | None = None
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 0
    max_total_tokens: int = field(init=False)
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self):
        self.set_max_tokens(self.max_tokens)

    def set_max_tokens(self, max_tokens: int) -> None:
        """Change how many tokens it makes at most."""
        self.max_tokens = max_tokens
        self.max_total_tokens = self.num_prompt_tokens + max_tokens

    def reset(self) -> None:
        """Forget where the request ran and what was computed, since the executor is made anew. Its tokens and its statistics stay."""
        if self.status is Status.RUNNING:
            self.num_preemptions += 1
        self.status = Status.WAITING
        self.rank = self.slot = -1
        self.pages, self.window_pages, self.held_pages, self.is_loading, self.num_sealed_pages = [], [], [], False, 0
        self.num_promised = self.backlog = 0
        self.num_computed_tokens = self.num_in_flight = self.num_rows_under_way = self.num_due = 0
        self.drafts, self.must_leave, self.num_clean_pages = (), False, None

    def finish(self, reason: FinishReason, now: float) -> None:
        """End for this reason."""
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.finish_time = now

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Whether the token just appended ends the request. Stop strings are found later, where the text is made.

        Rules hold stop tokens back before `min_tokens`, except where a structured output is complete and allows nothing else.
        """
        if token_id in self.stop_ids and (self.rules is not None or self.num_output_tokens > self.params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_total_tokens else None

    @property
    def num_writable_pages(self) -> int:
        """How many of its pages, from the first, it may write as far as it has room for: with window pages, as far as it has those."""
        return self.first_window + len(self.window_pages) if self.window_pages else len(self.pages)

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens made so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were made so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be given; then it reads nothing from the prefix cache."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that it can ever have in the cache: its last one is never computed."""
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)


class ScheduledRow(NamedTuple):
    """Tokens of a request to be computed in this step.

    start: position of the first one, or the most that it can be. length: at most, with drafts. sampled: whether the row makes a token.
    """

    request: Request
    start: int
    length: int
    sampled: bool = True


class RankPlan(NamedTuple):
    """One rank's work in a step; both lists are empty on an idle rank, which still takes part.

    decodes: rows that compute a request's last token and make the next one. prefills: all others. copies: of pages (from, to), before.
    """

    decodes: list[ScheduledRow]
    prefills: list[ScheduledRow]
    copies: list[tuple[int, int]]


class StepPlan(NamedTuple):
    """One step's work: one `RankPlan` for every DP rank, idle ones included.

    num_drafts: most that a decode row verifies, and that are made for the next step. page_commands: go before all else, for page sources.
    after_prompts: drafts that are made after prompts where `num_drafts` is 0.
    """

    ranks: list[RankPlan]
    num_drafts: int = 0
    page_commands: Sequence[Command] = ()
    after_prompts: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts that the step computes on all ranks."""
        return sum(row.length for rank in self.ranks for row in rank.prefills)

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to compute. Pages may have to be moved all the same."""
        return not any(rank.decodes or rank.prefills for rank in self.ranks)
