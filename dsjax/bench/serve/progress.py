"""`PointProgress`: how many requests of a point are done, and output tokens a second so far."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from dsjax.bench.serve.records import RequestRecord
from dsjax.progress import counting


class PointProgress:
    """Counts records, and reports how many there are with their rate."""

    def __init__(self, report: Callable[[int, str], None]):
        self._report = report
        self._begin = time.monotonic()
        self._done = self._tokens = self._failed = 0

    def advance(self, record: RequestRecord) -> None:
        """Count one request."""
        self._tokens += record.output_tokens if record.succeeded else 0
        self._failed += not record.succeeded
        rate = self._tokens / max(time.monotonic() - self._begin, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        self._done += 1
        self._report(self._done, f"{rate:,.0f} tok/s{failed}")


@contextlib.contextmanager
def point_progress(console: Console, shown: bool, title: str, total: int) -> Iterator[PointProgress]:
    """Show how far a point is."""
    with counting(console, shown, title, total) as report:
        yield PointProgress(report)
