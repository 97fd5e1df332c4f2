"""The process's log on stderr, as lines for people or as JSON. `RequestLog` in `guards.py` writes a line for each request."""

import datetime
import json
import logging
import sys
from typing import Any

from dsjax.errors import UserError

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
        """Write one line, whatever the message holds."""
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
