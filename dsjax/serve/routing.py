"""Routes with strict JSON parsing, and the middlewares next to the routes: HEAD requests, and direct calls of endpoints.

Only this module relies on how FastAPI and Starlette route a request. Tested with FastAPI 0.165 and Starlette 1.10; pyproject.toml bounds
both.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.engine.schedule.request import RequestOptions
from dsjax.errors import UserError
from dsjax.serve.bounds import MAX_NAME_CHARACTERS
from dsjax.serve.connections import ClientGoneError
from dsjax.serve.errors import ApiError
from dsjax.serve.guards import Guard, replay


def strict_json(body: bytes) -> Any:
    """Parse a body as JSON; refuse NaN, lone surrogates and more than 200 nesting levels.

    Raises:
        ValueError: it is not JSON.
    """
    return pydantic_core.from_json(body, allow_inf_nan=False)


class StrictRequest(Request):
    """A request whose body is parsed by `strict_json`."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            ApiError: it is not JSON.
        """
        try:
            return strict_json(await self.body())
        except ValueError as error:
            raise ApiError(400, f"the request body is not JSON: {error}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """A route that handles requests as `StrictRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a `StrictRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


class HeadRequests(Guard):
    """Lets GET endpoints answer HEAD; the server leaves the body out."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        await self._app(as_get, receive, send)
        scope["route"] = as_get.get("route")  # for `ResponseCounts`


class DirectRoutes(Guard):
    """The innermost middleware. It calls the endpoints of common requests directly, without FastAPI.

    FastAPI's router, exit stacks and headers take more CPU time than the server's own work for a request (docs/performance.md).
    Other requests, including those with an error in headers or body, go to FastAPI, so that error messages come from one place.

    Args:
        routes: routes of `openai_routes`; only POST routes are used.
        answer_error: returns the answer for an exception of an endpoint.
    """

    _ERRORS = (UserError, HTTPException, ClientGoneError)
    """Exceptions with an error response; any other is a bug and propagates."""
    _SESSION, _DP_RANK = b"x-session-affinity", b"x-data-parallel-rank"
    _HEADERS = frozenset({b"content-type", _SESSION, _DP_RANK})

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[APIRoute],
        answer_error: Callable[[Request, Exception], Awaitable[Response]],
    ):
        super().__init__(app)
        self._answer_error = answer_error
        self._endpoints: dict[str, tuple[APIRoute, type[BaseModel]]] = {
            route.path: (route, inspect.signature(route.endpoint).parameters["body"].annotation)
            for route in routes
            if "POST" in route.methods
        }

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a common request; pass on any other."""
        if scope["method"] != "POST" or scope["path"] not in self._endpoints:
            await self._app(scope, receive, send)
            return
        message = await receive()
        route, schema = self._endpoints[scope["path"]]
        parsed = self._parse(scope, message, schema)
        if parsed is None:
            await self._app(scope, replay(message, receive), send)
            return
        body, options = parsed
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(body, request, options)
        except self._ERRORS as error:
            response = await self._answer_error(request, error)
        await response(scope, receive, send)

    def _parse(
        self, scope: Scope, message: Message, schema: type[BaseModel]
    ) -> tuple[BaseModel, RequestOptions] | None:
        """Return a request's body and options; None if FastAPI must handle it. `BodyLimits` sends the body as one message."""
        known_headers = [(name, value) for name, value in scope["headers"] if name in self._HEADERS]
        headers = dict(known_headers)
        session, rank = headers.get(self._SESSION), headers.get(self._DP_RANK)
        if (
            len(headers) < len(known_headers)
            or headers.get(b"content-type", b"").partition(b";")[0] != b"application/json"
            or (session is not None and not 1 <= len(session) <= MAX_NAME_CHARACTERS)
            or (rank is not None and not (rank.isdigit() and len(rank) < 10))
        ):
            return None
        try:
            body = schema.model_validate(strict_json(message.get("body", b"")))
        except ValueError:  # not JSON, or not valid
            return None
        dp_rank = None if rank is None else int(rank)
        return body, RequestOptions(session=session and session.decode("latin-1"), dp_rank=dp_rank)
