"""A plot of a timeline: the whole step and one layer, coloured by part of the model, with the critical path marked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsjax.dryrun.prices import BETWEEN, COPIES, INSIDE
from dsjax.dryrun.program import COMPUTE, Span
from dsjax.dryrun.timeline import Timeline
from dsjax.errors import UserError

_LANES = (COMPUTE, INSIDE, BETWEEN, COPIES)
_COLOURS = 9
_REST = "#bbbbbb"
_CRITICAL = "#000000"

Bar = tuple[float, float, str]
"""Begin, end, part of the model."""


def draw(timeline: Timeline, file: Path, title: str) -> None:
    """Write the plot in the format of the file's extension.

    Raises:
        UserError: matplotlib is not installed or does not support the format, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the picture needs matplotlib; install it with pip install 'dsjax[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = _palette(timeline, pyplot.get_cmap("tab10"))
    figure, (step_axes, layer_axes) = pyplot.subplots(2, 1, figsize=(13, 7.6), height_ratios=(1, 1))
    step = timeline.step
    layer = timeline.middle_layer()
    scale, unit = _scale(step.value)
    _panel(step_axes, timeline, 0.0, step.value, colours)
    low, middle, high = (f"{end * scale:.4g}" for end in (step.low, step.value, step.high))
    step_axes.set_title(f"{title}\nthe whole step: {middle} {unit} ({low} – {high})", loc="left", fontsize=10)
    if layer:
        _panel(layer_axes, timeline, layer.begin, layer.end, colours)
        seconds = layer.end - layer.begin
        scale, unit = _scale(seconds)
        text = f"layer {layer.index + 1} of {layer.times} alike: {seconds * scale:.4g} {unit}"
        layer_axes.set_title(text, loc="left", fontsize=10)
    else:
        layer_axes.set_visible(False)
    _legend(figure, timeline, colours)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    try:
        figure.savefig(file, dpi=110)
    except (ValueError, OSError) as error:
        raise UserError(f"cannot write the picture {str(file)!r}: {error}") from error
    finally:
        pyplot.close(figure)


def _palette(timeline: Timeline, colours) -> dict[str, str]:
    """Return the colour of each part: the parts with most of the critical path get their own, all others are grey."""
    names = list(timeline.by_scope())
    return {name: colours(i) if i < _COLOURS else _REST for i, name in enumerate(names)}


def _panel(axes, timeline: Timeline, begin: float, end: float, colours: dict[str, str]) -> None:
    spans = timeline.schedule.spans
    critical = set(timeline.schedule.critical_path())
    lanes = [lane for lane in _LANES if any(span.thread == lane for span in spans)]
    scale, unit = _scale(end - begin)
    smallest = (end - begin) / 4000
    for row, lane in enumerate(reversed(lanes)):
        inside = [
            (index, span)
            for index, span in enumerate(spans)
            if span.thread == lane and span.begin < end and span.end > begin
        ]
        bars = _merged((bar for _, span in inside for bar in _bars(timeline, span)), smallest)
        pieces = [((start - begin) * scale, (stop - start) * scale) for start, stop, _ in bars]
        shades = [colours[part] for _, _, part in bars]
        # Without a thin outline, bars narrower than a pixel would be invisible.
        axes.broken_barh(pieces, (row - 0.3, 0.6), facecolors=shades, edgecolors=shades, lw=0.6, snap=False)
        marks = _merged(((s.begin, s.end, "") for i, s in inside if i in critical), smallest)
        pieces = [((start - begin) * scale, (stop - start) * scale) for start, stop, _ in marks]
        axes.broken_barh(pieces, (row - 0.42, 0.07), color=_CRITICAL, lw=0.6, snap=False)
    axes.set_yticks(range(len(lanes)), [*reversed(lanes)])
    axes.set_xlim(0, (end - begin) * scale)
    axes.set_ylim(-0.55, len(lanes) - 0.5)
    axes.set_xlabel(unit)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _bars(timeline: Timeline, span: Span) -> Iterator[Bar]:
    """Yield a span's bars. A loop, whose iterations would be too narrow to see, becomes one bar per part of the model."""
    if not span.body:
        yield span.begin, span.end, timeline.parts[span.operation]
        return
    shares: dict[str, float] = {}
    for leaf, times in span.leaves():
        part = timeline.parts[leaf.operation]
        shares[part] = shares.get(part, 0.0) + times * leaf.seconds
    at = span.begin
    for part, seconds in shares.items():
        yield at, at + seconds, part
        at += seconds


def _merged(bars, smallest: float) -> list[Bar]:
    """Merge adjacent bars of the same part if the gap between them is too small to see."""
    merged: list[Bar] = []
    for begin, end, part in bars:
        if merged and merged[-1][2] == part and begin - merged[-1][1] < smallest:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), part)
        else:
            merged.append((begin, end, part))
    return merged


def _legend(figure, timeline: Timeline, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    shares = timeline.by_scope()
    scale, unit = _scale(timeline.step.value)
    named = [name for name in shares if colours[name] != _REST]
    handles = [Patch(color=colours[n], label=f"{n}: {shares[n].critical * scale:.3g} {unit}") for n in named]
    rest = sum(share.critical for name, share in shares.items() if name not in named)
    if len(named) < len(shares):
        handles.append(Patch(color=_REST, label=f"all others: {rest * scale:.3g} {unit}"))
    handles.append(Patch(color=_CRITICAL, label="critical path"))
    title = "on the critical path in the whole step"
    figure.legend(
        handles=handles, loc="lower center", ncols=4, fontsize=8, frameon=False, title=title, title_fontsize=8
    )


def _scale(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e6, "µs"
