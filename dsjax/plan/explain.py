"""Derivation of a figure: the parts of its steps, the assumptions behind it, and the effect of each assumption."""

import functools
import itertools
import tomllib
from collections.abc import Callable

from dsjax.plan.candidate import Candidate, recompute
from dsjax.plan.figure import Draw, Figure, Kind, drawing
from dsjax.texts import filled
from dsjax.toml_files import bundled_text

EXPLAINED = ("plan", "tpot", "ttft", "throughput", "memory")
"""`plan` is `report.details`."""


@functools.cache
def labels() -> dict[str, str]:
    """Return name of an input → the field's name for it, where they differ."""
    return tomllib.loads(bundled_text("input_labels.toml"))


def label(figure: Figure) -> str:
    """Return the field's name for an input."""
    return labels().get(figure.name, figure.name)


def explain(candidate: Candidate, figure_name: str) -> str:
    """Return the derivation of `tpot`, `ttft`, `throughput` or `memory` of a candidate."""
    is_memory = figure_name == "memory"
    steps = {}
    compiled = []
    if not is_memory:
        steps["a decode step"] = candidate.decode.decode_parts(candidate.batch)
        if figure_name != "tpot" or candidate.mode == "aggregated":
            steps["a prefill step"] = candidate.prefill.prefill_parts(candidate.prefill_tokens)
        instances = {id(i): i for i in (candidate.prefill, candidate.decode)}.values()
        compiled = [(run, instance.compiled_step(run)) for instance in instances for run in instance.dry_runs]
    ranked = effects(
        lambda: (
            recompute(candidate).decode.memory.cache_tokens if is_memory else getattr(recompute(candidate), figure_name)
        )
    )
    moves = [max(abs(low - 1), abs(high - 1)) >= 0.01 for _, low, high in ranked]
    about = {
        "moving": list(itertools.compress(ranked, moves)),
        "small": sorted(label(figure) for (figure, *_), much in zip(ranked, moves, strict=True) if not much),
        "kinds": lambda figure: Kind(figure.kinds).words(),
    }
    about |= {"steps": steps, "compiled": compiled, "label": label, "amount": amount}
    return filled("texts", "explained.txt", candidate=candidate, what=figure_name, **about)


def effects(compute: Callable[[], float]) -> list[tuple[Figure, float, float]]:
    """Return each assumption and measurement that a result depends on, with the relative result at its low and at its high end, the
    largest effect first. All others stay at their middle values."""
    with drawing(Draw()) as middle:
        usual = compute()
    found = []
    for name, figure in middle.seen.items():
        if figure.low == figure.high:
            continue
        ends = []
        for end in (-1.0, 1.0):
            with drawing(Draw({name: end})):
                ends.append(compute() / usual)
        found.append((figure, *ends))
    return sorted(found, key=lambda one: (-abs(one[2] - one[1]), one[0].name))


def amount(value: float, unit: str) -> str:
    """Format a value in a readable unit."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value * 1e6:.3g} µs"
    if unit == "B":
        return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()
