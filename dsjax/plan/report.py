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


def to_json(
    plan: Plan, model: str, rows: int, outcomes: Sequence[SimulationOutcome] = (), sweeps: Sequence[Sweep] = ()
) -> dict[str, Any]:
    """Return the fields of `dsjax plan --json`; a figure is `Figure.to_json`.

    - `model`, `cluster`, `devices`; `layouts_considered`, `layouts_too_large`: numbers of layouts
    - `ranked`: deployments that meet the objectives, `Candidate.to_json` with `bottleneck`
    - `missed`: if none does, the nearest, with `misses`: objective → how many times too slow
    - `frontier`, `frontier_late`: the Pareto front, and deployments that would be on it if they met the TTFT
    - `forbidden`: `Forbidden`; `with_64_times_everything` is its `floor`
    - `winner`: `recipe`, or null; `calibrated`: `calibrated` of the winner, or null
    - `sweeps`: `Sweep.to_json`; `simulation`: `SimulationOutcome.to_json` of each load; `compiled`: `DryRunUsage.to_json`

    `dsjax plan step` writes `model`, `cluster`, `mode`, `ranked` and `compiled`.
    """
    question, shared, winner = plan.question, {}, plan.winner

    def row(candidate: Candidate) -> dict[str, Any]:
        first = bottlenecks(candidate, shared)[0]
        return {**candidate.to_json(), "bottleneck": {"resource": first.resource, "gain_if_doubled": first.gain}}

    return {
        "model": model,
        "cluster": question.cluster.name,
        "devices": question.devices + (question.cluster.prefill.num_devices if question.cluster.prefill else 0),
        "layouts_considered": len(plan.considered),
        "layouts_too_large": len(plan.too_large),
        "ranked": [row(c) for c in plan.ranked[:rows]],
        "missed": [{**row(c), "misses": c.misses(question.bounds)} for c in plan.missed[: 0 if winner else rows]],
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
    _print(console, _first_screen(plan, model, rows))


def details(console: Console, plan: Plan, model: str, rows: int) -> None:
    """Print the rest of a plan: every figure of the rows, and the winner's memory, cost, start and notes."""
    _print(console, _rows(plan, rows))
    if plan.winner is not None:
        engine = plan.question.options.engine.name
        _print(console, _of_winner(plan.winner, recipe(model, plan.question, plan.winner), engine))


def _print(console: Console, lines: Iterable[str | Text | Table]) -> None:
    for line in lines:
        shown = Text(line) if isinstance(line, str) else line
        console.print(shown, soft_wrap=shown.style == _COMMAND)


def _first_screen(plan: Plan, model: str, rows: int) -> Iterator[str | Text | Table]:
    question, winner, cluster = plan.question, plan.winner, plan.question.cluster
    yield (
        f"{model} in {question.options.precision.name} on {cluster.name} ({question.devices} {cluster.hardware.name}{_beside(plan)}): "
        f"{len(plan.considered)} layouts, {len(plan.too_large)} too large"
    )
    yield question.words
    yield from map(sentence, forbidden(plan))
    if shown := _shown(plan, rows):
        differ = len({one.devices for one in shown}) > 1
        names = ("<", "<<deployment", *[f"{_device(plan)}s"] * differ, "TTFT s", "TPOT ms", "tokens/s", "interval")
        cells = [
            (mark, one.name() + _compiled(one), *[str(one.devices)] * differ)
            + (f"{one.ttft:,.2f}", f"{one.tpot * 1e3:,.1f}", f"{one.throughput:,.0f}")
            + (f"{one.throughput.low:,.0f}–{one.throughput.high:,.0f}",)
            for mark, one in zip(_marks(plan, shown), shown, strict=True)
        ]
        yield table(None, names, cells, box=None, padding=(0, 1, 0, 0))
        held = "✓ meets the objectives over the whole interval, ~ only by its estimate; " if question.bounded else ""
        yield Text(f"{held}≈ as row 1", "dim")
    if any(usage.used for usage in plan.usages) and len(plan.considered) > 1:
        yield Text("Rows marked compiled take memory, and for dsjax the time of a step, from a dry run.", "dim")
    if winner is None:
        return
    rate, tpot = _corrected(winner)
    sure = "never measured" if unseen(winner) else "corrected"  # by blind predictions, or by the worst of them
    yield f"winner, {sure}: {rate['text']}, TPOT {tpot['text']}"
    moves = ", ".join(str(one) for one in bottlenecks(winner)[:3] if one.gain > 1.01)
    yield f"limits: {f'{moves} with twice as much' if moves else 'nothing alone, by more than 1 %'}"
    made = recipe(model, question, winner)
    services = made["services"] if made["one_process"] is None else [made["one_process"]]
    yield from map(_command, services)
    hosts = "other hosts' commands, " * any(_other_hosts(service, question.options.engine.name) for service in services)
    notes = len(made["notes"])
    said = f"{notes} note{'s' * (notes > 1)}, " if notes else ""
    yield Text(f"{said}{hosts}memory, cold start, every figure: --explain plan", "dim")


def _rows(plan: Plan, rows: int) -> Iterator[str | Text | Table]:
    question, device, shared, shown = plan.question, _device(plan), {}, _shown(plan, rows)
    cells = [
        (
            mark,
            f"{one.name()}\n{one.decode.layout.kind}{_in_batches(one)}{_compiled(one)}",
            str(one.devices),
            f"{one.decode.requests(one.batch):g}",
            one.ttft.text(1, 2, TWO_LINES),
            one.tpot.text(1e3, 1, TWO_LINES),
            one.throughput.text(1, 0, TWO_LINES),
            one.per_device.text(1, 0, TWO_LINES),
            f"{one.per_user:.1f}",
            str(bottlenecks(one, shared)[0]),
        )
        for mark, one in zip(_marks(plan, shown), shown, strict=True)
    ]
    title = "meet the objectives, best first" if question.bounded else "most tokens a second first"
    names = ("<", "<deployment", f"{device}s", "batch", "TTFT s", "TPOT ms", "tokens/s", f"/{device}", "/user")
    yield f"{question.cluster.description}; a row's second lines: kind of layout, intervals"
    yield table(
        title if plan.winner else "none meets the objectives; nearest first", (*names, "<first bottleneck"), cells
    )
    yield Text(
        "TTFT is that of steady state. Prefill stands before a bar. +32: redundant experts. Bottleneck: more tokens/s with twice as "
        "much of it.",
        "dim",
    )


def _of_winner(winner: Candidate, made: Mapping[str, Any], engine: str) -> Iterator[Text]:
    about = {"corrected": _corrected(winner), "unlike": unseen(winner), "kinds": Kind(winner.throughput.kinds).words()}
    services = [(service, _command(service).plain, _other_hosts(service, engine)) for service in made["services"]]
    together = made["one_process"] and _command(made["one_process"]).plain
    about |= {"services": services, "together": together, "notes": made["notes"], "engine": engine}
    styles = {"$ ": _COMMAND, "! ": "yellow"}
    for line in filled("texts", "winner.txt", winner=winner, memory=winner.decode.memory, **about).splitlines():
        style = styles.get(line[:2], "")
        yield Text(line[2:] if style else line, style)


def _shown(plan: Plan, rows: int) -> list[Candidate]:
    return list(plan.ranked[:rows] if plan.winner else plan.missed[:rows])


def _command(service: Mapping[str, Any]) -> Text:
    many = f"  # {service['instances']} of these" if service["instances"] > 1 else ""
    return Text(service["command"] + many, _COMMAND)


def _other_hosts(service: Mapping[str, Any], engine: str) -> int:
    """Return the number of an instance's other hosts, which start with their own commands."""
    return len(service.get("launches", {}).get(engine, {}).get("commands", "1")) - 1


def _device(plan: Plan) -> str:
    return "GPU" if plan.question.cluster.hardware.platform == "cuda" else "chip"


def _beside(plan: Plan) -> str:
    """Describe the hosts of another kind that run prefill."""
    first = plan.question.cluster.prefill
    return "" if first is None else f" that decode, and {first.num_devices} {first.hardware.name} for prefill"


def _marks(plan: Plan, shown: Sequence[Candidate]) -> list[str]:
    """Return each row's number, whether it meets the objectives, and whether its tokens/s can be told apart from the first row's."""
    question, marks = plan.question, []
    for number, one in enumerate(shown, 1):
        sure = "✓" if one.meets(question.bounds, sure=True) else "~" if one.meets(question.bounds) else "✗"
        alike = number > 1 and not ratio_of(shown[0], one, "throughput").told_apart
        marks.append(f"{number}{f' {sure}' * question.bounded}{' ≈' * alike}")
    return marks


def _in_batches(candidate: Candidate) -> str:
    batches = candidate.decode.batches_in_turn(candidate.batch)
    return "" if batches == 1 else f", { {2: 'two', 3: 'three'}.get(batches, batches) } batches"


def _compiled(candidate: Candidate) -> str:
    return ", compiled" if candidate.decode.dry_runs or candidate.prefill.dry_runs else ""


def _corrected(winner: Candidate) -> list[dict[str, Any]]:
    """Return the winner's rate and TPOT as corrected by blind predictions, each with its text."""
    held, found = calibrated(winner), []
    for name, factor, digits, unit in (("output_tokens_per_s", 1, 0, "tokens/s"), ("tpot_s", 1e3, 1, "ms")):
        value, low, high = (f"{held[name][end] * factor:,.{digits}f}" for end in ("corrected", "low", "high"))
        found.append({**held[name], "text": f"{value} {unit} [{low}–{high}]"})
    return found


def show_usages(console: Console, usages: Sequence[DryRunUsage]) -> None:
    """Print what was taken from each dry run, or why nothing was."""
    for usage in usages:
        what = f"{usage.run.file} ({usage.run.mesh}, {usage.run.shape}, {usage.run.target}): "
        said = f"{what}{'taken' if usage.used else 'not used'}: {usage.text}"
        console.print(Text(said, "" if usage.used else "yellow"))


def sentence(reason: Forbidden) -> str:
    """Return why no candidate meets the objectives, and which hardware would."""
    would = ", or ".join(f"{_rounded_up(r.factor)} × {r.resource}" for r in reason.remedies[:4])
    return filled("texts", "forbidden.txt", **vars(reason), would=would, no_layout=NO_LAYOUT)


def _rounded_up(factor: float) -> str:
    """Round up to three digits, so that the objective certainly holds."""
    step = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / step - 1e-9) * step:.3g}"


def show_sweep(console: Console, sweep: Sweep) -> None:
    """Print a sweep as a table."""
    priced = any(point.best and point.best.cost for point in sweep.points)
    names = ("", "winner unchanged: tokens/s", "TPOT ms", "<best there", "tokens/s", "TPOT ms", "objectives")

    def figures(one: Candidate | None, absent: str) -> list[str]:
        return [one.throughput.text(1, 0, TWO_LINES), one.tpot.text(1e3, 1, TWO_LINES)] if one else [absent, ""]

    rows = []
    for point in sweep.points:
        best, met = point.best, "met" if point.met else "not met"
        there = [best.name() if best else "nothing fits", *figures(best, ""), met]
        cost = [best.cost.text(1, 2, TWO_LINES) if best and best.cost else ""] * priced
        rows.append([point.label, *figures(point.same, "cannot run"), *there, *cost])
    title = f"{sweep.quantity}, {sweep.unit} (now {sweep.now:g})"
    console.print(table(title, names + ("a million tokens",) * priced, rows))
