"""The shapes of the server's answers, errors among them, for the code that builds them and for the OpenAPI schema."""

import inspect
from typing import Any, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict  # below Python 3.12 pydantic reads no other, and brings this one

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.tiers.page_tiers import TierCounts


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What the completion's tokens are; reasoning with its closing tag."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request, over all prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Any answer with a status of 400 or more."""

    # A model, since FastAPI describes it for each route and status: nearly two hundred times, of which pydantic remembers a model's alone.

    error: ErrorDetail


class CompletionLogprobs(TypedDict):
    """OpenAI's log-probabilities of `/v1/completions`; `text_offset` counts characters of the choice's text.

    With `echo` the prompt's tokens come first; the very first has no value.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One completion, or a piece of it; `stop_reason` and what follows are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionResponse(TypedDict):
    """Answer, or chunk, of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class CalledFunctionBody(TypedDict):
    """A function's name, and its arguments as JSON text; in a chunk what it adds."""

    name: NotRequired[str]
    arguments: str


class ToolCallBody(TypedDict):
    """A call, or with `index` what a chunk adds to it."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunctionBody


class ChatMessageBody(TypedDict):
    """The assistant's message, or the part of it that a chunk adds. The reasoning has both names in use; nothing refuses or annotates."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]
    refusal: NotRequired[None]
    annotations: NotRequired[list[Any]]


class ChatTokenLogprob(TypedDict):
    """One token's log-probability; `bytes` are exact where `token` holds half a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class ChatLogprobs(TypedDict):
    """OpenAI's log-probabilities of `/v1/chat/completions`."""

    content: list[ChatTokenLogprob]


class ChatChoice(TypedDict):
    """One completion: `message` when whole, `delta` in a chunk."""

    index: int
    message: NotRequired[ChatMessageBody]
    delta: NotRequired[ChatMessageBody]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatResponse(TypedDict):
    """Answer, or chunk, of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    service_tier: NotRequired[str]
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]


class ModelCard(TypedDict):
    """One served name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """Answer of `/v1/models`."""

    object: str
    data: list[ModelCard]


class State(TypedDict):
    """Answer of `/health`, `/ready` and of admin endpoints that have nothing to tell."""

    status: str


class HistoryPoint(TypedDict):
    """Sums since the server's start, over all ranks, and the load, as they were `age` seconds ago."""

    age: float
    prompt_tokens: float
    generation_tokens: float
    running: int
    waiting: int


class HistoryBody(TypedDict):
    """Answer of `/history`: points of the last `kept_seconds`, oldest first.

    `buckets_a_minute_ago` has the cumulative counts of the histograms of latencies by upper bound, as they were a minute ago, or at
    the oldest point where that is younger.
    """

    kept_seconds: float
    points: list[HistoryPoint]
    buckets_a_minute_ago: dict[str, dict[str, int]]


class Profiled(TypedDict):
    """Answer of `/stop_profile`. `exchange_share`: of the devices' time in operations, between 0 and 1; None where there was none."""

    status: str
    exchange_share: float | None


class Version(TypedDict):
    """Answer of `/version`."""

    version: str


def _json_object(name: str, description: str, record: type | None = None, **changed: Any) -> type:
    """Make the type of a JSON object, a `TypedDict` of this name in the OpenAPI schema, with the fields of one of the engine's records.

    changed: types of the fields that the record has not, or JSON otherwise; None: JSON has no such field.
    """
    fields = {**(inspect.get_annotations(record) if record else {}), **changed}
    body = TypedDict(name, {field: kind for field, kind in fields.items() if kind is not None})
    body.__doc__ = description
    return body


TierBody = _json_object("HostPages", "What host memory has of a rank's pages.", TierCounts)
DiskBody = _json_object("DiskBody", "What the disk has of all ranks' pages.", DiskCounts)


class TierHits(TypedDict):
    """Tokens that were found cached, by the tier that had them."""

    device: int
    host: int
    disk: int


RankLoadBody = _json_object(
    "RankLoadBody", "What a DP rank has to do.", RankLoad, hits=TierHits, tiers=None, host=TierBody | None
)


class Load(TypedDict):
    """Answer of `/get_load`."""

    ranks: list[RankLoadBody]
    disk: DiskBody | None


BalancednessBody = _json_object(
    "Balancedness", "Mean ÷ max over ranks, as ratio of sums over layers.", before=float, after=float
)


class Rebalance(TypedDict):
    """Answer of `/rebalance_experts`: what begins to move, and the balancedness that is predicted for the window.

    `bytes` reach other slots, on all devices of an EP group; `exchanges`: commands between steps that send them.
    """

    layers: int
    experts: int
    bytes: int
    exchanges: int
    balancedness: BalancednessBody


class Scaled(TypedDict):
    """Answer of `/scale`: the mesh of now, its generation, and for how many seconds no step computed; or, of experts in other processes,
    their side of now, how often that was changed, and how many seconds it took, in which steps went on."""

    generation: int
    mesh: str
    expert_mesh: str | None
    devices: int
    processes: int
    cache_tokens: int
    seconds: float


ExpertLoad = _json_object(
    "ExpertLoad",
    "How tokens reached their experts: a file for `--init-expert-location`, and for the planner's `--expert-skew`.",
    ExpertCounts,
    version=int,
    model=str,
    logical_load=list[list[int]],
    physical_to_logical=list[list[int]],
    tokens_per_expert=list[list[int]],
    rows_sent=list[int],
)


class ServerInfo(TypedDict):
    """Answer of `/server_info`, beside the fields of `EngineFacts`. `options` are the server's, without its keys.

    `admin`: whether the key that came with the request opens the admin endpoints.
    """

    version: str
    models: list[str]
    phase: str
    options: dict[str, Any]
    admin: bool
    ranks: list[RankLoadBody]
    experts: ExpertLoad | None


class Tokens(TypedDict):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """Answer of `/detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Answer of `/tokenizer_info`."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens: dict[str, str]
    chat_template: str | None


class Aborted(TypedDict):
    """Answer of `/abort_request`."""

    aborted: int


_MEANINGS = {
    400: "not JSON, fields that are not those of the schema, or a value that cannot be",
    401: "no valid key",
    403: "admin endpoints are closed",
    404: "no such model, or no such path",
    405: "not this method",
    408: "the request did not arrive in time",
    409: "what is asked for is being done already",
    413: "the body is too large",
    429: "too much waits",
    500: "the engine failed",
    503: "warming up, or shutting down",
}
_ALWAYS = (400, 401, 404, 405, 408, 413)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Make a route's `responses`: the given statuses, and those that any request may get (a bad header, a missing key, no body)."""
    known = {status: _MEANINGS[status] for status in sorted({*_ALWAYS, *statuses})}
    known["default"] = "any other error"  # without it FastAPI adds a 422 of its own, which is never sent
    return {status: {"model": ErrorBody, "description": meaning} for status, meaning in known.items()}
