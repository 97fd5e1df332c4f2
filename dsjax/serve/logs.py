"""The process's log on stderr, as text or JSON lines. `RequestLog` in `guards.py` logs requests."""

import datetime
import json
import logging
import sys
from typing import Any

from dsjax.errors import UserError

LEVELS = {"critical": 50, "error": 40, "warning": 30, "info": 20, "debug": 10, "trace": 5}
"""uvicorn's level names; `trace` logs the bytes of connections."""

_OURS = ("dsjax", "sharding", "uvicorn")


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
    for name in _OURS:
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
