"""Terminal tables for a report of disaggregated attention and experts. Numbers are rounded only here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsjax.dryrun.apart_report import ApartReport
from dsjax.dryrun.apart_timeline import ApartTimeline
from dsjax.dryrun.tables import show_notes, size_text
from dsjax.plan.figure import Kind
from dsjax.tables import table_of

_LINKS = {
    "attention_device_sends": "an attention device sends",
    "expert_device_receives": "an expert device receives",
    "expert_device_sends": "an expert device sends",
    "attention_device_receives": "an attention device receives",
    "connection_there": "each connection carries to the experts",
    "connection_back": "each connection carries back",
}


def show_apart(console: Console, report: ApartReport) -> None:
    """Print the whole report."""
    r = report.request
    console.print(
        f"[bold]{r['model']}[/bold]  attention {r['attention_mesh']}, experts {r['expert_mesh']} = {r['devices']} devices  targets "
        f"{r['target']}, {r['expert_target']}  {r['step']}: {r['batch']} rows × {r['chunk']} of a DP rank, context {r['context']}, "
        f"micro-batches {r['micro_batches']}, weights {r['weights']}",
        highlight=False,
    )
    for table in (_memory(report), _programs(report), _links(report)):
        console.print(table)
    if report.timeline:
        console.print(_timeline(report.timeline))
    show_notes(console, report, report.timeline.assumed if report.timeline else ())


def _memory(report: ApartReport) -> Table:
    table = table_of("memory of a device, bytes", "", "attention", "experts")
    sides = (report.attention, report.experts)
    names = sorted({name for side in sides for name in side.weights}, key=lambda name: -report.parameters[name])
    for name in names:
        table.add_row(name, *(f"{side.weights[name]:,}" if name in side.weights else "–" for side in sides))
    rows = (
        ("weights", "weight_bytes"),
        (f"cache ({report.cache_tokens:,} tokens of a DP rank)", "cache"),
        ("page tables, sampling and other state", "state"),
        ("inputs", "inputs"),
        ("rows and answers between programs", "travelling"),
        ("temporaries", "temporaries"),
        ("outputs beside the cache", "outputs"),
    )
    table.add_section()
    for name, field in rows:
        table.add_row(name, *(f"{getattr(side, field):,}" for side in sides))
    table.add_section()
    table.add_row("all", *(f"{side.total:,}" for side in sides))
    if report.hardware[0]:
        table.add_row("of the device", *(f"{hardware.memory_bytes:,}" for hardware in report.hardware))
        used = []
        for side, hardware in zip(sides, report.hardware, strict=True):
            share = side.total / hardware.memory_bytes
            used.append(f"[{'green' if share <= 1 else 'bold red'}]{share:.1%}[/]")
        table.add_row("used", *used)
    return table


def _programs(report: ApartReport) -> Table:
    has_timeline = report.timeline is not None
    columns = (
        "program",
        "side",
        "times",
        "T ops",
        "GB moved",
        "collectives",
        "temporaries",
        *(("ms each",) if has_timeline else ()),
    )
    table = table_of("programs of a step; of a device, each time", *columns)
    table.columns[1].justify = "left"
    for side_program in report.programs:
        costs = side_program.report.costs
        stats = side_program.program.compiled.memory_analysis()
        sent = sum(c.times for c in side_program.report.collectives)
        cells = [
            side_program.name, side_program.side, f"{side_program.times}",
            f"{costs.flops / 1e12:.3g}", f"{costs.bytes / 1e9:.3g}", f"{sent:g}",
            size_text(stats.temp_size_in_bytes),
        ]  # fmt: skip
        table.add_row(*cells, *([f"{side_program.report.timeline.step.value * 1e3:.3g}"] if has_timeline else ()))
    return table


def _links(report: ApartReport) -> Table:
    links = report.links
    way = "through the hosts' memory" if links.connections else "from device to device"
    table = table_of(f"bytes between the sides in a step, {way}", "", *links.wires)
    for key, name in _LINKS.items():
        if all(key in sizes for sizes in links.wires.values()):
            table.add_row(name, *(size_text(sizes[key]) for sizes in links.wires.values()))
    table.caption = (
        f"columns: what rows are packed as; {links.chosen} was compiled. An attention device has room for {links.capacity} of its "
        f"{links.rows} rows to each expert device, and even routing sends {links.needed:.0%} of them"
    )
    return table


def _timeline(timeline: ApartTimeline) -> Table:
    step = timeline.step
    table = table_of(
        f"a step: {step.value * 1e3:.4g} ms ({step.low * 1e3:.4g} – {step.high * 1e3:.4g}; {Kind(step.kinds).words()}), "
        f"{timeline.outside_layers.value * 1e3:.3g} ms of them outside the layers with experts",
        "in the layers with experts", "busy ms", "of the time",
    )  # fmt: skip
    seconds = sum(layers.seconds for layers in timeline.passes)
    for name, busy in timeline.busy().items():
        table.add_row(name, f"{busy * 1e3:.4g}", f"{busy / seconds:.1%}")
    return table
