"""ASGI middlewares that run before a request's route: access log, response counter, request id, API keys, body limits.

`create_app` adds them to the application, and `Server` adds `RequestLog` as the outermost. The innermost, `UsualRequests`, calls endpoints
directly. Only this module relies on how FastAPI and Starlette route a request (`StrictRoute`, `UsualRequests`, the route in a request's
scope). Tested with FastAPI 0.165 and Starlette 1.10; pyproject.toml bounds both.
"""

import asyncio
import base64
import binascii
import contextlib
import hmac
import inspect
import json
import logging
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.engine.schedule.request import Request as EngineRequest
from dsjax.engine.schedule.request import RequestOptions
from dsjax.errors import UserError
from dsjax.serve.bounds import MAX_NAME_CHARACTERS, MAX_REQUEST_ID_CHARACTERS
from dsjax.serve.connections import CONNECTION_SEND, ClientGoneError, error_response
from dsjax.serve.errors import ApiError
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.page.routes import PAGE_PATHS

access_log = logging.getLogger("dsjax.access")

_QUIET = frozenset({"/health", "/ready", "/metrics", "/get_load"})
_CLIENT_LEFT = 499  # nginx's status for a client that left; only the log shows it
ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/start_profile",
        "/stop_profile",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
        "/rebalance_experts",
        "/scale",
    }
)
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key, for load balancers."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ALLOWED = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
_random = random.Random()  # not `secrets`, which makes a system call each time


class Guard(ABC):
    """An ASGI middleware for HTTP requests; other events pass through."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; pass on anything else."""
        await (self.handle if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""


class RequestLog(Guard):
    """The outermost middleware. It logs each request once its answer has ended, in place of uvicorn's access log.

    It reads `request_id`, `completions` (the core's `Request`s) and `error` (an error's code) from the scope's state. Polled
    paths are logged at level debug whatever their status, since `/ready` returns 503 throughout warm-up.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and log it, even if it fails."""
        begun = time.monotonic()
        status = _CLIENT_LEFT
        ended = False

        async def watched(message: Message) -> None:
            nonlocal status, ended
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)

        state = scope.setdefault("state", {})
        state[CONNECTION_SEND] = send
        try:
            await self._app(scope, receive, watched)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if access_log.isEnabledFor(level):
                fields = _fields(scope, status if ended else _CLIENT_LEFT, time.monotonic() - begun)
                fields |= of_completions(state.get("completions", ()))
                fields |= {"error": state["error"]} if "error" in state else {}
                access_log.log(level, _sentence(fields), extra={"fields": fields})


def of_completions(requests: Sequence[EngineRequest]) -> dict[str, Any]:
    """Return the log's fields about a request's completions; empty if it has none.

    `output_tokens` counts generated tokens, which may be a few more than the answer contains after a stop string cuts it.
    """
    if not requests:
        return {}
    arrival = requests[0].arrival_time
    scheduled = min((r.first_scheduled_time for r in requests if r.first_scheduled_time is not None), default=None)
    first = min((r.first_token_time for r in requests if r.first_token_time is not None), default=None)
    return {
        "completions": len(requests),
        "prompt_tokens": sum(r.num_prompt_tokens for r in requests),
        "cached_tokens": sum(r.num_cached_tokens or 0 for r in requests),
        "output_tokens": sum(r.num_output_tokens for r in requests),
        "queue_seconds": None if scheduled is None else round(scheduled - arrival, 6),
        "first_token_seconds": None if first is None else round(first - arrival, 6),
        "preemptions": sum(r.num_preemptions for r in requests),
        "ranks": sorted({r.rank for r in requests if r.rank >= 0}),
    }


def _fields(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    client = scope.get("client")
    return {
        "request_id": scope["state"].get("request_id"),
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
    }


def _sentence(fields: dict[str, Any]) -> str:
    """Return the human-readable log line. The path is quoted so that a request cannot forge log lines."""
    request = f"{fields['method']} {json.dumps(fields['path'])} {fields['status']} in {fields['seconds'] * 1e3:.1f} ms"
    parts = [f"{fields['client']} {request}"]
    if "completions" in fields:
        parts.append(f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)")
        parts.append(f"{fields['output_tokens']} made")
    if fields.get("first_token_seconds") is not None:
        parts.append(f"first after {fields['first_token_seconds'] * 1e3:.1f} ms")
    if "error" in fields:
        parts.append(f"error {fields['error']}")
    return f"{', '.join(parts)} [{fields['request_id']}]"


def beginning_with(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that first returns `message`, then the messages of the given `receive`."""
    messages = [message]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


class ResponseCounts(Guard):
    """Counts answers by the path of their route; answers without a route count under `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        super().__init__(app)
        self._metrics = metrics

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its answer when it begins."""
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                self._count(scope, 500)  # an outer Starlette middleware answers 500
            raise

    def _count(self, scope: Scope, status: int) -> None:
        if scope.get("state", {}).get("forwarded"):
            return  # the engine's process counts it
        path = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"  # clients can invent methods
        self._metrics.on_response(path, method, status)


class RequestIds(Guard):
    """Sets `scope["state"]["request_id"]` for answers and logs, and `X-Request-ID` on every answer."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its id."""
        given = Headers(scope=scope).get("x-request-id")
        usable = given is None or _ALLOWED.fullmatch(given) is not None
        request_id = given if given is not None and usable else new_id()
        scope.setdefault("state", {}).update(request_id=request_id, request_id_given=given is not None)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Request-ID", scope["state"]["request_id"])
            await send(message)

        if usable:
            await self._app(scope, receive, send_with_id)
        else:
            reason = f"X-Request-ID is not 1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters without blanks"
            error = ApiError(400, reason, param="X-Request-ID")
            await error_response(scope, error)(scope, receive, send_with_id)


def new_id() -> str:
    """Return 32 random hexadecimal digits. They need not be secret: aborting a request by its id requires the admin key."""
    return f"{_random.getrandbits(128):032x}"


def request_id_of(request: Request, field: str | None) -> str:
    """Return the request id: from the header, else from the body's field, else generated."""
    state = request.scope["state"]
    if field is not None and not state["request_id_given"]:
        state["request_id"] = field
    return state["request_id"]


class Keys(Guard):
    """Refuses requests without a valid key before their body is read.

    If the server has keys, all paths except `open_paths` need one, even unknown paths, so that clients cannot probe for paths. Sets
    `scope["state"]["admin"]`: whether the key is the admin key.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, open_paths: Set[str] = OPEN_PATHS):
        super().__init__(app)
        self._open_paths = open_paths
        self._admin = options.admin_api_key.encode() if options.admin_api_key else None
        self._keys = [key.encode() for key in options.api_keys]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with a valid key."""
        headers = Headers(scope=scope)
        given = _given_key(headers.get("authorization", ""), scope["method"])
        given = given or headers.get("x-api-key", "").encode()  # sent by Anthropic's clients
        scope.setdefault("state", {})["admin"] = self._admin is not None and hmac.compare_digest(given, self._admin)
        refusal = self._refusal(scope, given)
        await (self._app if refusal is None else error_response(scope, refusal))(scope, receive, send)

    def _refusal(self, scope: Scope, given: bytes) -> ApiError | None:
        path = scope["path"].rstrip("/") or "/"
        if path in self._open_paths:
            return None
        if path in ADMIN_PATHS:
            if self._admin is None:
                reason = "admin endpoints are closed on this server; it was started without --admin-api-key"
                return ApiError(403, reason, type="permission_error", code="admin_closed")
            accepted = [self._admin]
        elif not self._keys:
            return None
        else:
            accepted = [*self._keys, *([self._admin] if self._admin else [])]
        # Compare with every key in constant time, so that the time reveals nothing.
        matches = [hmac.compare_digest(given, key) for key in accepted]
        if given and any(matches):
            return None
        reason = "no valid key was given; send one as Authorization: Bearer KEY"
        refusal = ApiError(401, reason, type="authentication_error", code="invalid_api_key")
        # With Basic, a browser asks its user for the key as a password.
        refusal.headers = {"WWW-Authenticate": 'Basic realm="dsjax"' if path in PAGE_PATHS else "Bearer"}
        return refusal


def _given_key(authorization: str, method: str) -> bytes:
    """Return the key in an Authorization header; empty: none.

    A browser cannot send a bearer key when it opens the page, so GET and HEAD also accept the key as a Basic password. Other
    methods do not, because a browser would add the password to requests from other sites (CSRF).
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic" and method in ("GET", "HEAD"):
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(value.strip().encode(), validate=True).partition(b":")[2]
    return b""


class BodyLimits(Guard):
    """Reads the whole body, within limits on size and time, before passing the request on.

    An unfinished body thus costs no more than its own bytes. A disconnect after the body is passed on.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions):
        super().__init__(app)
        self._most_bytes = options.max_body_bytes
        self._seconds = options.request_timeout

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on once its body is complete."""
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error_response(scope, error, close=True)(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        message = {"type": "http.request", "body": body, "more_body": False}
        await self._app(scope, beginning_with(message, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client leaves before its end."""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._most_bytes:
            raise self._too_large()
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._most_bytes:
                        raise self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError as error:
            reason = f"the request did not arrive within {self._seconds:g} seconds"
            raise ApiError(408, reason, code="request_timeout") from error
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server's {self._most_bytes:,} bytes", code="body_too_large")


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


class UsualRequests(Guard):
    """The innermost middleware. It calls the endpoints of common requests directly, without FastAPI.

    FastAPI's router, exit stacks and headers take more CPU time than the server's own work for a request (docs/performance.md).
    Other requests, including those with an error in headers or body, go to FastAPI, so that error messages come from one place.

    Args:
        routes: routes of `openai_routes`; only POST routes are used.
        answer_error: returns the answer for an exception of an endpoint.
    """

    _ERRORS = (UserError, HTTPException, ClientGoneError)
    """Exceptions with an error response; any other is a bug and propagates."""
    _SESSION, _RANK = b"x-session-affinity", b"x-data-parallel-rank"
    _READ = frozenset({b"content-type", _SESSION, _RANK})

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
        usual = self._read(scope, message, schema)
        if usual is None:
            await self._app(scope, beginning_with(message, receive), send)
            return
        body, options = usual
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(body, request, options)
        except self._ERRORS as error:
            response = await self._answer_error(request, error)
        await response(scope, receive, send)

    def _read(self, scope: Scope, message: Message, schema: type[BaseModel]) -> tuple[BaseModel, RequestOptions] | None:
        """Return a request's body and options; None if FastAPI must handle it. `BodyLimits` sends the body as one message."""
        given = [(name, value) for name, value in scope["headers"] if name in self._READ]
        headers = dict(given)
        session, rank = headers.get(self._SESSION), headers.get(self._RANK)
        if (
            len(headers) < len(given)
            or headers.get(b"content-type", b"").partition(b";")[0] != b"application/json"
            or (session is not None and not 1 <= len(session) <= MAX_NAME_CHARACTERS)
            or (rank is not None and not (rank.isdigit() and len(rank) < 10))
        ):
            return None
        try:
            body = schema.model_validate(strict_json(message.get("body", b"")))
        except ValueError:  # not JSON, or not valid
            return None
        place = RequestOptions(
            session=session and session.decode("latin-1"), dp_rank=None if rank is None else int(rank)
        )
        return body, place
