"""Why a figure is what it is: the parts of the steps that it is made of, the assumptions behind it, and what each of them moves."""

from __future__ import annotations

from collections.abc import Callable

from dsjax.plan.candidate import Candidate, moved
from dsjax.plan.figure import Draw, Figure, Kind, drawing

EXPLAINED = ("plan", "tpot", "ttft", "throughput", "memory")
"""`plan` is `report.details`."""
LABELS = {
    "a collective in a scale-up domain, fixed part": "latency of an XLA collective over the scale-up link",
    "a collective over the network, fixed part": "latency of an XLA collective over the network",
    "all-reduce between hosts, fixed part": "all-reduce latency between hosts",
    "all-reduce, fixed part": "all-reduce latency",
    "all-reduce, share of scale-up link": "all-reduce efficiency on the scale-up link",
    "attention": "attention kernel time",
    "bytes a second of dsjax's transfer": "KV transfer bandwidth",
    "carried over to this device": "kernel efficiency, carried over from another GPU",
    "combine, fixed part": "DeepEP combine latency",
    "combine, share of network": "DeepEP combine efficiency on the network",
    "combine, share of scale-up link": "DeepEP combine efficiency on the scale-up link",
    "dispatch, fixed part": "DeepEP dispatch latency",
    "dispatch, share of network": "DeepEP dispatch efficiency on the network",
    "dispatch, share of scale-up link": "DeepEP dispatch efficiency on the scale-up link",
    "driver, contexts, communication": "GPU memory of driver, contexts and NCCL",
    "element-wise share of bandwidth": "memory bandwidth efficiency of element-wise kernels",
    "experts' products": "grouped GEMM time",
    "front door": "HTTP and tokenization latency",
    "fused experts": "fused MoE kernel time",
    "graphs": "GPU memory of CUDA graphs",
    "host": "CPU overhead per step",
    "host, a pass of the MTP module": "CPU overhead per draft",
    "launches of a layer": "CPU launch overhead per layer, prefill",
    "low-latency kernels in one host": "DeepEP low-latency kernel time in one host",
    "normal kernels in one host": "DeepEP normal kernel time in one host",
    "normal kernels, fixed part": "DeepEP normal kernel latency",
    "normal kernels, share of network": "DeepEP normal kernel efficiency on the network",
    "normal kernels, share of scale-up link": "DeepEP normal kernel efficiency on the scale-up link",
    "products": "GEMM time",
    "prompts, mean of all steps": "decode stall by prefill",
    "share of an exchange that is copies": "share of an all-to-all that is copies",
    "share of the shared experts that is not hidden": "exposed share of the shared experts",
    "share of the shorter that is hidden": "two-batch overlap efficiency",
    "share of the transfer that is exposed": "exposed share of the KV transfer",
    "small kernels of a layer": "time of a small kernel (norm, routing, activation)",
    "spread experts": "MoE kernel time, whole experts",
    "step": "peak activation memory",
    "tokens a step": "tokens per step (draft acceptance)",
    "uneven prompts": "prefill imbalance over DP ranks",
    "whole engine ÷ its operations": "engine time ÷ sum of kernel times",
    "XLA's collectives, share of a link": "XLA collective efficiency on a link",
    "busiest rank ÷ mean": "expert imbalance (busiest rank ÷ mean)",
}
"""Name of an input → the field's name for it, where they differ."""


def label(figure: Figure) -> str:
    """The field's name for an input."""
    return LABELS.get(figure.name, figure.name)


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
