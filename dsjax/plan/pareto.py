"""The Pareto front as a picture (matplotlib)."""

import math
from pathlib import Path

from dsjax.errors import UserError
from dsjax.plan.search import Plan

_BLUE, _RED, _GREY = "#1f5fa8", "#c0392b", "#9aa5b1"


def draw_front(plan: Plan, path: Path) -> None:
    """Draw the front with its intervals, and the best of each layout. Raises `UserError` if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures need matplotlib; install it with pip install 'dsjax[notebooks]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    objective, (figure, axes) = plan.question.objective, pyplot.subplots(figsize=(9, 5.5), dpi=130)
    candidates = {id(c): c for c in [*plan.late, *plan.ranked, *plan.missed]}.values()
    late = [c for c in candidates if objective.ttft is not None and c.ttft > objective.ttft]
    meets_ttft = [c for c in candidates if objective.ttft is None or c.ttft <= objective.ttft]
    broken = f"breaks the TTFT of {objective.ttft:g} s" if objective.ttft else ""
    for points, face, label in ((meets_ttft, _GREY, "best of a layout"), (late, "none", broken)):
        if points:
            x, y = [c.per_user for c in points], [c.per_device for c in points]
            axes.scatter(x, y, s=12, facecolors=face, edgecolors=_GREY, linewidths=0.8, label=label)
    for mode, marker, colour in (("aggregated", "o", _BLUE), ("separated", "s", _RED)):
        of_mode = [c for c in plan.frontier if c.mode == mode]
        x, y = [c.per_user for c in of_mode], [c.per_device for c in of_mode]
        bars = [[value - value.low for value in y], [value.high - value for value in y]]
        if x:
            style = {"fmt": marker, "color": colour, "elinewidth": 0.7, "alpha": 0.85}
            axes.errorbar(x, y, yerr=bars, label=f"front, {mode}", **style)
    last = -math.inf
    for candidate in plan.frontier:
        if math.log(candidate.per_user) - last > 0.22:
            last = math.log(candidate.per_user)
            style = {"fontsize": 6, "rotation": 35, "xytext": (3, 5), "textcoords": "offset points"}
            axes.annotate(candidate.name(), (candidate.per_user, candidate.per_device), **style)
    if objective.tpot:
        label = f"TPOT {objective.tpot * 1e3:g} ms: met to the right"
        axes.axvline(1 / objective.tpot, color="black", linewidth=0.8, linestyle="--", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens a second a user", ylabel="output tokens a second a device")
    # Leave room for the slanted labels of the last points.
    axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
    axes.set_ylim(top=axes.get_ylim()[1] * 2.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    bound = f" with TTFT ≤ {objective.ttft:g} s" if objective.ttft else ""
    title = f"{plan.question.cluster.name}: Pareto front{bound}; bars: the ranges of all assumptions combined"
    axes.set_title(title, fontsize=10)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
