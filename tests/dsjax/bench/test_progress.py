"""How far a benchmark is, where there is no terminal: lines, and no bar."""

import io
from types import SimpleNamespace

from rich.console import Console

from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.report import point_progress
from dsjax.progress import track


def test_tracked_items_come_in_order_with_a_line_at_each_tenth():
    out, items = io.StringIO(), [SimpleNamespace(title=f"case {k}") for k in range(20)]
    assert list(track(Console(file=out), True, "timing cases", items)) == items
    shares = [line.partition("(")[2].partition(")")[0] for line in out.getvalue().splitlines()]
    assert shares == [f"{share}%" for share in range(0, 100, 10)]


def test_a_request_that_failed_counts_as_done():
    out = io.StringIO()
    with point_progress(Console(file=out), True, "point 1", 2) as advance:
        advance(RequestRecord(0.0, 0.0, 1, error="refused"))
        advance(RequestRecord(0.0, 0.0, 1, output_tokens=3))
    said = [line.partition(",")[0] for line in out.getvalue().splitlines()]
    assert said == ["point 1: 1 of 2 (50%)", "point 1: 2 of 2 (100%)"]
