"""The CSV files of this folder: read, written, and joined with what today's model says; and what the commands that write them are given."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TODAY_COLUMNS = ("key", "metric", "today")
"""The columns of a file that says what today's model predicts for another file's rows, by their keys and metrics."""


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser whose `--help` prints a command's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def arguments(description: str, **commands: int | None) -> tuple[str, list[str]]:
    """Read a command and the names behind it, and end with what was expected where they are others, before anything is written.

    commands: of each how many names stand behind it; None: any number.
    """
    parser = parser_of(description)
    parser.add_argument("command", choices=[*commands])
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    number = commands[given.command]
    if number is not None and len(given.names) != number:
        parser.error(f"found {len(given.names)} names behind {given.command}, expected {number}")
    return given.command, given.names


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows to a file, once all of them are made: the file stays as it is where one cannot be."""
    made = list(rows)
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)


def with_today(rows: Iterable[dict[str, str]], path: Path) -> list[dict[str, str]]:
    """Those of some rows that a file of `TODAY_COLUMNS` has, with what it says of them as `today`."""
    played = {(row["key"], row["metric"]): row["today"] for row in read(path)}
    return [row | {"today": played[place]} for row in rows if (place := (row["key"], row["metric"])) in played]
