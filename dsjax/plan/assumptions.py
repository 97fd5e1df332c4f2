"""`assumption`: a figure of `configs/assumptions.toml`, the table of what the planner does not know exactly."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib

from dsjax.plan.figure import Figure, Kind, drawn


def assumption(key: str) -> float:
    """The value of a figure of the table, in the draw at hand."""
    return drawn(_table()[key])


def ends(key: str) -> tuple[float, float, float]:
    """(value, low, high) of a figure of the table, whatever the draw."""
    figure = _table()[key]
    return figure.value, figure.low, figure.high


@functools.cache
def _table() -> dict[str, Figure]:
    rows = tomllib.loads((importlib.resources.files("configs") / "assumptions.toml").read_text(encoding="utf-8"))
    return {key: _figure(row.get("name", key), row) for key, row in rows.items()}


def _figure(name: str, row: dict) -> Figure:
    kind = Kind.MEASURED if row.get("measured") else Kind.ASSUMPTION
    return Figure(*map(float, row["range"]), kind, name=name, unit=row.get("unit", ""), source=row["why"])
