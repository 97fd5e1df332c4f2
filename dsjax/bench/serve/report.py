"""Figures as text: how far a point is, a point line for line as `vllm bench serve` prints it, and the table of a sweep."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.serve.records import RequestRecord
from dsjax.progress import counting
from dsjax.tables import table
from dsjax.texts import filled

_COLUMNS = (
    ("done", "completed", "d"),
    ("failed", "failed", "d"),
    ("tok/s", "output_throughput", ".1f"),
    ("tok/s a user", "output_throughput_per_user", ".2f"),
    ("tok/s a device", "output_throughput_per_device", ".2f"),
    ("TTFT ms, median", "median_ttft_ms", ".1f"),
    ("TPOT ms, median", "median_tpot_ms", ".2f"),
    ("E2EL ms, median", "median_e2el_ms", ".1f"),
    ("good req/s", "request_goodput", ".2f"),
    ("accepted %", "spec_decode_acceptance_rate", ".1f"),
)


def report(point: dict[str, Any], latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    """The block of one point, of its JSON, without a newline at its end."""
    shown = ["Mean", "Median", *(f"P{p:g}" for p in percentiles)]
    return filled("texts", "bench_serve.txt", point=point, latencies=latencies, shown=shown)


def sweep_table(points: Sequence[dict[str, Any]], swept: str) -> Table:
    """Points' JSON as rows; `swept` is the field that differs. Columns without any value are left out."""
    columns = [column for column in _COLUMNS if any(point[column[1]] is not None for point in points)]
    names = ("at once" if swept == "max_concurrency" else "req/s", *(title for title, _, _ in columns))
    rows = [
        [str(one[swept]), *(f"{one[key]:{form}}" if one[key] is not None else "-" for _, key, form in columns)]
        for one in points
    ]
    return table(None, names, rows, box=None, pad_edge=False)


Advance = Callable[[RequestRecord], None]


@contextlib.contextmanager
def point_progress(console: Console, shown: bool, title: str, total: int) -> Iterator[Advance]:
    """Show how far a point is; gives a function that counts a request."""
    begin, done, failed, tokens = time.monotonic(), 0, 0, 0
    with counting(console, shown, title, total) as report:

        def advance(record: RequestRecord) -> None:
            nonlocal done, failed, tokens
            done += 1
            failed += not record.succeeded
            tokens += record.output_tokens if record.succeeded else 0
            rate = tokens / max(time.monotonic() - begin, 1e-9)
            report(done, f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else ""))

        yield advance
