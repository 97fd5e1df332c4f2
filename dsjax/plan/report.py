"""A plan on the terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsjax.plan.calibration import calibrated
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.comparison import ratio_of
from dsjax.plan.dry_runs import DryRunUsage
from dsjax.plan.figure import TWO_LINES, Kind
from dsjax.plan.limits import Forbidden, bottlenecks, forbidden
from dsjax.plan.recipe import recipe
from dsjax.plan.search import NO_LAYOUT, Plan
from dsjax.plan.sweep import Sweep

if TYPE_CHECKING:  # brings the engine's scheduler in, which a plan that plays nothing does without
    from dsjax.plan.simulation.outcome import SimulationOutcome


def to_json(
    plan: Plan, model: str, rows: int, sweeps: list[Sweep], outcomes: Sequence[SimulationOutcome] = ()
) -> dict[str, Any]:
    """`{"cluster", "devices", "layouts_considered", "layouts_too_large", "ranked", "missed", "frontier", "frontier_late",
    "forbidden", "winner", "calibrated", "sweeps", "simulation", "compiled"}`."""
    question, shared = plan.question, {}
    return {
        "model": model,
        "cluster": question.cluster.name,
        "devices": question.devices + (question.cluster.prefill.num_devices if question.cluster.prefill else 0),
        "layouts_considered": len(plan.considered),
        "layouts_too_large": len(plan.too_large),
        "ranked": [_with_bottleneck(c, shared) for c in plan.ranked[:rows]],
        "missed": [
            {**_with_bottleneck(c, shared), "misses": c.misses(question.bounds)}
            for c in plan.missed[: 0 if plan.winner else rows]
        ],
        "frontier": [c.to_json() for c in plan.frontier],
        "frontier_late": [c.to_json() for c in plan.late],
        "forbidden": [
            {
                "bound": f.bound,
                "wanted": f.wanted,
                "best": f.best,
                "by": f.by,
                "with_64_times_everything": f.floor,
                "remedies": [{"resource": r.resource, "factor": r.factor} for r in f.remedies],
            }
            for f in forbidden(plan)
        ],
        "winner": recipe(model, question, plan.winner) if plan.winner else None,
        "calibrated": calibrated(plan.winner) if plan.winner else None,
        "sweeps": [s.to_json() for s in sweeps],
        "simulation": [o.to_json() for o in outcomes],
        "compiled": [u.to_json() for u in plan.usages],
    }


def _beside(cluster: Cluster) -> str:
    """Hosts of another kind: that compute prompts, or that have experts."""
    first, experts = cluster.prefill, cluster.experts
    if experts is not None:
        return f", and {experts.num_devices} {experts.hardware.name} for experts"
    return "" if first is None else f" that decode, and {first.num_devices} {first.hardware.name} for prefill"


def _with_bottleneck(candidate: Candidate, shared: dict) -> dict[str, Any]:
    first = bottlenecks(candidate, shared)[0]
    return {**candidate.to_json(), "bottleneck": {"resource": first.resource, "gain_if_doubled": first.gain}}


def show(console: Console, plan: Plan, model: str, rows: int) -> None:
    """The ranked table, the first bottlenecks, and the winner's commands; or what forbids a winner."""
    question = plan.question
    console.print(
        f"[bold]{model}[/bold] on [bold]{question.cluster.name}[/bold] ({question.cluster.description}; {question.devices} devices"
        f"{_beside(question.cluster)}), "
        f"{question.options.precision.name}: {len(plan.considered)} layouts, {len(plan.too_large)} of them too large for "
        "memory and one request",
        highlight=False,
    )
    console.print(plan.question.words, highlight=False)
    show_usages(console, plan.usages)
    if any(usage.used for usage in plan.usages) and len(plan.considered) > 1:
        console.print(
            "Rows marked compiled count what XLA's program does beyond the published kernels; the others do not. Compare like "
            "with like, or give --mesh.",
            style="dim",
        )
    if plan.winner:
        _table(
            console,
            "meet the objectives, best first" if plan.question.bounded else "most tokens a second first",
            plan,
            plan.ranked[:rows],
        )
        _show_winner(console, plan, model)
        return
    for reason in forbidden(plan):
        console.print(Text(sentence(reason)), highlight=False)
    if plan.missed:
        _table(console, "none meets the objectives; nearest first", plan, plan.missed[:rows])


def show_usages(console: Console, usages: Sequence[DryRunUsage]) -> None:
    """What was taken of each dry run, or why nothing was."""
    for usage in usages:
        what = f"{usage.run.file} ({usage.run.mesh}, {usage.run.shape}, {usage.run.target}): "
        console.print(
            Text(what + ("taken: " if usage.used else "not used: ") + usage.text, "" if usage.used else "yellow")
        )


def _table(console: Console, title: str, plan: Plan, candidates: list[Candidate]) -> None:
    device = "GPU" if plan.question.cluster.hardware.platform == "cuda" else "chip"
    objective, shared = plan.question.bounds, {}
    alike = {
        number
        for number, one in enumerate(candidates[1:], 2)
        if not ratio_of(candidates[0], one, "throughput").told_apart
    }
    table = Table(title=title, title_justify="left")
    for name in (
        "", "deployment", f"{device}s", "batch", "TTFT s", "TPOT ms", "tokens/s", f"/{device}", "/user", "first bottleneck"
    ):  # fmt: skip
        table.add_column(
            name, justify="left" if name in ("", "deployment", "first bottleneck") else "right", no_wrap=True
        )
    for number, candidate in enumerate(candidates, 1):
        sure = "✓" if candidate.meets(objective, sure=True) else "~" if candidate.meets(objective) else "✗"
        table.add_row(
            (f"{number} {sure}" if plan.question.bounded else f"{number}") + (" ≈" if number in alike else ""),
            f"{candidate.name()}\n{candidate.decode.layout.kind}"
            + _in_batches(candidate)
            + (", compiled" if candidate.decode.dry_runs or candidate.prefill.dry_runs else ""),
            str(candidate.devices),
            f"{candidate.decode.requests(candidate.batch):g}",
            candidate.ttft.text(1, 2, TWO_LINES),
            candidate.tpot.text(1e3, 1, TWO_LINES),
            candidate.throughput.text(1, 0, TWO_LINES),
            candidate.per_device.text(1, 0, TWO_LINES),
            f"{candidate.per_user:.1f}",
            str(bottlenecks(candidate, shared)[0]),
        )
    console.print(table)
    holds = (
        "✓ holds at the unfavourable end of the interval, ~ at the middle estimate, ✗ does not; second lines: interval, kind. "
        if plan.question.bounded
        else "Second lines: interval, kind. "
    )
    console.print(
        f"{holds}≈: its tokens/s cannot be told from the first row's (dsjax plan compare says why). TTFT is that of steady state. "
        "Prefill stands before a bar. +32: redundant experts. Bottleneck: more tokens/s with twice as much of it.",
        style="dim",
    )


_WORDS = {2: "two", 3: "three"}


def _in_batches(candidate: Candidate) -> str:
    batches = candidate.decode.batches_in_turn(candidate.batch)
    return "" if batches == 1 else f", {_WORDS.get(batches, batches)} batches"


def _show_winner(console: Console, plan: Plan, model: str) -> None:
    winner = plan.winner
    console.print(f"[bold]winner[/bold]: {winner.name()}, {winner.mode}", highlight=False)
    memory = winner.decode.memory
    aside = memory.reserve
    console.print(
        f"a device: {memory.weights_total / 1e9:.1f} GB weights (exact), {aside / 1e9:.1f} GB set aside, "
        f"room for {winner.decode.cache_tokens:,.0f} cached tokens "
        f"[{winner.decode.cache_tokens.low:,.0f} … {winner.decode.cache_tokens.high:,.0f}] a DP rank; "
        f"at most {winner.decode.max_batch} requests",
        highlight=False,
    )
    if winner.cost:
        cost, price = winner.cost, winner.decode.cluster.hardware.price_per_hour
        console.print(
            f"a million output tokens cost {cost:.3g} [{cost.low:.3g} … {cost.high:.3g}], at {price:g} a device and hour",
            highlight=False,
        )
    held = calibrated(winner)
    rate, tpot = held["output_tokens_per_s"], held["tpot_s"]
    console.print(
        f"corrected by blind predictions, with 90 % intervals: {rate['corrected']:,.0f} tokens/s [{rate['low']:,.0f} … "
        f"{rate['high']:,.0f}] (× {rate['correction']:.2f}; {rate['predictions']}: {rate['by']}), TPOT "
        f"{tpot['corrected'] * 1e3:,.1f} ms [{tpot['low'] * 1e3:,.1f} … {tpot['high'] * 1e3:,.1f}] "
        f"(× {tpot['correction']:.2f}; {tpot['predictions']}: {tpot['by']})",
        highlight=False,
    )
    console.print(
        f"TTFT {winner.ttft.low:,.2f} … {winner.ttft.high:,.2f} s is in steady state and not calibrated: no benchmark reports that. "
        "plan simulate --request-rate inf has the TTFT that one would report, with calibrated ends",
        highlight=False,
    )
    moves = [str(b) for b in bottlenecks(winner) if b.gain > 1.01][:3]
    console.print(
        "twice as much of one thing would give: " + ("; ".join(moves) or "nothing alone, by more than 1 %"),
        highlight=False,
    )
    console.print(
        f"throughput is {Kind(winner.throughput.kinds).words()}; --explain tpot shows its parts and what each assumption moves",
        highlight=False,
    )
    made = recipe(model, plan.question, winner)
    for service in made["services"]:
        console.print(f"{service['instances']} × {service['role']}:", highlight=False)
        console.print(Text("  " + service["command"], "green"), soft_wrap=True)
        hosts = max((len(one["commands"]) for one in service.get("launches", {}).values()), default=1)
        if hosts > 1 and plan.question.options.engine.name in service["launches"]:
            console.print(
                f"  … and on its {hosts - 1} other host{'s' * (hosts > 2)}: plan recipe FILE.sh has each",
                highlight=False,
            )
        start = service["cold_start_s"]
        console.print(
            f"  cold start: a host reads {service['weight_bytes_per_host'] / 1e9:,.0f} GB of weights in {start['value']:,.0f} s "
            f"[{start['low']:,.0f} … {start['high']:,.0f}] ({start['kind']}); programs are compiled beside that",
            highlight=False,
        )
        if service["recovery"] and plan.question.options.engine.name == "dsjax":
            console.print("  " + _recovery(service["recovery"], "--expert-mesh" in service["options"]), highlight=False)
    if made["one_process"] is not None:
        console.print("or all of it in one process of one host:", highlight=False)
        console.print(Text("  " + made["one_process"]["command"], "green"), soft_wrap=True)
    for note in made["notes"]:
        console.print(Text("note: " + note, "yellow"))


def _recovery(lost: Mapping[str, Any], apart: bool) -> str:
    """What the loss of a host costs an instance of several, in words. apart: experts have devices of their own."""
    time, compiling = lost["seconds"], lost["compiling_s"]
    when = "for compiling" if apart else "without --compile-ahead"
    return (
        f"a lost host: silent for {time['value']:,.0f} s [{time['low']:,.0f} … {time['high']:,.0f}], and {compiling['value']:,.0f} more "
        f"[{compiling['low']:,.0f} … {compiling['high']:,.0f}] {when}; at most "
        f"{lost['bytes_read']['value'] / 1e9:,.0f} GB are read"
    )


def sentence(reason: Forbidden) -> str:
    """Why, and at what hardware it would hold."""
    remedies = ", or ".join(f"{_rounded_up(r.factor)} × {r.resource}" for r in reason.remedies[:4])
    would = (
        f"It would hold with {remedies}."
        if remedies
        else "No multiple up to 64 of a resource, nor 8 × the hosts or devices, does."
    )
    if not remedies and reason.floor is not None:
        left = f"{reason.floor:,.0f} tokens/s" if reason.bound == "throughput" else f"{reason.floor * 1e3:,.1f} ms"
        would += f" With 64 × everything it is {left}: launches, host and other fixed costs remain."
    if reason.bound == "memory" and not reason.wanted:
        return NO_LAYOUT[0].upper() + NO_LAYOUT[1:] + "."
    if reason.bound == "memory":
        return (
            f"memory forbids it: the smallest layout ({reason.by}) needs {reason.wanted / 1e9:.1f} GB a device for weights, one "
            f"request and what is set aside; a device has {reason.best / 1e9:.1f} GB. {would}"
        )
    if reason.bound == "concurrency":
        held = f"caches hold {reason.best:g} at most, with {reason.by}"
        return f"memory forbids it: {reason.wanted:g} requests at once wanted, {held}. {would}"
    if reason.bound == "devices" and not reason.by:
        return "memory forbids it: the hosts for prefill have room for the weights and one request in no layout."
    if reason.bound == "devices":
        return (
            f"prefill and decode do not fit beside each other: {reason.by} takes {reason.wanted:g} devices, the smallest instances for "
            f"which there is memory; {reason.best:g} are at hand. {would} --mode aggregated has both in one instance."
        )
    if reason.bound == "throughput":
        return f"throughput forbids it: {reason.wanted:,.0f} tokens/s wanted, {reason.best:,.0f} at best, by {reason.by}. {would}"
    if reason.bound == "together":
        return f"each objective can be met, but not together; nearest is {reason.by}. {would}"
    return (
        f"{reason.bound.upper()} forbids it: {reason.wanted * 1e3:,.10g} ms wanted, {reason.best * 1e3:,.1f} ms at best, by {reason.by}. "
        f"{would}"
    )


def _rounded_up(factor: float) -> str:
    """Three digits, with which it certainly holds."""
    step = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / step - 1e-9) * step:.3g}"


def show_sweep(console: Console, sweep: Sweep) -> None:
    """A sweep as a table."""
    table = Table(title=f"{sweep.quantity}, {sweep.unit} (now {sweep.now:g})", title_justify="left")
    priced = any(point.best and point.best.cost for point in sweep.points)
    names = ("", "winner unchanged: tokens/s", "TPOT ms", "best there", "tokens/s", "TPOT ms", "objectives")
    for name in (*names, "a million tokens") if priced else names:
        table.add_column(name, justify="left" if name == "best there" else "right")
    for point in sweep.points:
        same, best = point.same, point.best
        cells = [
            point.label,
            same.throughput.text(1, 0, TWO_LINES) if same else "cannot run",
            same.tpot.text(1e3, 1, TWO_LINES) if same else "",
            best.name() if best else "nothing fits",
            best.throughput.text(1, 0, TWO_LINES) if best else "",
            best.tpot.text(1e3, 1, TWO_LINES) if best else "",
            "met" if point.met else "not met",
        ]
        table.add_row(*cells, *([best.cost.text(1, 2, TWO_LINES) if best and best.cost else ""] if priced else []))
    console.print(table)
