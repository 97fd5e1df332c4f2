"""Derivations as text: each figure with its value, interval, kind and source, what it was made of below it."""

from __future__ import annotations

from dsjax.plan.candidate import Candidate
from dsjax.plan.figure import Figure, Kind, settled
from dsjax.plan.limits import on
from dsjax.plan.prompts import MEAN_OF_STEPS

EXPLAINED = ("tpot", "ttft", "throughput", "memory")


def explain(candidate: Candidate, what: str) -> str:
    """The derivation of one of `EXPLAINED` for a candidate."""
    lines = [f"{what} of {candidate.name()}, batch {candidate.batch:g} a DP rank"]
    if what == "memory":
        memory = candidate.decode.memory
        lines += [f"  {size / 1e9:10.3f} GB  {name}  (exact)" for name, size in memory.weights.items()]
        lines += [f"  {memory.weights_total / 1e9:10.3f} GB  weights  (exact)"]
        lines += [f"  {memory.cache_per_token:,} B  a cached token  (exact)"]
        return "\n".join([*lines, *derivation(memory.cache_tokens, 1)])
    return "\n".join([*lines, *derivation(getattr(candidate, what)), *_ranked(candidate, what), *_compiled(candidate)])


def widening(candidate: Candidate, what: str) -> list[tuple[str, float]]:
    """Each assumption below `ttft`, `tpot` or `throughput`, and by which share the interval would be narrower if its middle value were
    known to be right; the one that widens it most first."""
    cluster, mean = candidate.decode.cluster, (MEAN_OF_STEPS,)  # has a range of its own beside those of its parts
    whole: Figure = getattr(on(candidate, cluster), what)
    names = {
        part.name
        for part, _ in whole.walk()
        if part.name and part.kinds & Kind.ASSUMPTION and part.low < part.high and (not part.parts or part.name in mean)
    }
    shares = []
    for name in names:
        with settled(name):
            known: Figure = getattr(on(candidate, cluster), what)
        shares.append((name, 1 - (known.high - known.low) / (whole.high - whole.low)))
    return sorted(shares, key=lambda one: (-one[1], one[0]))


def _ranked(candidate: Candidate, what: str) -> list[str]:
    """The assumptions by how much they widen the interval; those that take less than a hundredth of it together in one line."""
    ranked = widening(candidate, what)
    shown = [(name, share) for name, share in ranked if share >= 0.01]
    if not ranked:
        return []
    lines = [f"the interval of {what} would be narrower by so much if an assumption were known:"]
    lines += [f"  {share:5.0%}  {name}" for name, share in shown]
    if len(shown) < len(ranked):
        lines.append(f"  under 1% each: {', '.join(sorted(name for name, share in ranked if share < 0.01))}")
    return lines


def _compiled(candidate: Candidate) -> list[str]:
    """The steps that were compiled: what the planner says of the same rows and context, and the timeline's prediction."""
    lines = []
    for instance in {id(i): i for i in (candidate.prefill, candidate.decode)}.values():
        for run in instance.dry_runs:
            said = f"the planner says {_interval(instance.compiled_step(run))}"
            predicted = f"its timeline {_interval(run.timeline)}" if run.timeline else "it has no timeline"
            lines.append(f"{run.file}: {run.shape}: {said}; {predicted}")
    return lines


def _interval(figure: Figure) -> str:
    low, value, high = (amount(end, "s") for end in (figure.low, figure.value, figure.high))
    return f"{value} [{low} … {high}] ({Kind(figure.kinds).words()})"


def derivation(figure: Figure, depth: int = 0) -> list[str]:
    """Lines; a figure that the same parent uses several times is shown once."""
    words = Kind(figure.kinds).words()
    certain = figure.low == figure.high
    interval = "" if certain else f"  [{amount(figure.low, figure.unit)} … {amount(figure.high, figure.unit)}]"
    source = "; ".join(text for text in (words, figure.source, figure.note) if text)
    lines = [f"{'  ' * depth}{amount(figure.value, figure.unit):>12}{interval}  {figure.name}  ({source})"]
    seen: set[tuple[str, float]] = set()
    for part in figure.parts:
        if (part.name, part.value) not in seen:
            seen.add((part.name, part.value))
            lines += derivation(part, depth + 1)
    return lines


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
