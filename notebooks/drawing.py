"""What all notebooks draw alike: style, colours, panels, tables, and bytes in the unit that reads well."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, VIOLET, BROWN, GREY = (
    "#1f5fa8",
    "#d9822b",
    "#2e8b57",
    "#c0392b",
    "#7d5ba6",
    "#8c6239",
    "#9aa5b1",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, BROWN, GREY)

# Small enough for a repository, sharp enough to read.
plt.rcParams.update(
    {
        "figure.dpi": 88,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.fontsize": 8,
        "legend.frameon": False,
    }
)


def panels(rows: int = 1, columns: int = 1, *, width: float = 9.0, height: float = 3.4) -> tuple[Figure, np.ndarray]:
    """A figure of ``width`` × ``height`` inches a row, and its axes in one flat array."""
    figure, axes = plt.subplots(rows, columns, figsize=(width, height * rows), squeeze=False)
    return figure, axes.reshape(-1)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markdown:
    """A table that GitHub shows too; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(header) + " |", "|:--" + "|--:" * (len(header) - 1) + "|"]
    shown = ([str(cell).replace("|", "\\|") for cell in row] for row in rows)
    return Markdown("\n".join(lines + ["| " + " | ".join(row) + " |" for row in shown]))


def size(count: float) -> str:
    """Bytes with three digits and a decimal unit: ``1.15 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def stack(axes: Axes, names: Sequence[str], parts: dict[str, Sequence[float]]) -> None:
    """Horizontal bars, one for each name from top to bottom, of the parts laid end to end."""
    left = np.zeros(len(names))
    for colour, (label, values) in zip(COLOURS, parts.items(), strict=False):
        axes.barh(names, values, left=left, color=colour, label=label, height=0.65)
        left += np.asarray(values, float)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def heat(axes: Axes, values: np.ndarray, *, colours: str = "viridis", **options) -> object:
    """A matrix as colours, without a grid over it; gives what a colour bar is made from."""
    axes.grid(visible=False)
    return axes.imshow(values, aspect="auto", cmap=colours, interpolation="nearest", **options)
