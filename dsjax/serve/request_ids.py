"""`RequestIds`: every answer carries an `X-Request-ID`, the client's own or a new one."""

import random
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.serve.bounds import MAX_REQUEST_ID_CHARACTERS
from dsjax.serve.errors import ApiError
from dsjax.serve.json_bodies import error_response

_ALLOWED = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
_random = random.Random()  # seeded by the system once; asking it each time is a system call


class RequestIds:
    """ASGI middleware. Sets `scope["state"]["request_id"]`, for answers and logs, and the header on every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            await error_response(ApiError(400, reason, param="X-Request-ID"))(scope, receive, send_with_id)


def new_id() -> str:
    """32 random hexadecimal digits. Nothing is guarded by them: a request is ended by its id with the admin key alone."""
    return f"{_random.getrandbits(128):032x}"


def request_id_of(request: Request, field: str | None) -> str:
    """The id to answer under: the header's, else the body's field, else the one made up."""
    state = request.scope["state"]
    if field is not None and not state["request_id_given"]:
        state["request_id"] = field
    return state["request_id"]
