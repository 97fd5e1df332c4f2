"""The table of a sweep: one line a point."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

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


def sweep_table(points: Sequence[dict[str, Any]], swept: str) -> Table:
    """Points as `result_json` gives them; `swept` is the field that differs. Columns without any value are left out."""
    columns = [column for column in _COLUMNS if any(point[column[1]] is not None for point in points)]
    table = Table(box=None, pad_edge=False)
    for title in ("at once" if swept == "max_concurrency" else "req/s", *(title for title, _, _ in columns)):
        table.add_column(title, justify="right")
    for point in points:
        cells = [f"{point[key]:{form}}" if point[key] is not None else "-" for _, key, form in columns]
        table.add_row(str(point[swept]), *cells)
    return table
