"""The Pareto front and the sweeps as pictures (matplotlib), and the front as one HTML file with its figures."""

import contextlib
import io
import math
from collections.abc import Iterator
from pathlib import Path

import markupsafe

from dsjax.errors import UserError
from dsjax.plan.search import Plan
from dsjax.plan.sweep import Sweep
from dsjax.texts import filled

_BLUE, _RED, _GREY = "#1f5fa8", "#c0392b", "#9aa5b1"


@contextlib.contextmanager
def _picture(path: Path | io.StringIO, count: int, size: tuple[float, float]) -> Iterator[list]:
    """So many axes beside each other, written to a file; text gets an SVG."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures need matplotlib; install it with pip install 'dsjax[notebooks]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=size, dpi=130, squeeze=False)
    yield list(axes[0])
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="svg" if isinstance(path, io.StringIO) else None)
    pyplot.close(figure)


def draw_front(plan: Plan, path: Path | io.StringIO) -> None:
    """The front with its intervals, and the best of each layout; `UserError` where matplotlib is not installed."""
    objective = plan.question.objective
    kept = {id(c): c for c in [*plan.late, *plan.ranked, *plan.missed]}.values()
    late = [c for c in kept if objective.ttft is not None and c.ttft > objective.ttft]
    others = [c for c in kept if objective.ttft is None or c.ttft <= objective.ttft]
    with _picture(path, 1, (9, 5.5)) as [axes]:
        from matplotlib import ticker

        for points, face, label in ((others, _GREY, "best of a layout"), (late, "none", _late(plan))):
            if points:
                x, y = [c.per_user for c in points], [c.per_device for c in points]
                axes.scatter(x, y, s=12, facecolors=face, edgecolors=_GREY, linewidths=0.8, label=label)
        for mode, marker, colour in (("aggregated", "o", _BLUE), ("separated", "s", _RED)):
            of_mode = [c for c in plan.frontier if c.mode == mode]
            x, y = [c.per_user for c in of_mode], [c.per_device for c in of_mode]
            bars = [[one - one.low for one in y], [one.high - one for one in y]]
            style = {"fmt": marker, "color": colour, "elinewidth": 0.7, "alpha": 0.85}
            if x:
                axes.errorbar(x, y, yerr=bars, label=f"front, {mode}", **style)
        last = -math.inf
        for candidate in plan.frontier:
            if math.log(candidate.per_user) - last > 0.22:
                last = math.log(candidate.per_user)
                place = (candidate.per_user, candidate.per_device)
                style = {"fontsize": 6, "rotation": 35, "xytext": (3, 5), "textcoords": "offset points"}
                axes.annotate(candidate.name(), place, **style)
        if objective.tpot:
            label = f"TPOT {objective.tpot * 1e3:g} ms: met to the right"
            axes.axvline(1 / objective.tpot, color="black", linewidth=0.8, linestyle="--", label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens a second a user", ylabel="output tokens a second a device")
        # Room for the labels that lean out of the last points.
        axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
        axes.set_ylim(top=axes.get_ylim()[1] * 2.2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(ticker.NullFormatter())
        kept = f" with TTFT ≤ {objective.ttft:g} s" if objective.ttft else ""
        bars = "bars: the ranges of all assumptions combined"
        axes.set_title(f"{plan.question.cluster.name}: Pareto front{kept}; {bars}", fontsize=10)
        axes.grid(which="both", alpha=0.25)


def _late(plan: Plan) -> str:
    bound = plan.question.objective.ttft
    return "" if bound is None else f"breaks the TTFT of {bound:g} s"


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Throughput and TPOT of the winner's deployment and of the best one, over the swept quantity."""
    now = "the winner as it is" if sweep.quantity == "concurrency" else "the cluster as it is"
    ticks = [p.label.replace(", ", "\n") for p in sweep.points]
    crowded = len(ticks) > 4 and "\n" not in "".join(ticks)
    figures = (("throughput", 1, "output tokens a second"), ("tpot", 1e3, "TPOT, ms"))
    with _picture(path, 2, (11, 4.5)) as both:
        for axes, (name, scale, label) in zip(both, figures, strict=True):
            drawn = []
            for field, colour, text in (
                ("same", _BLUE, "the winner, unchanged"),
                ("best", _RED, "the best layout there"),
            ):
                points = [(p.value, getattr(getattr(p, field), name)) for p in sweep.points if getattr(p, field)]
                text += "" if len(points) == len(sweep.points) else ", where it can run"
                x = [value for value, _ in points]
                middle, low, high = ([getattr(f, end) * scale for _, f in points] for end in ("value", "low", "high"))
                axes.plot(x, middle, marker="o", markersize=4, color=colour, label=text)
                axes.fill_between(x, low, high, color=colour, alpha=0.12)
                drawn += middle
            axes.axvline(sweep.now, color="black", linewidth=0.8, linestyle="--", label=now)
            if sweep.quantity != "loss-of-hosts":
                axes.set_xscale("log")
            axes.set_xticks([p.value for p in sweep.points], ticks, fontsize=8, rotation=40 if crowded else 0)
            axes.minorticks_off()
            if name == "tpot" and max(drawn, default=1) > 50 * min(drawn, default=1):
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set(xlabel=f"{sweep.quantity}: {sweep.unit}", ylabel=label)
            axes.grid(alpha=0.25)


def write_html(plan: Plan, path: Path) -> None:
    """The front as a page: a drawing, and the table of its figures."""
    drawing = io.StringIO()
    draw_front(plan, drawing)
    picture = markupsafe.Markup("".join(drawing.getvalue().partition("<svg")[1:]))
    about = {"plan": plan, "objective": plan.question.objective, "late": _late(plan), "picture": picture}
    path.write_text(filled("pareto.html", **about) + "\n", encoding="utf-8")
