"""Output of a plan: the first screen on the terminal, all details (`--explain plan`), and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsjax.plan.calibration import calibrated, unseen
from dsjax.plan.candidate import Candidate
from dsjax.plan.comparison import ratio_of
from dsjax.plan.figure import TWO_LINES, Kind
from dsjax.plan.limits import Forbidden, bottlenecks, forbidden
from dsjax.plan.program import DryRunUsage
from dsjax.plan.recipe import recipe
from dsjax.plan.search import NO_LAYOUT, Plan
from dsjax.plan.sweep import Sweep
from dsjax.tables import table
from dsjax.texts import filled

if TYPE_CHECKING:  # imports the engine's scheduler, which a plan without simulation does not need
    from dsjax.plan.simulation.outcome import SimulationOutcome


_COMMAND = "green"
"""Style of a shell command line, which must not be wrapped."""
_LINE_STYLES = {"$ ": _COMMAND, "! ": "yellow"}
"""Prefix of a line in the template `winner.txt` → its style. The prefix is not printed."""


def to_json(
    plan: Plan, model: str, rows: int, outcomes: Sequence[SimulationOutcome] = (), sweeps: Sequence[Sweep] = ()
) -> dict[str, Any]:
    """Return the fields of `dsjax plan --json`; a figure is `Figure.to_json`.

    - `model`, `cluster`, `devices`; `layouts_considered`, `layouts_too_large`: numbers of layouts
    - `ranked`: deployments that meet the objectives, `Candidate.to_json` with `bottleneck`
    - `missed`: if none does, the nearest, with `misses`: objective → how many times too slow
    - `frontier`, `frontier_late`: the Pareto front, and deployments that would be on it if they met the TTFT
    - `forbidden`: why no deployment meets the objectives: the fields of `Forbidden` for each reason; empty if there is a winner
    - `winner`: `recipe`, or null; `calibrated`: `calibrated` of the winner, or null
    - `sweeps`: `Sweep.to_json`; `simulation`: `SimulationOutcome.to_json` of each load; `compiled`: `DryRunUsage.to_json`

    `dsjax plan step` writes `model`, `cluster`, `mode`, `ranked` and `compiled`.
    """
    question = plan.question
    prices = {}
    winner = plan.winner
    prefill_hosts = question.cluster.prefill

    def row(candidate: Candidate) -> dict[str, Any]:
        first = bottlenecks(candidate, prices)[0]
        return {**candidate.to_json(), "bottleneck": {"resource": first.resource, "gain_if_doubled": first.gain}}

    missed = [] if winner else [{**row(c), "misses": c.misses(question.all_objectives)} for c in plan.missed[:rows]]
    return {
        "model": model,
        "cluster": question.cluster.name,
        "devices": question.devices + (prefill_hosts.num_devices if prefill_hosts else 0),
        "layouts_considered": len(plan.considered),
        "layouts_too_large": len(plan.too_large),
        "ranked": [row(c) for c in plan.ranked[:rows]],
        "missed": missed,
        "frontier": [c.to_json() for c in plan.frontier],
        "frontier_late": [c.to_json() for c in plan.late],
        "forbidden": [dataclasses.asdict(reason) for reason in forbidden(plan)],
        "winner": recipe(model, question, winner) if winner else None,
        "calibrated": calibrated(winner) if winner else None,
        "sweeps": [s.to_json() for s in sweeps],
        "simulation": [o.to_json() for o in outcomes],
        "compiled": [u.to_json() for u in plan.usages],
    }


def show(console: Console, plan: Plan, model: str, rows: int) -> None:
    """Print the first screen: the question, the best rows, the winner's commands and its bottlenecks; or why there is no winner."""
    show_usages(console, plan.usages)
    _print(console, _question_lines(plan, model))
    if candidates := _best_candidates(plan, rows):
        _print(console, _summary_table(plan, candidates))
    if any(usage.used for usage in plan.usages) and len(plan.considered) > 1:
        note = "Rows marked compiled take memory, and for dsjax the time of a step, from a dry run."
        _print(console, [Text(note, "dim")])
    if plan.winner is not None:
        _print(console, _winner_summary(plan, plan.winner, model))


def details(console: Console, plan: Plan, model: str, rows: int) -> None:
    """Print the rest of a plan: every figure of the rows, and the winner's memory, cost, start and notes."""
    _print(console, _full_table(plan, _best_candidates(plan, rows)))
    if plan.winner is not None:
        _print(console, _winner_details(plan, plan.winner, model))


def _print(console: Console, lines: Iterable[str | Text | Table]) -> None:
    for line in lines:
        renderable = Text(line) if isinstance(line, str) else line
        console.print(renderable, soft_wrap=renderable.style == _COMMAND)


def _best_candidates(plan: Plan, rows: int) -> list[Candidate]:
    """Return the candidates to show: the best that meet the objectives, or if none does, the nearest."""
    return list(plan.ranked[:rows] if plan.winner else plan.missed[:rows])


def _question_lines(plan: Plan, model: str) -> Iterator[str]:
    """Describe the question, and why no candidate answers it if that is so."""
    question = plan.question
    cluster = question.cluster
    hosts = f"{question.devices} {cluster.hardware.name}"
    if cluster.prefill is not None:
        hosts += f" that decode, and {cluster.prefill.num_devices} {cluster.prefill.hardware.name} for prefill"
    yield (
        f"{model} in {question.options.precision.name} on {cluster.name} ({hosts}): "
        f"{len(plan.considered)} layouts, {len(plan.too_large)} too large"
    )
    yield question.description
    yield from map(sentence, forbidden(plan))


def _summary_table(plan: Plan, candidates: Sequence[Candidate]) -> Iterator[Table | Text]:
    """Return the table of the first screen and its legend. It has a column of devices only if the candidates differ in them."""
    columns: dict[str, list[str]] = {
        "<": _marks(plan, candidates),
        "<<deployment": [c.name() + _compiled(c) for c in candidates],
    }
    if len({c.devices for c in candidates}) > 1:
        columns[f"{_device(plan)}s"] = [str(c.devices) for c in candidates]
    columns |= {
        "TTFT s": [f"{c.ttft:,.2f}" for c in candidates],
        "TPOT ms": [f"{c.tpot * 1e3:,.1f}" for c in candidates],
        "tokens/s": [f"{c.throughput:,.0f}" for c in candidates],
        "interval": [f"{c.throughput.low:,.0f}–{c.throughput.high:,.0f}" for c in candidates],
    }
    yield table(None, columns, zip(*columns.values(), strict=True), box=None, padding=(0, 1, 0, 0))
    legend = "≈ as row 1"
    if plan.question.has_objectives:
        legend = f"✓ meets the objectives over the whole interval, ~ only by its estimate; {legend}"
    yield Text(legend, "dim")


def _winner_summary(plan: Plan, winner: Candidate, model: str) -> Iterator[str | Text]:
    """Describe the winner: calibrated figures, bottlenecks, the commands that start it, and what `--explain plan` adds."""
    rate, tpot = _corrected(winner)
    basis = "never measured" if unseen(winner) else "corrected"  # by blind predictions, or by the worst of them
    yield f"winner, {basis}: {rate['text']}, TPOT {tpot['text']}"
    limits = ", ".join(str(bottleneck) for bottleneck in bottlenecks(winner)[:3] if bottleneck.gain > 1.01)
    yield f"limits: {limits} with twice as much" if limits else "limits: nothing alone, by more than 1 %"
    launch = recipe(model, plan.question, winner)
    services = [launch["one_process"]] if launch["one_process"] else launch["services"]
    yield from map(_command, services)
    more = ["memory", "cold start", "every figure"]
    if any(_num_other_hosts(service, plan.question.options.engine.name) for service in services):
        more.insert(0, "other hosts' commands")
    if notes := len(launch["notes"]):
        more.insert(0, f"{notes} note{'s' if notes > 1 else ''}")
    yield Text(f"{', '.join(more)}: --explain plan", "dim")


def _full_table(plan: Plan, candidates: Sequence[Candidate]) -> Iterator[str | Text | Table]:
    question = plan.question
    device = _device(plan)
    prices = {}
    columns = {
        "<": _marks(plan, candidates),
        "<deployment": [f"{c.name()}\n{c.decode.layout.kind}{_in_batches(c)}{_compiled(c)}" for c in candidates],
        f"{device}s": [str(c.devices) for c in candidates],
        "batch": [f"{c.decode.requests(c.batch):g}" for c in candidates],
        "TTFT s": [c.ttft.text(1, 2, TWO_LINES) for c in candidates],
        "TPOT ms": [c.tpot.text(1e3, 1, TWO_LINES) for c in candidates],
        "tokens/s": [c.throughput.text(1, 0, TWO_LINES) for c in candidates],
        f"/{device}": [c.per_device.text(1, 0, TWO_LINES) for c in candidates],
        "/user": [f"{c.per_user:.1f}" for c in candidates],
        "<first bottleneck": [str(bottlenecks(c, prices)[0]) for c in candidates],
    }
    title = "none meets the objectives; nearest first"
    if plan.winner:
        title = "meet the objectives, best first" if question.has_objectives else "most tokens a second first"
    yield f"{question.cluster.description}; a row's second lines: kind of layout, intervals"
    yield table(title, columns, zip(*columns.values(), strict=True))
    yield Text(
        "TTFT is that of steady state. Prefill stands before a bar. +32: redundant experts. Bottleneck: more tokens/s with twice as "
        "much of it.",
        "dim",
    )


def _winner_details(plan: Plan, winner: Candidate, model: str) -> Iterator[Text]:
    """Fill the template `winner.txt`: memory, cost, corrected figures, commands, cold start, notes."""
    launch = recipe(model, plan.question, winner)
    engine = plan.question.options.engine.name
    values = {"winner": winner, "memory": winner.decode.memory, "engine": engine, "notes": launch["notes"]}
    values |= {"corrected": _corrected(winner), "unlike": unseen(winner)}
    values["kinds"] = Kind(winner.throughput.kinds).words()
    values["services"] = [(s, _command(s).plain, _num_other_hosts(s, engine)) for s in launch["services"]]
    values["together"] = launch["one_process"] and _command(launch["one_process"]).plain
    for line in filled("texts", "winner.txt", **values).splitlines():
        style = _LINE_STYLES.get(line[:2], "")
        yield Text(line[2:] if style else line, style)


def _command(service: Mapping[str, Any]) -> Text:
    comment = f"  # {service['instances']} of these" if service["instances"] > 1 else ""
    return Text(service["command"] + comment, _COMMAND)


def _num_other_hosts(service: Mapping[str, Any], engine: str) -> int:
    """Return the number of an instance's hosts besides the first. Each starts with its own command."""
    launch = service.get("launches", {}).get(engine)
    return len(launch["commands"]) - 1 if launch else 0


def _device(plan: Plan) -> str:
    return "GPU" if plan.question.cluster.hardware.platform == "cuda" else "chip"


def _marks(plan: Plan, candidates: Sequence[Candidate]) -> list[str]:
    """Return each row's number, whether it meets the objectives, and ≈ if its tokens/s cannot be told apart from the first row's."""
    bounds = plan.question.all_objectives
    marks = []
    for number, candidate in enumerate(candidates, 1):
        words = [str(number)]
        if plan.question.has_objectives:
            words.append("✓" if candidate.meets(bounds, sure=True) else "~" if candidate.meets(bounds) else "✗")
        if number > 1 and not ratio_of(candidates[0], candidate, "throughput").is_decided:
            words.append("≈")
        marks.append(" ".join(words))
    return marks


def _in_batches(candidate: Candidate) -> str:
    """Describe the batches that a step interleaves; empty if there is only one."""
    batches = candidate.decode.batches_in_turn(candidate.batch)
    return "" if batches == 1 else f", { {2: 'two', 3: 'three'}.get(batches, batches) } batches"


def _compiled(candidate: Candidate) -> str:
    return ", compiled" if candidate.decode.dry_runs or candidate.prefill.dry_runs else ""


def _corrected(winner: Candidate) -> list[dict[str, Any]]:
    """Return the winner's rate and TPOT as corrected by blind predictions, each with its text."""
    fields = calibrated(winner)

    def with_text(name: str, factor: float, digits: int, unit: str) -> dict[str, Any]:
        value, low, high = (f"{fields[name][end] * factor:,.{digits}f}" for end in ("corrected", "low", "high"))
        return {**fields[name], "text": f"{value} {unit} [{low}–{high}]"}

    return [with_text("output_tokens_per_s", 1, 0, "tokens/s"), with_text("tpot_s", 1e3, 1, "ms")]


def show_usages(console: Console, usages: Sequence[DryRunUsage]) -> None:
    """Print what was taken from each dry run, or why nothing was."""
    for usage in usages:
        run = usage.run
        verdict = "taken" if usage.used else "not used"
        line = f"{run.file} ({run.mesh}, {run.shape}, {run.target}): {verdict}: {usage.text}"
        console.print(Text(line, "" if usage.used else "yellow"))


def sentence(reason: Forbidden) -> str:
    """Return why no candidate meets the objectives, and which hardware would."""
    would = ", or ".join(f"{_rounded_up(r.factor)} × {r.resource}" for r in reason.remedies[:4])
    return filled("texts", "forbidden.txt", **vars(reason), would=would, no_layout=NO_LAYOUT)


def _rounded_up(factor: float) -> str:
    """Round up to three digits, so that the objective certainly holds."""
    step = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / step - 1e-9) * step:.3g}"


def show_sweep(console: Console, sweep: Sweep) -> None:
    """Print a sweep as a table. It has a column of costs if devices have a price."""
    columns = ["", "winner unchanged: tokens/s", "TPOT ms", "<best there", "tokens/s", "TPOT ms", "objectives"]
    has_cost = any(point.best and point.best.cost for point in sweep.points)
    if has_cost:
        columns.append("a million tokens")

    def figures(candidate: Candidate | None, absent: str) -> list[str]:
        if candidate is None:
            return [absent, ""]
        return [candidate.throughput.text(1, 0, TWO_LINES), candidate.tpot.text(1e3, 1, TWO_LINES)]

    rows = []
    for point in sweep.points:
        best = point.best
        row = [point.label, *figures(point.same, "cannot run"), best.name() if best else "nothing fits"]
        row += [*figures(best, ""), "met" if point.met else "not met"]
        if has_cost:
            row.append(best.cost.text(1, 2, TWO_LINES) if best and best.cost else "")
        rows.append(row)
    console.print(table(f"{sweep.quantity}, {sweep.unit} (now {sweep.now:g})", columns, rows))
