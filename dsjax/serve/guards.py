"""ASGI middlewares that run before a request's route: response counter, request id, API keys, body limits.

`create_app` adds them to the application.
"""

import asyncio
import base64
import binascii
import contextlib
import hmac
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Set

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.serve.bounds import MAX_REQUEST_ID_CHARACTERS
from dsjax.serve.connections import error_response
from dsjax.serve.errors import ApiError
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.page.routes import PAGE_PATHS

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
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
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


def replay(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that first returns `message`, then the messages of the given `receive`."""
    messages = [message]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next


class ResponseCounts(Guard):
    """Counts answers by the path of their route; answers without a route count under `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        super().__init__(app)
        self._metrics = metrics

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its answer when it begins."""
        has_started = False

        async def send_counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            if not has_started:
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
        header = Headers(scope=scope).get("x-request-id")
        is_valid = header is None or _REQUEST_ID.fullmatch(header) is not None
        request_id = header if header is not None and is_valid else new_id()
        scope.setdefault("state", {}).update(request_id=request_id, has_request_id_header=header is not None)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Request-ID", scope["state"]["request_id"])
            await send(message)

        if is_valid:
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
    if field is not None and not state["has_request_id_header"]:
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
        self._admin_key = options.admin_api_key.encode() if options.admin_api_key else None
        self._keys = [key.encode() for key in options.api_keys]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with a valid key."""
        headers = Headers(scope=scope)
        key = _authorization_key(headers.get("authorization", ""), scope["method"])
        key = key or headers.get("x-api-key", "").encode()  # sent by Anthropic's clients
        scope.setdefault("state", {})["admin"] = self._admin_key is not None and hmac.compare_digest(
            key, self._admin_key
        )
        refusal = self._check(scope, key)
        await (self._app if refusal is None else error_response(scope, refusal))(scope, receive, send)

    def _check(self, scope: Scope, key: bytes) -> ApiError | None:
        """Return the error for a request with this key; None: the key is accepted."""
        path = scope["path"].rstrip("/") or "/"
        if path in self._open_paths:
            return None
        if path in ADMIN_PATHS:
            if self._admin_key is None:
                reason = "the admin endpoints are disabled: the server was started without --admin-api-key"
                return ApiError(403, reason, type="permission_error", code="admin_closed")
            accepted_keys = [self._admin_key]
        elif not self._keys:
            return None
        else:
            accepted_keys = [*self._keys, *([self._admin_key] if self._admin_key else [])]
        # Compare with every key in constant time, so that the time reveals nothing.
        matches = [hmac.compare_digest(key, accepted_key) for accepted_key in accepted_keys]
        if key and any(matches):
            return None
        reason = "missing or invalid API key; send it as Authorization: Bearer KEY"
        refusal = ApiError(401, reason, type="authentication_error", code="invalid_api_key")
        # With Basic, a browser asks its user for the key as a password.
        refusal.headers = {"WWW-Authenticate": 'Basic realm="dsjax"' if path in PAGE_PATHS else "Bearer"}
        return refusal


def _authorization_key(authorization: str, method: str) -> bytes:
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
        self._max_bytes = options.max_body_bytes
        self._timeout = options.request_timeout

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
        await self._app(scope, replay(message, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client leaves before its end."""
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        parts = []
        size = 0
        has_more = True
        try:
            async with asyncio.timeout(self._timeout):
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_bytes:
                        raise self._too_large()
                    has_more = message.get("more_body", False)
        except TimeoutError as error:
            reason = f"the request body did not arrive within {self._timeout:g} seconds"
            raise ApiError(408, reason, code="request_timeout") from error
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server's {self._max_bytes:,} bytes", code="body_too_large")
