"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, and in Anthropic's."""

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsjax.engine.contract.sampling_params import SamplingError
from dsjax.engine.schedule.scheduler_config import AdmissionError
from dsjax.engine.text.input_processor import PromptError
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError
from dsjax.engine.text.tokenizer import ChatTemplateError
from dsjax.errors import UserError

_MOST_PROBLEMS = 3
_MOST_CHARACTERS = 1000  # a message may quote a long value of a request
_RETRY_SECONDS = 1
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Error code that makes Anthropic's client send the whole conversation with each request."""


class ApiError(HTTPException):
    """An error response. The client sees the message, so the message must not reveal internals.

    retry_after: seconds for `Retry-After`, which every 429 and 503 has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        message = message if len(message) <= _MOST_CHARACTERS else message[:_MOST_CHARACTERS] + "…"
        super().__init__(status, message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        if retry_after is None and status in (429, 503):
            retry_after = _RETRY_SECONDS
        if retry_after is not None:
            self.headers = {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's form."""
    body = error.body()
    body["error"]["type"] = "api_error" if error.type == "server_error" else error.type
    if error.code == THREAD_UNSUPPORTED:
        body["error"]["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", **body}


def to_api_error(error: Exception) -> ApiError:
    """Return the error to send for an exception. An unexpected one becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case SamplingError():
            return ApiError(400, str(error), param=error.param)
        case PromptError():
            return ApiError(400, str(error), param="prompt")
        case AdmissionError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages")
        case UserError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _from_validation(error)
        case HTTPException():
            return _from_http(error)
        case EngineClosingError():
            return ApiError(503, str(error), type="server_error", code="shutting_down")
        case EngineDeadError():
            return ApiError(500, "the engine has failed; the server is going down", type="server_error")
    return ApiError(500, "internal error", type="server_error")


def _from_http(error: HTTPException) -> ApiError:
    """Convert Starlette's errors for unknown paths and methods."""
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = {404: "there is no such path", 405: "the path does not take this method"}
    answer = ApiError(error.status_code, message.get(error.status_code, str(error.detail)), type=kind)
    answer.headers = {**(error.headers or {}), **(answer.headers or {})}
    return answer


def _from_validation(error: RequestValidationError) -> ApiError:
    """Convert validation errors to a 400, as in OpenAI's API. The message lists the first problems."""
    problems = error.errors()
    first_path = _steps(problems[0]["loc"], error.body)
    if not first_path:
        reason = "the request has no JSON object as its body; send one, with Content-Type: application/json"
        return ApiError(400, reason)
    texts_by_path: dict[str, list[str]] = {}
    for problem in problems:
        text = "unknown field; leave it out" if problem["type"] == "extra_forbidden" else problem["msg"]
        texts = texts_by_path.setdefault(_path(problem["loc"], error.body, problem["type"]), [])
        if text not in texts:
            texts.append(text)
    listed = list(texts_by_path.items())[:_MOST_PROBLEMS]
    sentences = [f"{path}: {' or: '.join(texts[:_MOST_PROBLEMS])}" for path, texts in listed]
    if more := len(texts_by_path) - len(listed):
        sentences.append(f"and {more} more")
    return ApiError(400, "; ".join(sentences), param=str(first_path[0])[:_MOST_CHARACTERS])


def _steps(location: Sequence[str | int], body: Any) -> list[str | int]:
    """Return an error location's path within the body, or the header's name. The name of a body's union branch, if any, is left out."""
    steps = list(location[location[0] in ("body", "header") :])
    has_branch = location[0] == "body" and len(steps) > 1 and isinstance(body, dict) and steps[0] not in body
    return steps[1:] if has_branch else steps


def _path(location: Sequence[str | int], body: Any, error_type: str) -> str:
    """Return the path of a problem in the body, without the names of union branches at any depth: the body has no such keys."""
    path = []
    value = body
    steps = _steps(location, body)
    for index, step in enumerate(steps):
        is_missing_field = error_type == "missing" and index == len(steps) - 1
        is_item = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_item or (isinstance(value, dict) and step in value):
            value = value[step]
        elif path and not is_missing_field:
            continue  # a branch's name
        path.append(str(step))
    return ".".join(path)
