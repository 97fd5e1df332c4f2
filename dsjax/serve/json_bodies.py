"""JSON bodies: strict JSON in, JSON that any client reads out."""

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsjax.serve.errors import ApiError


class StrictModel(BaseModel):
    """A request's body or a part of it: JSON types are taken as they are, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StrictRequest(Request):
    """A request whose JSON is JSON: no NaN, no half surrogate pairs, no number without bound, nesting up to 200."""

    async def json(self) -> Any:
        """The body.

        Raises:
            ApiError: it is not JSON.
        """
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the request body is not JSON: {error}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """A route that reads its body as a `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the strict request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


def to_json(body: Any) -> bytes:
    """Compact JSON. A lone surrogate, which a client's escape can smuggle into an error message, becomes `?`."""
    try:
        return pydantic_core.to_json(body)
    except ValueError:  # it refuses lone surrogates
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return to_json(content)


class _ErrorResponse(JsonResponse):
    """Tells the request's log line which error it is."""

    def __init__(self, error: ApiError, headers: Mapping[str, str]):
        super().__init__(error.body(), status_code=error.status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, error: ApiError) -> None:
    """Leave an error's code, or its type where it has no code, in the scope's state, where `RequestLog` reads it."""
    scope.setdefault("state", {})["error"] = error.code or error.type


def error_response(error: ApiError, *, close: bool = False) -> JsonResponse:
    """An error as an answer; `close` ends the connection after it, because the rest of the request will not be read."""
    headers = {**(error.headers or {}), **({"Connection": "close"} if close else {})}
    return _ErrorResponse(error, headers)
