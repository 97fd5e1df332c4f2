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
_MODULES = ("products", "attention", "kernels of a layer", "experts'", "launches")
_NETWORK = ("link", "network", "collective", "all-reduce", "copies", "connection", "kernels", "message")
_MEASURED_BY = {
    "dsjax bench modules --model MODEL --json modules.json; then --measured modules.json": _MODULES,
    "dsjax bench network --json network.json; then --network network.json": _NETWORK,
    "two recordings of expert loads; then --expert-skew FILE": ("busiest rank",),
    "dsjax bench serve with drafts; then --mtp-acceptance": ("tokens a step",),
}
"""Command that measures inputs, with the option that takes the measurement → words in the names of these inputs."""


@dataclass(frozen=True)
class Ratio:
    """First ÷ second layout in one metric."""

    metric: str
    value: Figure
    better: float  # probability that the first layout is better
    by: str  # source of the interval

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.value.low <= 1 <= self.value.high


@dataclass(frozen=True)
class Deciding:
    """An input that moves the ratio of rates."""

    figure: Figure
    low: float  # the ratio at the low end of the input's range
    high: float  # the ratio at the high end
    command: str  # command that measures the input


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
        return _estimate_recipe(question, Path(layout))
    meshes = [MeshSpec.parse(part.strip()) for part in layout.split("|", 1)]
    options = {"mesh": meshes[0]} if len(meshes) == 1 else {"pins": Pins(*meshes)}
    return _search_best(question, layout, **options)


def _search_best(question: Question, layout: str, **options: Any) -> Candidate:
    """Return the best deployment with these options. Raises `UserError` if none fits. layout: its name in that error."""
    modes = ("separated",) if "pins" in options else ("aggregated",)
    options = {"pins": Pins(), "mesh": None, "modes": modes, **options}
    plan = search(dataclasses.replace(question, options=dataclasses.replace(question.options, **options)))
    best = [*plan.ranked.rows[:1], *plan.missed.rows[:1]]
    refuse("compared", found=best, too_large=plan.too_large, layout=layout, cluster=question.cluster.name)
    return best[0]


def _estimate_recipe(question: Question, file: Path) -> Candidate:
    expected = read_recipe(file)["expected"]
    try:
        mesh = MeshSpec.parse(expected["mesh"])
        prefill = expected.get("prefill")
        count = int(expected["instances"])
        batch = float(expected["batch_per_dp_rank"])
        options: dict[str, Any] = {"redundant": int(expected["redundant_experts"])}
        if prefill:
            options["pins"] = Pins(MeshSpec.parse(prefill["mesh"]), mesh, int(prefill["instances"]), count)
        else:
            options["mesh"] = mesh
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no recipe ({error!r} in expected); expected what dsjax plan recipe wrote"
        ) from error
    best = _search_best(question, str(file), **options)
    return recompute(dataclasses.replace(best, count=count), batch=batch / best.decode.layout.mesh.pp_size)


def compare(question: Question, layouts: Sequence[str], draws: int = DRAWS) -> Comparison:
    """Compare the first layout with each of the others. Raises `UserError` for fewer than two layouts, and the errors of `estimate`."""
    refuse("compare", layouts=layouts)
    candidates = tuple(with_intervals(estimate(question, layout), draws) for layout in layouts)
    first, *others = candidates
    return Comparison(question, candidates, tuple(_pair(first, other) for other in others))


def _pair(first: Candidate, other: Candidate) -> Pair:
    ratio = first.throughput / other.throughput
    largest_effects = effects(lambda: recompute(first).throughput / recompute(other).throughput)[:3]
    deciding = tuple(Deciding(f, ratio * low, ratio * high, command_for(f.name)) for f, low, high in largest_effects)
    return Pair(other, tuple(ratio_of(first, other, metric) for metric in METRICS), deciding)


def ratio_of(first: Candidate, other: Candidate, metric: str) -> Ratio:
    """Return first ÷ other with the wider of two intervals: from shared draws, and from ratios of blind predictions."""
    column = list(METRICS).index(metric)
    kind = METRICS[metric]
    value = getattr(first, metric) / getattr(other, metric)
    ratios = first.draws[:, column] / other.draws[:, column]
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    by = f"{len(ratios)} draws, without the model's own error"
    if kind is not None:
        distance = distance_of(first)
        calibration = ratio_calibration(kind, distance if distance == distance_of(other) else None)
        if calibration.high / calibration.low > high / low:
            by = f"how far ratios of {calibration.count} blind pairs were off"
            ratios = value * np.exp(calibration.errors)
            low, high = value * calibration.low, value * calibration.high
    better = float(np.mean(ratios > 1 if metric == "throughput" else ratios < 1))
    return Ratio(metric, Figure(value, min(low, value), max(high, value), first.throughput.kinds), better, by)


def command_for(name: str) -> str:
    """Return the command that measures an input, with the option that takes the measurement."""
    commands = (command for command, words in _MEASURED_BY.items() if any(word in name for word in words))
    return next(commands, "dsjax bench serve of both layouts: the ratio itself")


def link_bytes(instance: Instance, batch: float) -> dict[str, float]:
    """Return the bytes that a device sends in one decode step over its scale-up link and over its share of the network.

    Counts dispatch and combine of all layers with even routing, and the all-reduces over `tp`: a ring within a scale-up domain, and NCCL's
    trees between domains, split over the domain's devices.
    """
    config, mesh, cluster = instance.config, instance.layout.unit.mesh, instance.cluster
    model = instance.step_models()[0]
    tokens = batch * (1 + instance.options.drafts)
    sent = {"scale_up": 0.0, "network": 0.0}
    if mesh.tp_size > 1:
        all_reduced = 4 * config.num_hidden_layers * tokens * config.hidden_size * BF16
        ranks_in_domain = min(cluster.domain, mesh.tp_size)
        sent["scale_up"] += all_reduced * (ranks_in_domain - 1) / ranks_in_domain
        sent["network"] += all_reduced / ranks_in_domain * (1 - ranks_in_domain / mesh.tp_size)
    ranks = instance.layout.experts or mesh.ep_size
    if ranks > 1 and config.is_moe and not model.sums_experts:
        rows = tokens / mesh.tp_size
        top_k = config.num_experts_per_tok
        method = model.dispatch if model.dispatch == "deepep" else model.own_method(rows)
        rows_per_rank = rows * top_k / ranks if method == "deepep" else exchanged_rows(method, rows, top_k, ranks)
        bytes_per_rank = rows_per_rank * config.hidden_size * (instance.options.precision.wire + BF16)
        ranks_in_domain = min(cluster.domain, ranks)
        sent["scale_up"] += bytes_per_rank * (ranks_in_domain - 1) * config.num_moe_layers
        sent["network"] += bytes_per_rank * (ranks - ranks_in_domain) * config.num_moe_layers
    return {link: size for link, size in sent.items() if math.isfinite(size)}


def show(console: Console, comparison: Comparison) -> None:
    """Print the layouts side by side, and for each pair the ratios and the deciding inputs."""
    question = comparison.question
    candidates = comparison.candidates
    columns = ["<<", *(f"{letter}: {c.name()}" for letter, c in zip(_LETTERS, candidates, strict=False))]
    rows = [(title, *map(text, candidates)) for title, text in _ROWS.items()]
    console.print(table(f"{question.cluster.name}, {question.description}", columns, rows))
    console.print(f"[low … high]: 90 % of {DRAWS} draws of all assumptions", style="dim", markup=False)
    if len({round(c.concurrency) for c in candidates}) > 1:
        console.print(
            "their loads differ, each has as many requests as pay: --max-concurrency gives all the same", style="dim"
        )
    for letter, pair in zip(_LETTERS[1:], comparison.pairs, strict=False):
        console.print(f"A ÷ {letter}, with 90 % intervals:", style="bold")
        ratios = [ratio for deciding in pair.deciding for ratio in (deciding.low, deciding.high)]
        facts = {"reverses": ratios and min(ratios) < 1 < max(ratios), "label": label, "amount": amount}
        console.print(Text(filled("texts", "pair.txt", pair=pair, letter=letter, **facts)))


def _megabytes(candidate: Candidate, link: str) -> str:
    return f"{link_bytes(candidate.decode, candidate.batch)[link] / 1e6:,.1f}"


_ROWS: dict[str, Callable[[Candidate], str]] = {
    "devices": lambda c: str(c.devices),
    "requests in flight": lambda c: f"{c.concurrency:,.0f}",
    "requests per DP rank": lambda c: "{:g} of {:g}".format(*map(c.decode.requests, (c.batch, c.decode.max_batch))),
    "output tokens/s": lambda c: c.throughput.text(),
    "a device": lambda c: c.per_device.text(),
    "TPOT ms": lambda c: c.tpot.text(1e3, 1),
    "TTFT s": lambda c: c.ttft.text(digits=2),
    "weights, GB a device": lambda c: f"{c.decode.memory.weights_total / 1e9:.1f}",
    "KV cache tokens per DP rank": lambda c: c.decode.cache_tokens.text(),
    "MB sent a decode step, scale-up": lambda c: _megabytes(c, "scale_up"),
    "MB sent a decode step, network": lambda c: _megabytes(c, "network"),
}
"""Title of each line of the table → its text for a layout."""
