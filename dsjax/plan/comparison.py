"""`compare`: two or more layouts for one workload: figures, ratios with intervals, and the deciding inputs.

Layouts share most unknowns: kernels, links, expert skew. Shared draws cancel them in the ratio, so a ratio can be certain although the
intervals of both figures overlap. Errors of the model itself come from blind predictions: the measured ÷ predicted ratios of pairs of runs.
"""

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dsjax.errors import UserError
from dsjax.plan.calibration import RATE, TPOT, distance_of, ratio_calibration
from dsjax.plan.candidate import Candidate, recompute, with_intervals
from dsjax.plan.explain import amount, effects, label
from dsjax.plan.figure import LEVEL, Figure
from dsjax.plan.instance import Instance
from dsjax.plan.network import exchanged_rows
from dsjax.plan.precision import BF16
from dsjax.plan.question import Question
from dsjax.plan.recipe import read_recipe
from dsjax.plan.rules import refuse
from dsjax.plan.search import search
from dsjax.plan.workload import Pins
from dsjax.tables import table
from dsjax.texts import filled
from sharding.mesh import MeshSpec

DRAWS = 96
_LETTERS = string.ascii_uppercase
METRICS = {"throughput": RATE, "tpot": TPOT, "ttft": None}
"""Metric of a candidate → kind of blind predictions that calibrate its ratios; none exist for a steady-state TTFT."""
_MODULES = "dsjax bench modules --model MODEL --json modules.json; then --measured modules.json"
_NETWORK = "dsjax bench network --json network.json; then --network network.json"
_SETTLED_BY = {
    _MODULES: ("products", "attention", "kernels of a layer", "experts'", "launches"),
    _NETWORK: ("link", "network", "collective", "all-reduce", "copies", "connection", "kernels", "message"),
    "two recordings of expert loads; then --expert-skew FILE": ("busiest rank",),
    "dsjax bench serve with drafts; then --mtp-acceptance": ("tokens a step",),
}
"""Command that measures inputs, with the option that takes the measurement → words in the names of these inputs."""


@dataclass(frozen=True)
class Ratio:
    """First ÷ second layout in one metric. better: probability that the first is better. by: source of the interval."""

    metric: str
    value: Figure
    better: float
    by: str

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.value.low <= 1 <= self.value.high


@dataclass(frozen=True)
class Deciding:
    """An input that moves the ratio of rates. low, high: the ratio at the ends of its range. command: measures the input."""

    figure: Figure
    low: float
    high: float
    command: str


@dataclass(frozen=True)
class Pair:
    """The first layout against another one."""

    other: Candidate
    ratios: tuple[Ratio, ...]
    deciding: tuple[Deciding, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        ratios = {r.metric: {**r.value.to_json(), "better": r.better, "by": r.by} for r in self.ratios}
        deciding = [
            {"input": d.figure.name, "low": d.low, "high": d.high, "source": d.figure.source, "settle": d.command}
            for d in self.deciding
        ]
        return {"against": self.other.name(), "ratios": ratios, "deciding": deciding}


@dataclass(frozen=True)
class Comparison:
    """candidates: the layouts in the given order, with intervals. pairs: the first against each of the others."""

    question: Question
    candidates: tuple[Candidate, ...]
    pairs: tuple[Pair, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        sides = [
            {"deployment": c.name(), **c.to_json(), "bytes_a_step": link_bytes(c.decode, c.batch)}
            for c in self.candidates
        ]
        return {"cluster": self.question.cluster.name, "layouts": sides, "pairs": [p.to_json() for p in self.pairs]}


def estimate(question: Question, layout: str) -> Candidate:
    """Return the best deployment of one layout for a question, without intervals.

    layout: a mesh (`dp=32`), a prefill and a decode mesh (`tp=8|dp=24`), or a file of `dsjax plan recipe`, with its batch.

    Raises:
        UserError, MeshError: the layout does not match the cluster and the model, or does not fit.
    """
    if layout.endswith(".json"):
        return _of_recipe(question, Path(layout))
    *first, mesh = (MeshSpec.parse(part.strip()) for part in layout.split("|", 1))
    return _best(question, layout, Pins(first[0], mesh) if first else Pins(), None if first else mesh)


def _best(question: Question, layout: str, pins: Pins, mesh: MeshSpec | None, **options: Any) -> Candidate:
    modes = ("separated",) if pins.separated else ("aggregated",)
    options = dataclasses.replace(question.options, pins=pins, mesh=mesh, modes=modes, **options)
    plan = search(dataclasses.replace(question, options=options))
    found = [*plan.ranked.rows[:1], *plan.missed.rows[:1]]
    refuse("compared", found=found, too_large=plan.too_large, layout=layout, cluster=question.cluster.name)
    return found[0]


def _of_recipe(question: Question, file: Path) -> Candidate:
    told, pins = read_recipe(file)["expected"], Pins()
    try:
        mesh, first, count = MeshSpec.parse(told["mesh"]), told.get("prefill"), int(told["instances"])
        batch, redundant = float(told["batch_per_dp_rank"]), int(told["redundant_experts"])
        if first:
            pins = Pins(MeshSpec.parse(first["mesh"]), mesh, int(first["instances"]), count)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no recipe ({error!r} in expected); expected what dsjax plan recipe wrote"
        ) from error
    best = _best(question, str(file), pins, None if pins.separated else mesh, redundant=redundant)
    return recompute(dataclasses.replace(best, count=count), batch=batch / best.decode.layout.mesh.pp_size)


def compare(question: Question, layouts: Sequence[str], draws: int = DRAWS) -> Comparison:
    """Compare the first layout with each of the others. Raises `UserError` for fewer than two layouts, and the errors of `estimate`."""
    refuse("compare", layouts=layouts)
    candidates = tuple(with_intervals(estimate(question, layout), draws) for layout in layouts)
    first, *others = candidates
    return Comparison(question, candidates, tuple(_pair(first, other) for other in others))


def _pair(first: Candidate, other: Candidate) -> Pair:
    ranked = effects(lambda: recompute(first).throughput / recompute(other).throughput)[:3]
    usual = first.throughput / other.throughput
    deciding = tuple(Deciding(figure, usual * low, usual * high, settling(figure.name)) for figure, low, high in ranked)
    return Pair(other, tuple(ratio_of(first, other, metric) for metric in METRICS), deciding)


def ratio_of(first: Candidate, other: Candidate, metric: str) -> Ratio:
    """Return first ÷ other with the wider of two intervals: from shared draws, and from ratios of blind predictions."""
    at, kind = list(METRICS).index(metric), METRICS[metric]
    value, ratios = getattr(first, metric) / getattr(other, metric), first.draws[:, at] / other.draws[:, at]
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    by, distances = (f"{len(ratios)} draws, without the model's own error", {distance_of(first), distance_of(other)})
    known = kind and ratio_calibration(kind, distances.pop() if len(distances) == 1 else None)
    if known and known.high / known.low > high / low:
        by, ratios = f"how far ratios of {known.count} blind pairs were off", value * np.exp(known.errors)
        low, high = value * known.low, value * known.high
    better = float(np.mean(ratios > 1 if metric == "throughput" else ratios < 1))
    return Ratio(metric, Figure(value, min(low, value), max(high, value), first.throughput.kinds), better, by)


def settling(name: str) -> str:
    """Return the command that measures an input, with the option that takes the measurement."""
    found = (command for command, words in _SETTLED_BY.items() if any(word in name for word in words))
    return next(found, "dsjax bench serve of both layouts: the ratio itself")


def link_bytes(instance: Instance, batch: float) -> dict[str, float]:
    """Return the bytes that a device sends in one decode step over its scale-up link and over its share of the network.

    Counts dispatch and combine of all layers with even routing, and the all-reduces over `tp`: a ring within a scale-up domain, and NCCL's
    trees between domains, split over the domain's devices.
    """
    config, mesh, cluster = instance.config, instance.layout.unit.mesh, instance.cluster
    model, tokens = instance.step_models()[0], batch * (1 + instance.options.drafts)
    sent = {"scale_up": 0.0, "network": 0.0}
    if mesh.tp_size > 1:
        summed = 4 * config.num_hidden_layers * tokens * config.hidden_size * BF16
        near = min(cluster.domain, mesh.tp_size)
        sent["scale_up"] += summed * (near - 1) / near
        sent["network"] += summed / near * (1 - near / mesh.tp_size)
    ranks = instance.layout.experts or mesh.ep_size
    if ranks > 1 and config.is_moe and not model.sums_experts:
        rows, top_k = tokens / mesh.tp_size, config.num_experts_per_tok
        method = model.dispatch if model.dispatch == "deepep" else model.own_method(rows)
        each = rows * top_k / ranks if method == "deepep" else exchanged_rows(method, rows, top_k, ranks)
        layer = each * config.hidden_size * (instance.options.precision.wire + BF16)
        near = min(cluster.domain, ranks)
        sent["scale_up"] += layer * (near - 1) * config.num_moe_layers
        sent["network"] += layer * (ranks - near) * config.num_moe_layers
    return {link: size for link, size in sent.items() if math.isfinite(size)}


def show(console: Console, comparison: Comparison) -> None:
    """Print the layouts side by side, and for each pair the ratios and the deciding inputs."""
    question = comparison.question
    names = ["<<", *(f"{letter}: {one.name()}" for letter, one in zip(_LETTERS, comparison.candidates, strict=False))]
    rows = [(title, *map(text, comparison.candidates)) for title, text in _ROWS.items()]
    console.print(table(f"{question.cluster.name}, {question.words}", names, rows))
    console.print(f"[low … high]: 90 % of {DRAWS} draws of all assumptions", style="dim", markup=False)
    if len({round(one.concurrency) for one in comparison.candidates}) > 1:
        console.print(
            "their loads differ, each has as many requests as pay: --max-concurrency gives all the same", style="dim"
        )
    for letter, pair in zip(_LETTERS[1:], comparison.pairs, strict=False):
        console.print(f"A ÷ {letter}, with 90 % intervals:", style="bold")
        ends = [end for one in pair.deciding for end in (one.low, one.high)]
        about = {"reverses": ends and min(ends) < 1 < max(ends), "label": label, "amount": amount}
        console.print(Text(filled("texts", "pair.txt", pair=pair, letter=letter, **about)))


def _megabytes(candidate: Candidate, link: str) -> str:
    return f"{link_bytes(candidate.decode, candidate.batch)[link] / 1e6:,.1f}"


_ROWS: dict[str, Callable[[Candidate], str]] = {
    "devices": lambda c: str(c.devices),
    "requests in flight": lambda c: f"{c.concurrency:,.0f}",
    "of a DP rank, of at most": lambda c: "{:g} of {:g}".format(*map(c.decode.requests, (c.batch, c.decode.max_batch))),
    "output tokens/s": lambda c: c.throughput.text(),
    "a device": lambda c: c.per_device.text(),
    "TPOT ms": lambda c: c.tpot.text(1e3, 1),
    "TTFT s": lambda c: c.ttft.text(digits=2),
    "weights, GB a device": lambda c: f"{c.decode.memory.weights_total / 1e9:.1f}",
    "KV cache, tokens of a DP rank": lambda c: c.decode.cache_tokens.text(),
    "MB sent a decode step, scale-up": lambda c: _megabytes(c, "scale_up"),
    "MB sent a decode step, network": lambda c: _megabytes(c, "network"),
}
"""Title of each line of the table → its text for a layout."""
