"""Terminal tables for a dry run's report. Numbers are rounded only here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from dsjax.config.layers import kinds_of
from dsjax.dryrun.apart_report import ApartReport
from dsjax.dryrun.orders import OrderReport
from dsjax.dryrun.rebalance import ExpertMoves
from dsjax.dryrun.report import DryRunReport, ProgramReport, StagesReport
from dsjax.dryrun.timeline import Timeline, model_part
from dsjax.plan.figure import Figure, Kind
from dsjax.tables import table_of


def show_stages(console: Console, report: StagesReport) -> None:
    """Print the report of each stage, then all stages side by side."""
    for stage in report.stages:
        first, last = stage.request["layers"]
        console.rule(f"stage {stage.request['stage']}: layers {first} to {last}")
        show(console, stage)
    console.rule(f"mesh {report.mesh} = {report.devices} devices")
    console.print(_side_by_side(report))


def _side_by_side(report: StagesReport) -> Table:
    table = table_of(
        "stages, bytes of a device",
        "stage",
        "layers",
        "weights",
        "cache",
        "total",
        "handed on, of a DP rank",
        "step ms",
    )
    for stage in report.stages:
        r, memory = stage.request, stage.memory
        first, last = r["layers"]
        table.add_row(
            str(r["stage"]),
            f"{first} to {last}",
            f"{memory.weight_bytes:,}",
            f"{memory.cache:,}",
            f"{memory.total:,}",
            f"{r['hidden_bytes']:,}" if "hidden_bytes" in r else "–",
            f"{stage.timeline.step.value * 1e3:.2f}" if stage.timeline else "–",
        )
    return table


def show(console: Console, report: DryRunReport) -> None:
    """Print the whole report."""
    r = report.request
    attention = {kind.attention for kind, _ in kinds_of(report.compiled.step.config.layer_runs)}
    form = f"MLA {r['mla']}" if attention == {"mla"} else f"attention {', '.join(sorted(attention))}"
    console.print(
        f"[bold]{r['model']}[/bold]  mesh {r['mesh']} = {r['devices']} devices  target {r['target']}  {r['step']}: {r['batch']} rows × "
        f"{r['chunk']} of a DP rank, context {r['context']}, {form}, dispatch {r['dispatch']}, weights {r['weights']}",
        highlight=False,
    )
    console.print(
        "kernels: " + ", ".join(f"{operation} {name}" for operation, name in r["kernels"].items()), highlight=False
    )
    console.print(_parameters(report))
    console.print(_memory(report))
    for name, program in (("a step", report), *([("drafting after a step", report.drafts)] if report.drafts else [])):
        console.print(_collectives(program, name))
        console.print(_costs(program, name))
        if program.timeline:
            console.print(_timeline(program.timeline, name))
            console.print(_exchanges(program.timeline, name))
    console.print(
        f"lowered, compiled, read in {' + '.join(f'{seconds:.1f}' for seconds in report.seconds.values())} s",
        highlight=False,
    )
    if report.orders:
        for table in _orders(report.orders):
            console.print(table)
    if report.rebalance:
        console.print(_rebalance(report.rebalance))
    if report.fit:
        console.print(_fit(report))
    figures = report.timeline.assumed.figures() if report.timeline else ()
    show_notes(console, report, [figure for figure in figures if Kind.ASSUMPTION in Kind(figure.kinds)])


def show_notes(console: Console, report: DryRunReport | ApartReport, figures: Iterable[Figure]) -> None:
    """Print a report's assumptions, the assumed `figures` of its timeline, and its notes."""
    texts = [f"assumed: {assumption}" for assumption in report.assumptions.values()]
    for figure in figures:
        ends = f"({figure.low:.4g} – {figure.high:.4g})"
        texts.append(f"assumed: {figure.name} {figure.value:.4g} {ends}: {figure.source}")
    for text in (*texts, *(f"note: {note}" for note in report.notes)):
        console.print(f"[dim]{text}[/dim]", highlight=False)


def _parameters(report: DryRunReport) -> Table:
    table = table_of("parameters", "component", "parameters", "bytes a device")
    for name, count in sorted(report.parameters.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{count:,}", f"{report.memory.weights[name]:,}")
    table.add_section()
    table.add_row("all", f"{sum(report.parameters.values()):,}", f"{report.memory.weight_bytes:,}")
    return table


def _memory(report: DryRunReport) -> Table:
    memory = report.memory
    table = table_of("memory of a device", "", "bytes", "GB")
    rows = [
        ("weights", memory.weight_bytes),
        (f"cache ({report.cache_tokens:,} tokens of a DP rank)", memory.cache - memory.windows),
        ("page tables, sampling and other state", memory.state),
        ("inputs", memory.inputs),
        ("temporaries", memory.temporaries),
        ("outputs beside the cache", memory.outputs - memory.aliased),
    ]
    if memory.drafting > memory.temporaries + memory.outputs - memory.aliased:
        rows[4:] = [("temporaries and outputs of drafting, the larger program", memory.drafting)]
    if memory.staging:
        rows[4:4] = [("staging of experts that move", memory.staging)]
    if memory.moving > max(memory.drafting, memory.temporaries + memory.outputs - memory.aliased):
        rows[5:] = [("temporaries and outputs of moving experts, the largest program", memory.moving)]
    if memory.windows:
        rows[2:2] = [("window pages", memory.windows)]
    for name, size in rows:
        table.add_row(name, f"{size:,}", f"{size / 1e9:.2f}")
    table.add_section()
    table.add_row("all", f"{memory.total:,}", f"{memory.total / 1e9:.2f}")
    if report.hardware:
        room = report.hardware.memory_bytes
        style = "green" if memory.total <= room else "bold red"
        table.add_row(report.hardware.name, f"{room:,}", f"{room / 1e9:.2f}")
        table.add_row("used", f"[{style}]{memory.total / room:.1%}[/{style}]", "")
    if memory.host:
        table.add_row("beside it, in the host's memory for each device", f"{memory.host:,}", f"{memory.host / 1e9:.2f}")
    return table


def _collectives(program: ProgramReport, name: str) -> Table:
    table = table_of(
        f"collectives of {name}; bytes that a device sends in it",
        "kind", "part of the model", "axes", "array", "bytes", "times", "in host", "to others", "beside",
    )  # fmt: skip
    table.columns[1].justify = "left"
    rows: dict[tuple, float] = {}
    for collective in program.collectives:
        axes = collective.participants
        array = f"{collective.operand[0]}" + (f" × {len(collective.operand)}" if len(collective.operand) > 1 else "")
        beside = str(len(collective.beside)) if collective.asynchronous else "–"
        part = model_part(collective.op_name)
        sizes = (collective.operand_bytes, collective.bytes_inside, collective.bytes_between)
        key = (collective.kind, axes, array, *sizes, beside, part)
        rows[key] = rows.get(key, 0) + collective.times
    inside = between = 0.0
    for (kind, axes, array, operand, near, far, beside, part), times in rows.items():
        inside, between = inside + near * times, between + far * times
        table.add_row(
            kind,
            part,
            axes,
            array,
            size_text(operand),
            f"{times:g}",
            size_text(near * times),
            size_text(far * times),
            beside,
        )
    table.add_section()
    table.add_row("all", "", "", "", "", f"{sum(rows.values()):g}", size_text(inside), size_text(between), "")
    table.caption = "beside: operations scheduled between start and done; – synchronous"
    return table


def size_text(count: float) -> str:
    """Format bytes in the decimal unit that leaves one to three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _costs(program: ProgramReport, name: str) -> Table:
    costs = program.costs
    table = table_of(f"work of a device in {name}", "", "")
    table.add_row("operations of matrix products", f"{costs.flops / 1e12:.4g} T")
    for dtype, flops in costs.flops_by_dtype.items():
        table.add_row(f"  of {dtype}", f"{flops / 1e12:.4g} T")
    table.add_row("  in loops of unknown length (see assumptions)", f"{costs.flops_assumed / 1e12:.4g} T")
    table.add_row("routed experts' need, even routing (arithmetic)", f"{program.expert_flops / 1e12:.4g} T")
    table.add_row("bytes read and written", f"{costs.bytes / 1e9:.4g} GB")
    for target, times in costs.uncounted.items():
        table.add_row(f"  not counted: {target}", f"× {times:g}")
    return table


def _orders(orders: OrderReport) -> Iterator[Table]:
    """Yield two tables: sums that could depend on the layout or the batch, and sums that do not."""
    compared = f"compared with {', '.join(orders.against)}" if orders.against else "compared with no other program"
    open_ = table_of(
        f"sums whose order could depend on the layout or the batch; {compared}",
        "place", "made by", "terms", "order", "times", "depends on", "otherwise", "known",
    )  # fmt: skip
    fixed = table_of("sums whose order depends on neither", "place", "made by", "terms", "order", "times", "why")
    for table in (open_, fixed):
        for column in table.columns:
            column.justify, column.overflow = "left", "fold"
    for ordered_sum in orders.sums:
        place = ordered_sum.place if ordered_sum.program == "step" else f"{ordered_sum.program}: {ordered_sum.place}"
        terms = "?" if ordered_sum.sum.depth is None else f"{ordered_sum.sum.depth:,}"
        cells = (
            place,
            f"{ordered_sum.sum.computed_by}, {ordered_sum.sum.dtype}",
            terms,
            ordered_sum.sum.order or "?",
            f"{ordered_sum.times:g}",
        )
        if not ordered_sum.could_depend:
            compiler = "the compiler chose the same in all of them" if ordered_sum.sum.depends else ordered_sum.sum.why
            fixed.add_row(*cells, compiler)
            continue
        otherwise = "\n".join(
            f"{label}: {'; '.join(ways) or 'no sum here'}" for label, ways in ordered_sum.otherwise.items()
        )
        known = ordered_sum.known.name if ordered_sum.known else "[bold red]no[/bold red]"
        open_.add_row(*cells, ", ".join(ordered_sum.sum.depends), otherwise, known)
    known = {s.known.name: s.known for s in orders.sums if s.could_depend and s.known}
    open_.caption = "\n".join(f"{name}: {entry.why} To end it: {entry.remedy}" for name, entry in known.items())
    open_.caption_justify = "left"
    yield open_
    yield fixed


def _timeline(timeline: Timeline, name: str) -> Table:
    step, copies = timeline.step, timeline.exposed_copies
    also = f", {copies * 1e3:.3g} for copies and the host" if copies >= 1e-3 * step.value else ""
    table = table_of(
        f"{name} of {timeline.cluster.name}: {step.value * 1e3:.4g} ms ({step.low * 1e3:.4g} – {step.high * 1e3:.4g}; "
        f"{Kind(step.kinds).words()}), {timeline.exposed_network * 1e3:.3g} ms of them waiting for the network{also}",
        "part of the model", "critical ms", "of it", "compute ms", "links ms", "T ops", "GB",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for name, share in timeline.by_scope().items():
        if share.critical < 1e-3 * step.value:
            continue
        times = [f"{seconds * 1e3:.4g}" for seconds in (share.compute, share.network)]
        table.add_row(
            name, f"{share.critical * 1e3:.4g}", f"{share.critical / step.value:.1%}", *times,
            f"{share.flops / 1e12:.3g}", f"{share.bytes / 1e9:.3g}",
        )  # fmt: skip
    table.add_section()
    for bound, seconds in timeline.critical_by_bound().items():
        table.add_row(f"bound by {bound}", f"{seconds * 1e3:.4g}", f"{seconds / step.value:.1%}", *[""] * 4)
    return table


def _exchanges(timeline: Timeline, name: str) -> Table:
    table = table_of(
        f"exchanges of {name}: what of their time is hidden, since the device computes meanwhile",
        "exchange", "part of the model", "times", "ms", "beside compute", "hidden",
    )  # fmt: skip
    table.columns[1].justify = "left"
    for exchange in timeline.exchanges():
        if exchange.seconds < 1e-3 * timeline.step.value:
            continue
        times = [f"{seconds * 1e3:.4g}" for seconds in (exchange.seconds, exchange.beside_compute)]
        table.add_row(exchange.name, exchange.part, str(exchange.runs), *times, f"{exchange.hidden:.0%}")
    return table


def _rebalance(moves: ExpertMoves) -> Table:
    table = table_of(
        f"moving experts: policy {moves.policy}, at most {size_text(moves.max_bytes_per_step)} received between two steps",
        "", "first, from no load known", "next, after drift",
    )  # fmt: skip
    both = (moves.first, moves.next)

    def row(name: str, value) -> None:
        table.add_row(name, *(value(moved) for moved in both))

    row("experts of a layer that move, all ranks", lambda moved: f"{moved.experts:.4g}")
    row("  that the rank with the most receives", lambda moved: f"{moved.received:.3g}")
    row("  bytes", lambda moved: size_text(moved.received * moves.expert_bytes))
    row("exchanges of a layer", lambda moved: f"{moved.exchanges:.3g}")
    if moves.next.seconds:
        row("milliseconds of a layer, predicted", lambda moved: _milliseconds(moved.seconds))
    row(f"steps of a rebalance of all {moves.layers} layers", lambda moved: f"{moves.steps(moved):,}")
    table.caption = (
        f"an expert has {moves.expert_bytes:,} bytes on a device; {moves.experts_per_exchange} to a rank in an exchange, for which "
        f"the compiled program sends {moves.sent_bytes:,} bytes; its own temporaries {size_text(moves.exchange_temporaries)}"
    )
    return table


def _milliseconds(figure: Figure) -> str:
    return f"{figure.value * 1e3:.3g} ({figure.low * 1e3:.3g} – {figure.high * 1e3:.3g})"


def _fit(report: DryRunReport) -> Table:
    fit, r = report.fit, report.request
    table = table_of(
        f"what fits into {fit.room / 1e9:.4g} GB of a device ({fit.compilations} programs compiled)", "", ""
    )
    table.add_row(f"rows of a DP rank at context {r['context']:,}", f"{fit.batch:,}")
    table.add_row(f"context of a row at {r['batch']} rows", f"{fit.context:,}")
    table.add_row(f"cache tokens of a DP rank beside {r['batch']} rows", f"{fit.cache_tokens:,}")
    return table
