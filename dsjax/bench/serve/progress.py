"""A progress bar for a point: requests done, and output tokens a second so far."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dsjax.bench.serve.records import RequestRecord
from dsjax.progress import Tenths


class PointProgress:
    """Counts records and moves a bar."""

    def __init__(self, bar: Progress, title: str, total: int, tenths: Tenths | None = None):
        self._tenths, self._done = tenths, 0
        self._bar = bar
        self._task = bar.add_task(title, total=total, detail="")
        self._begin = time.monotonic()
        self._tokens = 0
        self._failed = 0

    def advance(self, record: RequestRecord) -> None:
        """Count one request."""
        self._tokens += record.output_tokens if record.succeeded else 0
        self._failed += not record.succeeded
        rate = self._tokens / max(time.monotonic() - self._begin, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        self._done += 1
        if self._tenths is not None:
            self._tenths.reach(self._done)
        self._bar.update(self._task, advance=1, detail=f"{rate:,.0f} tok/s{failed}")


@contextlib.contextmanager
def point_progress(console: Console, shown: bool, title: str, total: int) -> Iterator[PointProgress]:
    """A bar that goes away at the end; where the console is no terminal, a line at each tenth."""
    tenths = None
    if shown and not console.is_terminal:
        tenths = Tenths(title, total, lambda line: console.print(line, highlight=False))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield PointProgress(bar, title, total, tenths)
