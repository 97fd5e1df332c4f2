"""Bodies in and out: bounded in size and time, strict JSON in, JSON that any client reads out."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.serve.errors import ApiError
from dsjax.serve.options import ServeOptions


class BodyLimits:
    """ASGI middleware. Reads the whole body before anything else sees the request, within bounds of bytes and seconds.

    A body that is half sent therefore holds nothing but its own bytes. What comes after the body, a disconnect, is passed on.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions):
        self._app = app
        self._most_bytes = options.max_body_bytes
        self._seconds = options.request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            reason = f"the request did not arrive within {self._seconds:g} seconds"
            await error_response(ApiError(408, reason, code="request_timeout"), close=True)(scope, receive, send)
            return
        except ApiError as error:
            await error_response(error, close=True)(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._most_bytes:
            raise self._too_large()
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server's {self._most_bytes:,} bytes", code="body_too_large")


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


def error_response(error: ApiError, *, close: bool = False) -> JsonResponse:
    """An error as an answer; `close` ends the connection after it, because the rest of the request will not be read."""
    headers = {**(error.headers or {}), **({"Connection": "close"} if close else {})}
    return JsonResponse(error.body(), status_code=error.status, headers=headers)
