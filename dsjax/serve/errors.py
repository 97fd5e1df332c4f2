"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsjax.engine.async_engine import EngineClosingError, EngineDeadError
from dsjax.engine.chat_template import ChatTemplateError
from dsjax.engine.input_processor import PromptError
from dsjax.engine.sampling_params import SamplingError
from dsjax.errors import UserError

_MOST_PROBLEMS = 3


class ApiError(Exception):
    """An answer that is an error. The message is for the client: it holds nothing internal."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def to_api_error(error: Exception) -> ApiError:
    """What the client is told of an exception. One that nobody foresaw is a 500 without details."""
    match error:
        case ApiError():
            return error
        case SamplingError():
            return ApiError(400, str(error), param=error.param)
        case PromptError():
            return ApiError(400, str(error), param="prompt")
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages")
        case UserError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return _from_validation(error)
        case HTTPException():
            kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
            return ApiError(error.status_code, str(error.detail), type=kind)
        case EngineClosingError():
            return ApiError(503, str(error), type="server_error", code="shutting_down")
        case EngineDeadError():
            return ApiError(500, "the engine has failed; the server is going down", type="server_error")
    return ApiError(500, "internal error", type="server_error")


def _from_validation(error: RequestValidationError) -> ApiError:
    """400 for a body that is not JSON, 422 for one whose fields are not those of the schema."""
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        detail = problems[0].get("ctx", {}).get("error", "")
        return ApiError(400, f"the request body is not JSON: {detail}", code="invalid_json")
    messages = []
    for problem in problems[:_MOST_PROBLEMS]:
        path = ".".join(str(part) for part in problem["loc"] if part != "body")
        text = "unknown field; leave it out" if problem["type"] == "extra_forbidden" else problem["msg"]
        messages.append(f"{path}: {text}" if path else text)
    if len(problems) > _MOST_PROBLEMS:
        messages.append(f"and {len(problems) - _MOST_PROBLEMS} more")
    location = [part for part in problems[0]["loc"] if part != "body"]
    return ApiError(422, "; ".join(messages), param=str(location[0]) if location else None)
