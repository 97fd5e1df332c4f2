"""The process's log on stderr, as text or JSON lines, and `RequestLog`, its access log."""

import datetime
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from dsjax.engine.schedule.request import Request
from dsjax.errors import UserError
from dsjax.serve.connections import CONNECTION_SEND
from dsjax.serve.guards import Guard

access_log = logging.getLogger("dsjax.access")

LEVELS = {"critical": 50, "error": 40, "warning": 30, "info": 20, "debug": 10, "trace": 5}
"""uvicorn's level names; `trace` logs the bytes of connections."""

_OWN_LOGGERS = ("dsjax", "sharding", "uvicorn")
_POLLED_PATHS = frozenset({"/health", "/ready", "/metrics", "/get_load"})
_CLIENT_LEFT = 499  # nginx's status for a client that left; only the log shows it


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Send the process's log to stderr. Loggers of dsjax and uvicorn get `level`, those of other libraries `warning`.

    Raises:
        UserError: the level is unknown.
    """
    if level not in LEVELS:
        raise UserError(f"--log-level is {level!r}, expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(LEVELS[level])


class JsonLines(logging.Formatter):
    """JSON with `time` (ISO 8601, UTC), `level`, `logger`, `message`, the record's `fields`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, even for a message with line breaks."""
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


class RequestLog(Guard):
    """The outermost middleware. It logs each request once its answer has ended, in place of uvicorn's access log.

    It reads `request_id`, `completions` (the core's `Request`s) and `error` (an error's code) from the scope's state. Polled
    paths are logged at level debug whatever their status, since `/ready` returns 503 throughout warm-up.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and log it, even if it fails."""
        started = time.monotonic()
        status = _CLIENT_LEFT
        has_ended = False

        async def send_observed(message: Message) -> None:
            nonlocal status, has_ended
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                has_ended = not message.get("more_body", False)

        state = scope.setdefault("state", {})
        state[CONNECTION_SEND] = send
        try:
            await self._app(scope, receive, send_observed)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED_PATHS else logging.INFO
            if access_log.isEnabledFor(level):
                fields = _request_fields(scope, status if has_ended else _CLIENT_LEFT, time.monotonic() - started)
                fields |= _completion_fields(state.get("completions", ()))
                fields |= {"error": state["error"]} if "error" in state else {}
                access_log.log(level, _log_line(fields), extra={"fields": fields})


def _completion_fields(requests: Sequence[Request]) -> dict[str, Any]:
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


def _request_fields(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    client = scope.get("client")
    return {
        "request_id": scope["state"].get("request_id"),
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
    }


def _log_line(fields: dict[str, Any]) -> str:
    """Return the human-readable log line. The path is quoted so that a request cannot forge log lines."""
    request = f"{fields['method']} {json.dumps(fields['path'])} {fields['status']} in {fields['seconds'] * 1e3:.1f} ms"
    parts = [f"{fields['client']} {request}"]
    if "completions" in fields:
        parts.append(f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)")
        parts.append(f"{fields['output_tokens']} generated")
    if fields.get("first_token_seconds") is not None:
        parts.append(f"first after {fields['first_token_seconds'] * 1e3:.1f} ms")
    if "error" in fields:
        parts.append(f"error {fields['error']}")
    return f"{', '.join(parts)} [{fields['request_id']}]"
