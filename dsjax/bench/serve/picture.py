"""The picture of a sweep: tokens a second a user against tokens a second a device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsjax.errors import UserError


def draw(path: Path, points: Sequence[dict[str, Any]], title: str) -> None:
    """Draw points as `result_json` gives them; each is labelled with its concurrency or rate.

    Raises:
        UserError: no point has both figures, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    shown = [p for p in points if p["output_throughput_per_user"] and p["output_throughput_per_device"]]
    if not shown:
        raise UserError(
            "nothing to draw: a point needs answers of two tokens or more, and the number of devices (--devices where the "
            "server has no /server_info)"
        )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    users = [p["output_throughput_per_user"] for p in shown]
    devices = [p["output_throughput_per_device"] for p in shown]
    axes.plot(users, devices, marker="o")
    for point, x, y in zip(shown, users, devices, strict=True):
        axes.annotate(_label(point), (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set_xlabel("output tokens / s / user   (1 / median TPOT)")
    axes.set_ylabel("output tokens / s / device")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, max(users) * 1.2)
    axes.set_ylim(0, max(devices) * 1.1)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _label(point: dict[str, Any]) -> str:
    if point["max_concurrency"] is not None:
        return f"{point['max_concurrency']} at once"
    return "all at once" if point["request_rate"] == "inf" else f"{point['request_rate']:g} req/s"
