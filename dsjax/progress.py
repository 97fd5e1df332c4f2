"""Progress: a bar on a terminal; elsewhere a line at each tenth, since a log would show a bar only once, at the end."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


class _Tenths:
    """Prints a line at the first report and at each tenth of `total`, such as `compiling: 4 of 31 (13%), 9 s`."""

    def __init__(self, console: "Console", title: str, total: float, show: Callable[[float], str]):
        self._console, self._title, self._total, self._show = console, title, total, show
        self._begun, self._last_tenth = time.monotonic(), -1

    def report(self, done: float) -> None:
        """Write a line if `done` reaches another tenth."""
        share = done / self._total if self._total else 1.0
        tenth = int(share * 10)
        if tenth <= self._last_tenth:
            return
        self._last_tenth = tenth
        seconds = time.monotonic() - self._begun
        counts = f"{self._show(done)} of {self._show(self._total)} ({share:.0%})"
        self._console.print(f"{self._title}: {counts}, {seconds:.0f} s", highlight=False)


@contextlib.contextmanager
def report_progress(
    console: "Console", shown: bool, title: str, total: int, *, in_bytes: bool = False
) -> Iterator[Callable[[int, str], None]]:
    """Show how many of `total` are done; yield a function that takes this number and a short detail, which only the bar shows.

    The bar disappears at the end, unless it shows bytes.
    """
    if not shown:
        yield lambda done, detail: None
        return
    if not console.is_terminal:
        show = (lambda size: f"{size / 1e9:,.3g} GB") if in_bytes else "{:g}".format
        tenths = _Tenths(console, title, total, show)
        yield lambda done, detail: tenths.report(done)
        return
    from rich import progress

    if in_bytes:
        counts = progress.DownloadColumn(), progress.TransferSpeedColumn()
    else:
        counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    detail_column = progress.TextColumn("{task.fields[detail]}")
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), *counts, progress.TimeRemainingColumn()
    with progress.Progress(*columns, detail_column, console=console, transient=not in_bytes) as bar:
        task = bar.add_task(title, total=total, detail="")
        yield lambda done, detail: bar.update(task, completed=done, detail=detail)


@contextlib.contextmanager
def report_bytes(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show progress in bytes on standard error, if `shown`; yield a function that takes the number of further bytes."""
    if not shown:
        yield lambda num_bytes: None
        return
    from rich.console import Console

    with report_progress(Console(stderr=True), shown, title, total, in_bytes=True) as report:
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            report(done, "")

        advance(0)
        yield advance


def track(console: "Console", shown: bool, title: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, which have a `title`; show the current title and how many items are done."""
    with report_progress(console, shown, title, len(items)) as report:
        for number, item in enumerate(items):
            report(number, item.title)
            yield item
