"""What the server logs: the process's log on stderr, and in it one line for each request.

A request's line has its id, its status, its tokens and how long it took.
"""

import datetime
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.engine.schedule.request import Request
from dsjax.errors import UserError

logger = logging.getLogger("dsjax.access")

CONNECTION_SEND = "connection_send"
"""Key in a scope's state of the connection's own `send`, which no middleware sees."""

_QUIET = frozenset({"/health", "/ready", "/metrics", "/get_load"})
_CLIENT_LEFT = 499  # nginx's number; nobody gets it

LEVELS = {"critical": 50, "error": 40, "warning": 30, "info": 20, "debug": 10, "trace": 5}
"""uvicorn's names; `trace` shows the bytes of connections."""

_OURS = ("dsjax", "sharding", "uvicorn")


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Send the whole process's log to stderr in one form. Our own and uvicorn's loggers take `level`, libraries' only warnings.

    Raises:
        UserError: no such level.
    """
    if level not in LEVELS:
        raise UserError(f"--log-level is {level!r}, expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(LEVELS[level])


class JsonLines(logging.Formatter):
    """`time` (ISO 8601, UTC), `level`, `logger`, `message`, the record's `fields`, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        created = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": created.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RequestLog:
    """ASGI middleware, the first to see a request. Writes when its answer has ended, in place of uvicorn's access log.

    Reads `request_id`, `completions` (the core's `Request`s) and `error` (an error's code) from the scope's state, where those who
    handle the request put them. What is polled all the time is written at level debug, whatever the answer: `/ready` is 503
    for as long as the server warms up.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, then write its line, however it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            if logger.isEnabledFor(level):
                fields = _fields(scope, status if ended else _CLIENT_LEFT, time.monotonic() - begun)
                fields |= of_completions(state.get("completions", ()))
                fields |= {"error": state["error"]} if "error" in state else {}
                logger.log(level, _sentence(fields), extra={"fields": fields})


def of_completions(requests: Sequence[Request]) -> dict[str, Any]:
    """Tokens and times of a request's completions; empty where it has none.

    `output_tokens` counts what the model made, which may be a token or two more than a stop string let through.
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
    """For people. A client chooses the path, so it is quoted: no request can begin a line of its own."""
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
