"""Progress: a bar on a terminal; elsewhere a line at each tenth, since a log would show a bar only once, at the end."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Titled = TypeVar("Titled")
"""Something with a `title`."""


class Tenths:
    """Writes a line at the first report and at each tenth of `total`.

    ::

        compiling: 4 of 31 (12 %), 9 s
    """

    def __init__(
        self, title: str, total: float, write: Callable[[str], None], show: Callable[[float], str] = "{:g}".format
    ):
        self._title, self._total, self._write, self._show = title, total, write, show
        self._begun = time.monotonic()
        self._tenth = -1

    def reach(self, done: float) -> None:
        """Report progress."""
        share = done / self._total if self._total else 1.0
        tenth = int(share * 10 + 1e-9)
        if tenth <= self._tenth:
            return
        self._tenth = tenth
        seconds = time.monotonic() - self._begun
        self._write(f"{self._title}: {self._show(done)} of {self._show(self._total)} ({share:.0%}), {seconds:.0f} s")


@contextlib.contextmanager
def counting(console: "Console", shown: bool, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show how many of `total` are done; yield a function that takes this number and a short detail, which only the bar shows.

    The bar disappears at the end. If the console is no terminal, a line is printed at each tenth.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TimeRemainingColumn(), TextColumn("{task.fields[detail]}"))
    tenths = Tenths(title, total, lambda line: console.print(line, highlight=False))
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total, detail="")

        def report(done: int, detail: str) -> None:
            if shown and not console.is_terminal:
                tenths.reach(done)
            bar.update(task, completed=done, detail=detail)

        yield report


def in_turn(console: "Console", shown: bool, title: str, items: Sequence[Titled]) -> Iterator[Titled]:
    """Yield the items, and show the current one and how many are done."""
    with counting(console, shown, title, len(items)) as report:
        for number, item in enumerate(items):
            report(number, item.title)
            yield item
