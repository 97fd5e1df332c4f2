"""Tables in the terminal (rich)."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from rich.table import Table


def table(
    title: str | None,
    names: Iterable[str],
    rows: Iterable[Sequence[str]],
    styles: Iterable[str | None] = (),
    **how: Any,
) -> Table:
    """Make a table. Columns are right-aligned. A name with the prefix `<` makes a left-aligned column, `<<` one that wraps.

    styles: one per row. how: options of `rich.table.Table`.
    """
    made = Table(title=title, title_justify="left", **how)
    for name in names:
        wraps = name.startswith("<<")
        column = {"justify": "left" if name.startswith("<") else "right", "no_wrap": not wraps}
        made.add_column(name.lstrip("<"), overflow="fold" if wraps else "ellipsis", **column)
    for row, style in zip_longest(rows, styles):
        made.add_row(*row, style=style)
    return made


def table_of(title: str, *columns: str) -> Table:
    """Make a table without rows. The first column is left-aligned, all others are right-aligned, and their texts wrap."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left")
    return made
