"""Where a command writes what it found: tables on the console; JSON, pictures and pages where the user says."""

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
"""The option of a command that prints tables, or writes what they show as JSON."""

FILE_COLUMNS = 140
"""Columns of tables in a file or a pipe. rich would take 80 there, and cut the figures of wide tables."""


def write_json(where: str | Path, body: Any, *, private: bool = False) -> None:
    """Write indented JSON to a file, or for `-` to standard output. private: the file is for its owner alone (mode 0600).

    Raises:
        UserError: the file cannot be written.
        ValueError: `body` holds a number that JSON cannot.
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
                os.fchmod(file.fileno(), 0o600)  # it may have been there, for others too
            file.write(text)


@contextlib.contextmanager
def writing(path: str | Path, kind: str = "file") -> Iterator[None]:
    """While `path`, which is a file or a folder, is written.

    Raises:
        UserError: it cannot be; also for a picture whose kind its name does not tell.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another {kind}") from error
    except ValueError as error:
        if "is not supported" not in str(error):  # matplotlib, of a file name's end that it does not know
            raise
        raise UserError(f"cannot write {path}: {error}") from error


def report_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; in a file or a pipe of `FILE_COLUMNS` columns, unless `COLUMNS` says otherwise."""
    stream = sys.stderr if stderr else sys.stdout
    wide = stream.isatty() or "COLUMNS" in os.environ
    return ReportConsole(stderr=stderr, width=None if wide else FILE_COLUMNS)


class ReportConsole(Console):
    """A console whose tables never lose a figure: one that is too wide is drawn closer, then as several below each other.

    Each of those repeats the columns that tell the rows apart: the first column, and those behind it that are justified left or
    drawn in bold, as far as these take half of the width. A word is cut where its column allows that (`overflow="fold"`), and then
    goes on in the next line. rich itself would shrink columns to nothing, or cut figures to `0.…`.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, each table in the width there is."""
        if not any(isinstance(each, Table) for each in objects):
            super().print(*objects, **options)
            return
        for each in objects:
            for part in fitted(each, options.get("width") or self.width) if isinstance(each, Table) else (each,):
                super().print(part, **options)


_MOST_WRAPPED = 24
"""Columns of text may wrap, but where they are longer than this not below it."""


def fitted(table: Table, width: int) -> list[Table]:
    """The table, or tables of some of its columns each, that need no more than `width` columns of the terminal."""
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
    """What a column needs at least: all of a number, of a text its longest word and up to `_MOST_WRAPPED`."""
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
    """Some columns of a table, drawn close; figures do not wrap."""
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
