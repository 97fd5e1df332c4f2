"""Output of commands: tables on the console; JSON, pictures and pages in files that the user names."""

import contextlib
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dsjax.errors import UserError

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

JsonFile = Annotated[str | None, typer.Option("--json", help="Write JSON to this file instead; - for standard output.")]
"""Option of a command that prints tables or writes their contents as JSON."""

FILE_COLUMNS = 140
"""Console width for a file or a pipe. rich's default there is 80, which truncates the figures of wide tables."""


def write_json(where: str | Path, body: Any, *, private: bool = False) -> None:
    """Write indented JSON to a file, or to standard output for `-`. private: only the owner can read the file (mode 0600).

    Raises:
        UserError: the file cannot be written.
        ValueError: `body` contains NaN or infinity.
    """
    text = json.dumps(body, indent=2, allow_nan=False) + "\n"
    if str(where) == "-":
        sys.stdout.write(text)
        return
    with writing(where):
        if not private:
            Path(where).write_text(text, encoding="utf-8")
            return
        with open(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)  # an existing file may be readable by others
            file.write(text)


@contextlib.contextmanager
def writing(path: str | Path, kind: str = "file") -> Iterator[None]:
    """Turn errors of the block, which writes the file or folder `path`, into user errors.

    Raises:
        UserError: `path` cannot be written, or is a picture with an unsupported file extension.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another {kind}") from error
    except ValueError as error:
        if "is not supported" not in str(error):  # matplotlib's message for an unknown file extension
            raise
        raise UserError(f"cannot write {path}: {error}") from error


def report_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `FILE_COLUMNS` wide for a file or a pipe unless `COLUMNS` is set."""
    stream = sys.stderr if stderr else sys.stdout
    wide = stream.isatty() or "COLUMNS" in os.environ
    return ReportConsole(stderr=stderr, width=None if wide else FILE_COLUMNS)


class ReportConsole(Console):
    """A console that never truncates figures: a table that is too wide is drawn compactly, then split into several tables.

    Each part repeats the key columns: the first column and the left-justified or bold columns that follow it, as far as they fit
    half of the width. A word is broken across lines only if its column allows it (`overflow="fold"`). rich itself would shrink
    columns to nothing, or truncate figures to `0.…`.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, with each table fitted to the width."""
        if not any(isinstance(each, Table) for each in objects):
            super().print(*objects, **options)
            return
        for each in objects:
            for part in fitted(each, options.get("width") or self.width) if isinstance(each, Table) else (each,):
                super().print(part, **options)


_MOST_WRAPPED = 24
"""Text columns may wrap, but not to fewer characters than this unless their text is shorter."""


def fitted(table: Table, width: int) -> list[Table]:
    """Return the table, or several tables with some of its columns each, that fit `width` terminal columns."""
    widths = [_width(column) for column in table.columns]
    if _fits(table, widths, width):
        return [table]
    close = _part(table, range(len(table.columns)))
    if _fits(close, widths, width):
        return [close]
    keys = 1
    while (
        keys < len(table.columns) - 1
        and (table.columns[keys].justify == "left" or table.columns[keys].style == "bold")
        and _fits(_part(table, range(keys + 1)), widths[: keys + 1], width // 2)
    ):
        keys += 1
    parts: list[list[int]] = [list(range(keys))]
    for index in range(keys, len(table.columns)):
        wider = [*parts[-1], index]
        if len(parts[-1]) > keys and not _fits(_part(table, wider), [widths[i] for i in wider], width):
            parts.append(list(range(keys)))
        parts[-1].append(index)
    made = [_part(table, part) for part in parts]
    for part in made[1:]:
        part.title = None
    for part in made[:-1]:
        part.caption = None
    return made


def _width(column: Column) -> int:
    """Return a column's minimum width: all of a number; for text, the larger of its longest word and min(its length, `_MOST_WRAPPED`)."""
    lines = [line for cell in (column.header, *column.cells) for line in _plain(cell).splitlines()]
    longest = max(map(cell_len, lines), default=0)
    if column.no_wrap or column.justify == "right":
        return longest
    if column.overflow == "fold":
        return min(longest, _MOST_WRAPPED)
    words = [cell_len(word) for line in lines for word in line.split()]
    return max(max(words, default=0), min(longest, _MOST_WRAPPED))


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _fits(table: Table, widths: Sequence[int], width: int) -> bool:
    between = 2 if table.box is not None and table.box is not box.SIMPLE_HEAD else 1
    if table.box is None:
        between = 0
    padding = sum(table.padding[side] for side in (1, 3)) if isinstance(table.padding, tuple) else 2
    edges = 2 if table.box is not None else 0
    return sum(widths) + len(widths) * padding + (len(widths) - 1) * min(between, 1) + edges <= width


def _part(table: Table, columns: Sequence[int]) -> Table:
    """Return a compact table of some columns; figures do not wrap."""
    part = Table(
        title=table.title,
        caption=table.caption,
        title_justify=table.title_justify,
        caption_justify=table.caption_justify,
        show_header=table.show_header,
        box=None if table.box is None else box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for at, index in enumerate(columns):
        column = table.columns[index]
        kept = column.no_wrap or column.justify == "right"
        part.columns.append(dataclasses.replace(column, _index=at, no_wrap=kept, min_width=_width(column)))
    part.rows = list(table.rows)
    return part
