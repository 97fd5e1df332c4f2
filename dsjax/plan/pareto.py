"""The Pareto front and the sweeps as pictures (matplotlib), and the front as one HTML file with its figures."""

from __future__ import annotations

import html
import io
import math
from pathlib import Path

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.search import Plan
from dsjax.plan.sweep import Sweep

_BLUE, _RED, _GREY = "#1f5fa8", "#c0392b", "#9aa5b1"


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures need matplotlib; install it with pip install 'dsjax[notebooks]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_front(plan: Plan, path: Path | io.StringIO) -> None:
    """The front with its intervals, and the candidates that meet the objectives, as a picture; text gets an SVG.

    Raises:
        UserError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=130)
    objective = plan.question.objective
    late = {id(c): c for c in [*plan.late, *plan.ranked, *plan.missed] if _is_late(plan, c)}.values()
    others = [c for c in (*plan.ranked, *plan.missed) if not _is_late(plan, c)]
    for points, face, label in ((others, _GREY, "best of a layout"), (late, "none", _late(plan))):
        if points:
            x, y = [c.per_user for c in points], [c.per_device for c in points]
            axes.scatter(x, y, s=12, facecolors=face, edgecolors=_GREY, linewidths=0.8, label=label)
    for mode, marker, colour in (("aggregated", "o", _BLUE), ("separated", "s", _RED)):
        points = [c for c in plan.frontier if c.mode == mode]
        if points:
            x, y = [c.per_user for c in points], [c.per_device for c in points]
            up = [
                [c.per_device - c.per_device.low for c in points],
                [c.per_device.high - c.per_device for c in points],
            ]
            axes.errorbar(
                x,
                y,
                yerr=up,
                fmt=marker,
                color=colour,
                ecolor=colour,
                elinewidth=0.7,
                alpha=0.85,
                label=f"front, {mode}",
            )
    last = -math.inf
    for candidate in plan.frontier:
        if math.log(candidate.per_user) - last > 0.22:
            last = math.log(candidate.per_user)
            place = (candidate.per_user, candidate.per_device)
            axes.annotate(candidate.name(), place, fontsize=6, rotation=35, xytext=(3, 5), textcoords="offset points")
    if objective.tpot:
        label = f"TPOT {objective.tpot * 1e3:g} ms: met to the right"
        axes.axvline(1 / objective.tpot, color="black", linewidth=0.8, linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Room for the labels that lean out of the last points.
    axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
    axes.set_ylim(top=axes.get_ylim()[1] * 2.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("tokens a second a user")
    axes.set_ylabel("output tokens a second a device")
    kept = f" with TTFT ≤ {objective.ttft:g} s" if objective.ttft else ""
    bars = "bars: the ranges of all assumptions combined"
    axes.set_title(f"{plan.question.cluster.name}: Pareto front{kept}; {bars}", fontsize=10)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="svg" if isinstance(path, io.StringIO) else None)
    pyplot.close(figure)


def _is_late(plan: Plan, candidate: Candidate) -> bool:
    bound = plan.question.objective.ttft
    return bound is not None and candidate.ttft > bound


def _late(plan: Plan) -> str:
    bound = plan.question.objective.ttft
    return "" if bound is None else f"breaks the TTFT of {bound:g} s"


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Throughput and TPOT of the winner's deployment and of the best one, over the swept quantity.

    Raises:
        UserError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5), dpi=130)
    for axes, name, scale, label in (
        (both[0], "throughput", 1, "output tokens a second"),
        (both[1], "tpot", 1e3, "TPOT, ms"),
    ):
        for field, colour, text in (("same", _BLUE, "the winner, unchanged"), ("best", _RED, "the best layout there")):
            points = [(p.value, getattr(getattr(p, field), name)) for p in sweep.points if getattr(p, field)]
            text += "" if len(points) == len(sweep.points) else ", where it can run"
            x = [value for value, _ in points]
            axes.plot(x, [f * scale for _, f in points], marker="o", markersize=4, color=colour, label=text)
            axes.fill_between(
                x, [f.low * scale for _, f in points], [f.high * scale for _, f in points], color=colour, alpha=0.12
            )
        now = "the winner as it is" if sweep.quantity == "concurrency" else "the cluster as it is"
        axes.axvline(sweep.now, color="black", linewidth=0.8, linestyle="--", label=now)
        if sweep.quantity != "loss-of-hosts":
            axes.set_xscale("log")
        ticks = [p.label.replace(", ", "\n") for p in sweep.points]
        crowded = len(ticks) > 4 and "\n" not in "".join(ticks)
        axes.set_xticks([p.value for p in sweep.points], ticks, fontsize=8, rotation=40 if crowded else 0)
        axes.minorticks_off()
        drawn = [getattr(each, name) for p in sweep.points for each in (p.same, p.best) if each]
        if name == "tpot" and max(drawn, default=1) > 50 * min(drawn, default=1):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{sweep.quantity}: {sweep.unit}")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    both[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def write_html(plan: Plan, path: Path) -> None:
    """The front as a page: a drawing, and the table of its figures.

    Raises:
        UserError: matplotlib is not installed.
    """
    title = html.escape(f"{plan.question.cluster.name}: tokens a second a device against tokens a second a user")
    drawing = io.StringIO()
    draw_front(plan, drawing)
    rows = "".join(_row(candidate) for candidate in plan.frontier)
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;max-width:1000px;margin:2em auto;color:#222}}table{{border-collapse:collapse}}
td,th{{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd}}td:first-child,th:first-child{{text-align:left}}</style>
<h1 style="font-size:18px">{title}</h1>
<p>Estimates; bars and brackets: the ranges of all assumptions combined.{_objectives(plan)}</p>
{drawing.getvalue().partition("<svg")[1] + drawing.getvalue().partition("<svg")[2]}
<table><tr><th>deployment</th><th>batch</th><th>tokens/s a user</th><th>tokens/s a device</th><th>TTFT</th><th>TPOT</th></tr>
{rows}</table></html>
""",
        encoding="utf-8",
    )


def _objectives(plan: Plan) -> str:
    """What the objectives do to the drawing, in words."""
    objective, said = plan.question.objective, ""
    if objective.ttft:
        said += f" The front keeps a TTFT of {objective.ttft:g} s."
    if plan.late:
        said += f" A hollow dot {_late(plan)}, and would be on the front."
    return said + (f" Dashed: a TPOT of {objective.tpot * 1e3:g} ms, met to the right." if objective.tpot else "")


def _row(candidate: Candidate) -> str:
    cells = (
        html.escape(f"{candidate.mode}: {candidate.name()}"),
        f"{candidate.batch:g}",
        f"{candidate.per_user:.1f} [{candidate.per_user.low:.1f} … {candidate.per_user.high:.1f}]",
        f"{candidate.per_device:,.0f} [{candidate.per_device.low:,.0f} … {candidate.per_device.high:,.0f}]",
        f"{candidate.ttft:.2f} s",
        f"{candidate.tpot * 1e3:.1f} ms",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
