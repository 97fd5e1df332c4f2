"""The shapes of the server's answers, for the code that builds them and for the OpenAPI schema."""

from typing import Any, NotRequired

from typing_extensions import TypedDict  # below Python 3.12 pydantic reads no other, and brings this one


class Usage(TypedDict):
    """Tokens of a request, over all prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Any answer with a status of 400 or more."""

    error: ErrorDetail


class CompletionLogprobs(TypedDict):
    """OpenAI's log-probabilities of `/v1/completions`; `text_offset` counts characters of the completion."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(TypedDict):
    """One completion, or a piece of it; `stop_reason` is vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionResponse(TypedDict):
    """Answer, or chunk, of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class ChatMessageBody(TypedDict):
    """The assistant's message, or the part of it that a chunk adds."""

    role: NotRequired[str]
    content: NotRequired[str]


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


class ChatResponse(TypedDict):
    """Answer, or chunk, of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[Usage | None]


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


class Health(TypedDict):
    """Answer of `/health`."""

    status: str
