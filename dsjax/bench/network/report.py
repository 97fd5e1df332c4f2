"""A run as tables, and as JSON."""

from collections import Counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.bench.modules.ceilings import Device
from dsjax.bench.modules.report import origin
from dsjax.bench.network.options import CollectiveGrid
from dsjax.bench.network.run import VERDICTS, CollectiveRow, worst
from dsjax.bench.processes import Results
from dsjax.plan.cluster import Cluster
from dsjax.plan.measured import NETWORK_FORMAT
from dsjax.tables import table

_STYLES = dict(zip(VERDICTS, ("green", "yellow", "bold red"), strict=True))


def show(console: Console, results: Results, cluster: Cluster | None) -> None:
    """A table for each group of devices, what was left out, and the verdict."""
    for group in dict.fromkeys(row.case.group for row in results.rows):
        console.print(_table([row for row in results.rows if row.case.group is group]))
    reasons = dict.fromkeys((case.collective, case.group.name, reason) for case, reason in results.skipped)
    for collective, group, reason in reasons:
        console.print(f"left out: {collective} over {group}: {reason}", highlight=False)
    console.print(
        "ms: one collective, or one way of a message (send_receive), median of the repeats, the slowest process of each; "
        "bytes: that leave a device; GB/s: bytes ÷ time, "
        "which nccl-tests calls bus bandwidth.",
        style="dim",
        highlight=False,
    )
    if cluster is None:
        console.print(
            "No --cluster: nothing is expected, only whether the data arrived right is judged.", highlight=False
        )
    if verdict := worst(results):
        counts = Counter(row.verdict for row in results.rows)
        text = ", ".join(f"{counts[each]} {each}" for each in VERDICTS)
        console.print(f"{verdict}: {text}", style=_STYLES[verdict], highlight=False)


def _table(rows: list[CollectiveRow]) -> Table:
    group = rows[0].case.group
    where = f"between {group.hosts} hosts" if group.between_hosts else "inside a host"
    title = f"{group.name}: {len(group.devices)} × {group.ranks} ranks, {where}"
    names = ("<", "bytes", "ms", "least–most", "GB/s", "expected ms", "warning", "failing", "<")
    cells = []
    for row in rows:
        limits = row.expectation
        bounds = (limits.expected, limits.warning, limits.failing) if limits else ()
        cells.append(
            [
                row.case.collective,
                f"{row.sent_bytes:,}",
                f"{row.median * 1e3:.4g}",
                f"{min(row.samples) * 1e3:.3g}–{max(row.samples) * 1e3:.3g}",
                f"{row.bandwidth / 1e9:.3g}",
                *([f"{seconds * 1e3:.3g}" for seconds in bounds] or [""] * 3),
                ("" if row.correct else "data wrong: ") + (row.verdict or ""),
            ]
        )
    return table(title, names, cells, [_STYLES[one.verdict] if one.verdict in VERDICTS[1:] else None for one in rows])


def to_json(
    results: Results,
    options: CollectiveGrid,
    dtype: np.dtype,
    cluster: Cluster | None,
    device: Device,
    processes: list[dict[str, Any]],
    command: str,
) -> dict[str, Any]:
    """Stable fields, as `docs/bench-network.md` lists them."""
    return {
        **origin(NETWORK_FORMAT, command, device),
        "mesh": options.mesh,
        "processes": processes,
        "cluster": cluster and cluster.name,
        "dtype": str(dtype),
        "repeats": options.repeats,
        "verdict": worst(results),
        "partial": results.partial,
        "skipped": [
            {"group": list(c.group.uses), "collective": c.collective, "bytes": c.size, "reason": r}
            for c, r in results.skipped
        ],
        "rows": [row.to_json() for row in results.rows],
    }
