"""Where a command writes what it found: tables on the console; JSON, pictures and pages where the user says."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from dsjax.errors import UserError

FILE_COLUMNS = 140
"""Columns of tables in a file or a pipe. rich would take 80 there, and cut the figures of wide tables."""


def write_json(where: str | Path, body: Any) -> None:
    """Write indented JSON to a file, or for `-` to standard output.

    Raises:
        UserError: the file cannot be written.
        ValueError: `body` holds a number that JSON cannot.
    """
    text = json.dumps(body, indent=2, allow_nan=False) + "\n"
    if str(where) == "-":
        sys.stdout.write(text)
        return
    with writing(where):
        Path(where).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """While `path` is written.

    Raises:
        UserError: it cannot be; also for a picture whose kind its name does not tell.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file") from error
    except ValueError as error:
        if "is not supported" not in str(error):  # matplotlib, of a file name's end that it does not know
            raise
        raise UserError(f"cannot write {path}: {error}") from error


def report_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe of `FILE_COLUMNS` columns, unless `COLUMNS` says otherwise."""
    stream = sys.stderr if stderr else sys.stdout
    wide = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if wide else FILE_COLUMNS)
