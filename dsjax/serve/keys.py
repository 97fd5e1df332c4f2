"""`Keys`: who may ask for what, by bearer key."""

import base64
import binascii
import contextlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsjax.serve.errors import ApiError
from dsjax.serve.json_bodies import error_response
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
    }
)
_OPEN_PATHS = frozenset({"/health"})


class Keys:
    """ASGI middleware. Refuses a request before its body is read, unless its key opens its path.

    Everything but `/health` wants a key once there are any; a path that does not exist too, so that nothing can be probed.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions):
        self._app = app
        self._admin = options.admin_api_key.encode() if options.admin_api_key else None
        self._keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request on."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"].rstrip("/") or "/"
        if path in _OPEN_PATHS:
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
        given = _given_key(Headers(scope=scope).get("authorization", ""), scope["method"])
        # Every key is compared, each in constant time: how long it takes tells nothing about how near a guess was.
        matches = [hmac.compare_digest(given, key) for key in accepted]
        if given and any(matches):
            return None
        reason = "no valid key was given; send one as Authorization: Bearer KEY"
        refusal = ApiError(401, reason, type="authentication_error", code="invalid_api_key")
        # A browser that is shown the page asks its user for the key as a password.
        refusal.headers = {"WWW-Authenticate": 'Basic realm="dsjax"' if path in PAGE_PATHS else "Bearer"}
        return refusal


def _given_key(authorization: str, method: str) -> bytes:
    """The key that a header gives; empty for none.

    A browser cannot be told to send a bearer key with the page itself, so what only reads also takes the key as the password of
    basic authentication. What changes something does not: a browser would send it along for any other site.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() == "basic" and method in ("GET", "HEAD"):
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(value.strip().encode(), validate=True).partition(b":")[2]
    return b""
