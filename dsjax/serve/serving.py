"""`Serving`: the state that endpoints share: engine, model names, options, admission control, and the running requests."""

import asyncio
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.core import EngineCore
from dsjax.engine.engine_thread import ThreadedEngine
from dsjax.engine.request_streams import OutputStream, RequestStreams
from dsjax.engine.schedule.request import RequestOptions
from dsjax.serve.errors import ApiError
from dsjax.serve.front_ends.link import Links
from dsjax.serve.message_parser import ReasoningParser
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.sampling_fields import SamplingFields
from dsjax.serve.tool_formats import choose_tool_format

if TYPE_CHECKING:  # these import JAX, which a server over fake devices does not need
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.setup.facts import EngineFacts

Answer = TypeVar("Answer")

_CHARACTERS_PER_TOKEN = 4
_RETRY_SECONDS = 2
QUEUE_FULL = "queue_full"


class Phase(enum.Enum):
    """Phases of the server's life."""

    WARMING_UP = "warming up"
    READY = "ready"
    CLOSING = "shutting down"


class QueueGate:
    """Refuses requests before tokenisation while the queue is full.

    The queue consists of the requests that wait in the engine and those between this gate and the engine.
    """

    def __init__(self, engine: RequestStreams | ThreadedEngine, options: ServeOptions):
        self._engine = engine
        self._max_requests = options.max_queued_requests
        self._max_tokens = options.max_queued_tokens
        self._entering_requests = self._entering_tokens = 0

    @contextmanager
    def admit(
        self, prompts: Sequence[str | Sequence[int]], completions: int, reject: Callable[[str, ApiError], ApiError]
    ) -> Iterator[None]:
        """Admit a request or raise. The `with` block tokenises and submits it; afterwards the engine counts it.

        Args:
            completions: completions of each prompt.
            reject: called with the error before it is raised.

        Raises:
            ApiError: 429 with `Retry-After`.
        """
        requests = completions * len(prompts)
        tokens = completions * sum(
            len(prompt) // _CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt) for prompt in prompts
        )
        reason = self.why_full(requests, tokens)
        if reason is not None:
            raise reject(QUEUE_FULL, queue_full(reason))
        self._entering_requests += requests
        self._entering_tokens += tokens
        try:
            yield
        finally:
            self._entering_requests -= requests
            self._entering_tokens -= tokens

    def why_full(self, requests: int, tokens: int) -> str | None:
        """Return why the queue has no room for these requests and tokens; None if it has."""
        # An empty queue takes any request. Otherwise a request larger than the limit would never be admitted.
        # The queue's size is a sum over all ranks, so compute it only if there is a limit.
        if self._max_requests:
            queued_requests, _ = self._engine.waiting
            waiting = queued_requests + self._entering_requests
            if waiting and waiting + requests > self._max_requests:
                return f"{waiting} requests are queued, and the limit is {self._max_requests}"
        if self._max_tokens:
            _, queued_tokens = self._engine.waiting
            waiting = queued_tokens + self._entering_tokens
            if waiting and waiting + tokens > self._max_tokens:
                return f"{waiting:,} tokens are queued, and the limit is {self._max_tokens:,}"
        return None


def queue_full(reason: str) -> ApiError:
    """Return the error for a full queue."""
    message = f"{reason}; try again later"
    return ApiError(429, message, type="rate_limit_error", code=QUEUE_FULL, retry_after=_RETRY_SECONDS)


@dataclass
class Serving:
    """State that all endpoints share. The first of `model_names` is the default model of a request."""

    # an `AsyncEngine`; a `RemoteEngine` in a front end, a `SharedEngine` behind front ends
    engine: RequestStreams | ThreadedEngine
    model_names: Sequence[str]
    model_root: str
    max_model_len: int
    options: ServeOptions = field(default_factory=ServeOptions)
    facts: "EngineFacts | None" = None  # facts of the loaded model; None in tests without a model
    metrics: Metrics | None = None  # counts steps, outputs and refused requests
    orders_by_priority: bool = False  # whether the scheduler orders by `priority`
    phase: Phase = Phase.READY
    compiling: bool = False  # whether programs for larger batches are being compiled while requests are served
    front_ends: Links | None = None  # links to the front ends, if this is the engine process behind them
    on_phase: Callable[[Phase], None] = lambda phase: None  # called with each new phase
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        if self.metrics is not None:
            self.engine.observers.append(self.metrics)
        tokenizer = self.engine.tokenizer
        self.gate = QueueGate(self.engine, self.options)
        self.reasoning = ReasoningParser.choose(self.options.reasoning_parser, tokenizer)
        self.tool_format = choose_tool_format(self.options.tool_call_parser, tokenizer)
        self.expert_counts: ExpertCounts | None = None  # of the last record
        self._streams_by_id: dict[str, list[OutputStream]] = {}

    def enter_phase(self, phase: Phase) -> None:
        """Enter a phase."""
        self.phase = phase
        self.on_phase(phase)

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer.

        Raises:
            ApiError: 404, the server has no such model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            reason = f"the model {name!r} does not exist; available: {', '.join(self.model_names)}"
            raise ApiError(404, reason, type="not_found_error", param="model", code="model_not_found")
        return name

    def with_whitespace(self, form: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add the server's `--disable-any-whitespace` to a form unless the request sets it."""
        return form and {"disable_any_whitespace": self.options.disable_any_whitespace, **form}

    @property
    def state(self) -> str:
        """The phase, or during a change of the mesh its stage."""
        return self.engine.change_under_way or self.phase.value

    def check_running(self) -> None:
        """Raise a 503 while the server warms up or shuts down."""
        if self.engine.error is not None or not self.engine.running or self.phase is not Phase.READY:
            raise ApiError(503, f"the server is {self.phase.value}", type="server_error", code="not_ready")

    def check_admitting(self) -> None:
        """Raise a 503 unless the server admits requests."""
        if self.engine.error is not None:
            raise self.reject("dead", ApiError(503, "the engine has failed", type="server_error"))
        if self.phase is not Phase.READY:
            code = self.phase.value.replace(" ", "_")
            error = ApiError(503, f"the server is {self.phase.value}", type="server_error", code=code, retry_after=5)
            raise self.reject(code, error)

    @contextmanager
    def admitted(
        self, body: SamplingFields, texts: Sequence[str | Sequence[int]], options: RequestOptions
    ) -> Iterator[RequestOptions]:
        """Admit a request to the engine; yield the options to submit it with.

        Args:
            texts: texts or token ids of its prompts.
            options: session and DP rank from the headers.

        Raises:
            ApiError: the server is not ready, the queue is full, or there is no such priority or rank.
        """
        self.check_admitting()
        if body.priority and not self.orders_by_priority:
            reason = "priority needs a server with --scheduling-policy priority"
            raise ApiError(400, reason, param="priority")
        if options.dp_rank is not None and options.dp_rank >= self.engine.num_ranks:
            reason = f"found DP rank {options.dp_rank}, expected 0 to {self.engine.num_ranks - 1}"
            raise ApiError(400, reason, param="X-Data-Parallel-Rank")
        session = body.prompt_cache_key if options.session is None else options.session
        with self.gate.admit(texts, body.n, self.reject):
            yield replace(options, priority=body.priority or 0, cache_salt=body.cache_salt, session=session)

    async def ask(self, function: Callable[[EngineCore], Answer]) -> Answer:
        """Call `function` in the engine's thread between two steps and return its result.

        Raises:
            ApiError: 503, the engine has ended, its mesh is changing, or a step takes too long.
        """
        if self.engine.error is not None or not self.engine.running:
            raise ApiError(503, "the engine is not running", type="server_error", code="not_ready")
        if self.engine.change_under_way is not None:
            reason = f"the mesh is changing: {self.engine.change_under_way}"
            raise ApiError(503, reason, type="server_error", code="changing_mesh", retry_after=_RETRY_SECONDS)
        try:
            async with asyncio.timeout(self.options.request_timeout):
                return await self.engine.call(function)
        except TimeoutError as error:
            raise ApiError(503, "the engine is busy with a step", type="server_error", code="busy") from error

    def on_change(self, generations: "Generations") -> None:
        """Use the facts of the new mesh."""
        self.facts = facts = generations.facts
        self.max_model_len = facts.max_model_len
        if self.metrics is not None:
            self.metrics.on_change(facts.dp_ranks, facts.physical_experts_per_device)

    def reject(self, reason: str, error: ApiError) -> ApiError:
        """Count a rejected request and return the error."""
        if self.metrics is not None:
            self.metrics.on_rejected(reason)
        return error

    @contextmanager
    def followed(self, answer_id: str, stream: OutputStream) -> Iterator[None]:
        """Make an answer abortable by its id inside the `with` block, then close its stream."""
        self._streams_by_id.setdefault(answer_id, []).append(stream)
        try:
            yield
        finally:
            stream.close()
            streams = self._streams_by_id[answer_id]
            streams.remove(stream)
            if not streams:
                del self._streams_by_id[answer_id]

    def abort(self, request_id: str | None) -> int:
        """Abort the requests with this id, or all, and return their number. Their clients get an error.

        request_id: the answer's id (`cmpl-…`, `chatcmpl-…`) or the client's own. None: all requests.
        """
        aborted = [
            stream
            for answer_id, streams in self._streams_by_id.items()
            for stream in streams
            if request_id is None or request_id in (answer_id, answer_id.partition("-")[2])
        ]
        for stream in aborted:
            stream.fail(ApiError(503, "the request was aborted", type="server_error", code="aborted"))
        return len(aborted)
