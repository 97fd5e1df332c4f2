"""Types of the server's answers and errors, for type checks and the OpenAPI schema."""

import inspect
from typing import Any, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic requires this version of it below Python 3.12

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.tiers.page_tiers import TierCounts


class PromptTokensDetails(TypedDict):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Number of reasoning tokens in the completion, including the closing tag."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of a request, summed over all prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of a response with status 400 or higher."""

    # A pydantic model, because pydantic caches its schema: FastAPI requests it nearly 200 times, for each route and status.

    error: ErrorDetail


class CompletionLogprobs(TypedDict):
    """Log-probabilities of `/v1/completions`, as in OpenAI's API. `text_offset` counts characters in the choice's text.

    With `echo`, the list starts with the prompt tokens. The first prompt token has no log-probability.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """A completion, or its part in a chunk. `stop_reason` and the fields after it are vLLM extensions."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionResponse(TypedDict):
    """Response, or stream chunk, of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class CalledFunctionBody(TypedDict):
    """Function name and arguments as JSON text, or a chunk's addition to them."""

    name: NotRequired[str]
    arguments: str


class ToolCallBody(TypedDict):
    """A tool call, or a chunk's addition to the call at `index`."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunctionBody


class ChatMessageBody(TypedDict):
    """The assistant's message, or a chunk's addition to it. Reasoning has both common names; `refusal` and `annotations` are empty."""

    role: NotRequired[str]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]
    refusal: NotRequired[None]
    annotations: NotRequired[list[Any]]


class ChatTokenLogprob(TypedDict):
    """Log-probability of a token. `bytes` are exact even if `token` is only part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: NotRequired[list[dict[str, Any]]]


class ChatLogprobs(TypedDict):
    """Log-probabilities of `/v1/chat/completions`, as in OpenAI's API."""

    content: list[ChatTokenLogprob]


class ChatChoice(TypedDict):
    """A completion: `message` in a full response, `delta` in a stream chunk."""

    index: int
    message: NotRequired[ChatMessageBody]
    delta: NotRequired[ChatMessageBody]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatResponse(TypedDict):
    """Response, or stream chunk, of `/v1/chat/completions`."""

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
    """A served model name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """Response of `/v1/models`."""

    object: str
    data: list[ModelCard]


class State(TypedDict):
    """Response of `/health`, `/ready` and admin endpoints without other results. `compiling` (`/ready`): larger batches still compile."""

    status: str
    compiling: NotRequired[bool]


class HistoryPoint(TypedDict):
    """Token totals since the start over all ranks, and the load, both `age` seconds ago."""

    age: float
    prompt_tokens: float
    generation_tokens: float
    running: int
    waiting: int


class HistoryBody(TypedDict):
    """Response of `/history`: points of the last `kept_seconds`, oldest first.

    `buckets_a_minute_ago`: cumulative counts of the latency histograms by upper bound, a minute ago or at the oldest point.
    """

    kept_seconds: float
    points: list[HistoryPoint]
    buckets_a_minute_ago: dict[str, dict[str, int]]


class Profiled(TypedDict):
    """Response of `/stop_profile`. `exchange_share`: share of device time in collectives, 0 to 1; null if no operation was traced."""

    status: str
    exchange_share: float | None


class Version(TypedDict):
    """Response of `/version`."""

    version: str


def _json_object(name: str, description: str, record: type, omit: str | None = None, **fields: Any) -> type:
    """Return a `TypedDict` for a JSON object with the fields of an engine record. name: name in the OpenAPI schema.

    omit: field of the record that the object lacks. fields: types of additional fields, and of fields with a different type in JSON.
    """
    types = {**inspect.get_annotations(record), **fields}
    types.pop(omit, None)
    body = TypedDict(name, types)
    body.__doc__ = description
    return body


HostPages = _json_object("HostPages", "KV cache pages of a DP rank in host memory.", TierCounts)
DiskBody = _json_object("DiskBody", "KV cache pages of all DP ranks on disk.", DiskCounts)


class TierHits(TypedDict):
    """Number of cached prompt tokens found in each KV cache tier."""

    device: int
    host: int
    disk: int


RankLoadBody = _json_object(
    "RankLoadBody", "Load of a DP rank.", RankLoad, omit="tiers", hits=TierHits, host=HostPages | None
)


class Load(TypedDict):
    """Response of `/get_load`."""

    ranks: list[RankLoadBody]
    disk: DiskBody | None


class Balancedness(TypedDict):
    """Mean ÷ maximum of the EP ranks' loads, each summed over layers."""

    before: float
    after: float


class Rebalance(TypedDict):
    """Response of `/rebalance_experts`: planned moves and the predicted balancedness for the last window's load.

    `bytes`: size of the moved experts on all devices of an EP group. `exchanges`: number of commands between steps that move them.
    """

    layers: int
    experts: int
    bytes: int
    exchanges: int
    balancedness: Balancedness


class Scaled(TypedDict):
    """Response of `/scale`: the mesh, its epoch (`generation`), the expert processes' mesh (`expert_mesh`, or null), and `seconds`,
    the duration of the change, during which no step ran. A change of expert processes only does not start a new epoch."""

    generation: int
    mesh: str
    expert_mesh: str | None
    devices: int
    processes: int
    cache_tokens: int
    seconds: float


ExpertLoad = _json_object(
    "ExpertLoad",
    "Recorded expert loads: a file for `--init-expert-location`, and for the planner's `--expert-skew`.",
    ExpertCounts,
    version=int,
    model=str,
    logical_load=list[list[int]],
    physical_to_logical=list[list[int]],
    tokens_per_expert=list[list[int]],
    rows_sent=list[int],
)


class ServerInfo(TypedDict):
    """Response of `/server_info`: these fields and those of `EngineFacts`. `options`: the server's options, without API keys.

    `admin`: whether the request's key grants access to the admin endpoints.
    """

    version: str
    models: list[str]
    phase: str
    options: dict[str, Any]
    admin: bool
    ranks: list[RankLoadBody]
    experts: ExpertLoad | None


class Tokens(TypedDict):
    """Response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """Response of `/detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Response of `/tokenizer_info`."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens: dict[str, str]
    chat_template: str | None


class Aborted(TypedDict):
    """Response of `/abort_request`."""

    aborted: int


_MEANINGS = {
    400: "invalid JSON, an unknown field, or an invalid value",
    401: "missing or invalid API key",
    403: "admin endpoints are disabled",
    404: "unknown model or path",
    405: "method not allowed",
    408: "the request did not arrive in time",
    409: "the operation is already running",
    413: "the body is too large",
    429: "too many requests",
    500: "the engine failed",
    503: "warming up or shutting down",
}
_ALWAYS = (400, 401, 404, 405, 408, 413)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`: the given statuses, and those that any request can get (bad header, missing key, no body)."""
    responses = {status: _MEANINGS[status] for status in sorted({*_ALWAYS, *statuses})}
    responses["default"] = "any other error"  # keeps FastAPI from adding a 422, which is never sent
    return {status: {"model": ErrorBody, "description": meaning} for status, meaning in responses.items()}
