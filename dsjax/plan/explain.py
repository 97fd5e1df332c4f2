"""Why a figure is what it is: the parts of the steps that it is made of, the assumptions behind it, and what each of them moves."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable

from dsjax.plan.candidate import Candidate, moved
from dsjax.plan.figure import Draw, Figure, Kind, drawing
from dsjax.toml_files import bundled_text

EXPLAINED = ("plan", "tpot", "ttft", "throughput", "memory")
"""`plan` is `report.details`."""


@functools.cache
def labels() -> dict[str, str]:
    """Name of an input → the field's name for it, where they differ."""
    return tomllib.loads(bundled_text("input_labels.toml"))


def label(figure: Figure) -> str:
    """The field's name for an input."""
    return labels().get(figure.name, figure.name)


def explain(candidate: Candidate, what: str) -> str:
    """The derivation of `tpot`, `ttft`, `throughput` or `memory` of a candidate."""
    lines = [f"{what} of {candidate.name()}, batch {candidate.batch:g} a DP rank"]
    if what == "memory":
        memory = candidate.decode.memory
        lines += [f"  {size / 1e9:10.3f} GB  {name}  (exact)" for name, size in memory.weights.items()]
        lines += [f"  {memory.weights_total / 1e9:10.3f} GB  weights  (exact)"]
        lines += [f"  {memory.cache_per_token:,} B  a cached token  (exact)"]
        tokens = candidate.decode.cache_tokens
        lines += [f"  {tokens:,.0f} tokens of cache a DP rank [{tokens.low:,.0f} … {tokens.high:,.0f}]"]
        return "\n".join([*lines, *_effects(lambda: moved(candidate).decode.memory.cache_tokens)])
    lines += [f"{amount(getattr(candidate, what), 'tokens/s' if what == 'throughput' else 's'):>12}  {what}"]
    lines += _step("a decode step", candidate.decode.decode_parts(candidate.batch))
    if what != "tpot" or candidate.mode == "aggregated":
        lines += _step("a prefill step", candidate.prefill.prefill_parts(candidate.prefill_tokens))
    return "\n".join([*lines, *_effects(lambda: getattr(moved(candidate), what)), *_compiled(candidate)])


def _step(name: str, parts: dict[str, float]) -> list[str]:
    total = sum(parts.values())
    lines = [f"  {amount(total, 's'):>10}  {name}"]
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return lines + [f"  {amount(seconds, 's'):>10}  {seconds / total:5.0%}  {part}" for part, seconds in ranked]


def effects(compute: Callable[[], float]) -> list[tuple[Figure, float, float]]:
    """Each assumption and measurement that a result depends on, with the result at its low and at its high end ÷ the result; the one
    that moves it most first. Everything else stays at its middle value."""
    with drawing(Draw()) as middle:
        usual = compute()
    found = []
    for name, figure in middle.seen.items():
        if figure.low == figure.high:
            continue
        ends = []
        for place in (-1.0, 1.0):
            with drawing(Draw({name: place})):
                ends.append(compute() / usual)
        found.append((figure, *ends))
    return sorted(found, key=lambda one: (-abs(one[2] - one[1]), one[0].name))


def _effects(compute: Callable[[], float]) -> list[str]:
    """The inputs by how far they move the result; those that move it by less than 1 % are named only."""
    ranked = effects(compute)
    lines = ["the result × so much at either end of an input's range:"]
    small = []
    for figure, low, high in ranked:
        if max(abs(low - 1), abs(high - 1)) < 0.01:
            small.append(label(figure))
            continue
        ends = _interval(figure, figure.unit, f": {figure.source}")
        lines.append(f"  {low:.2f} … {high:.2f}  {label(figure)}: {ends}")
    if small:
        lines.append(f"  within 1 %: {', '.join(sorted(small))}")
    return lines


def _compiled(candidate: Candidate) -> list[str]:
    """The steps that were compiled: what the planner says of the same rows and context, and the timeline's prediction."""
    lines = []
    for instance in {id(i): i for i in (candidate.prefill, candidate.decode)}.values():
        for run in instance.dry_runs:
            predicted = f"its timeline {_interval(run.timeline, 's')}" if run.timeline else "it has no timeline"
            said = amount(instance.compiled_step(run), "s")
            lines.append(f"{run.file}: {run.shape}: the planner says {said}; {predicted}")
    return lines


def _interval(figure: Figure, unit: str, source: str = "") -> str:
    ends = f"{amount(figure, unit)} [{amount(figure.low, unit)} … {amount(figure.high, unit)}]"
    return f"{ends} ({Kind(figure.kinds).words()}{source})"


def amount(value: float, unit: str) -> str:
    """A value in a unit that reads well."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value * 1e6:.3g} µs"
    if unit == "B":
        return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()
