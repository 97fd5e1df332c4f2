"""The `dsjax accept` command. Imports the HTTP client and the tokenizers only when it runs."""

import asyncio
import importlib.util
import json
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dsjax.bench.accept.options import ListOptions, TestBedOptions
from dsjax.bench.serve.options import ServerOptions
from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED, report_console
from dsjax.errors import UserError
from dsjax.tables import table

if TYPE_CHECKING:
    from dsjax.bench.accept.criteria import Checklist
    from dsjax.bench.accept.report import Report

_HIDDEN_WITH_VALUE = ("--only", "--api-key", "--admin-api-key")
_HIDDEN_SWITCHES = ("--fresh", "--list", "--progress", "--no-progress")


@options_of(selection=ListOptions, server=ServerOptions, bed_options=TestBedOptions)
def accept(selection: ListOptions, server: ServerOptions, bed_options: TestBedOptions) -> None:
    """Run the acceptance checklist of a deployment plan against an OpenAI-compatible server.

    Exit status 0: every criterion is met; 3: one is missed; 4: none is missed, but one could not be tested. After Ctrl-C or SIGTERM,
    the same command resumes where it stopped.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("dsjax accept needs aiohttp, which is not installed: pip install 'dsjax[bench]'")
    from dsjax.bench.accept.criteria import load_checklist, predicted_checklist
    from dsjax.bench.accept.results import exit_status
    from dsjax.bench.accept.test_bed import parse_hooks
    from dsjax.bench.serve.client import run
    from dsjax.plan.measured import read_network
    from dsjax.plan.recipe import read_recipe

    if selection.recipe:
        full = predicted_checklist(read_recipe(Path(selection.recipe)), quick=selection.quick)
    else:
        full = load_checklist(selection.criteria, quick=selection.quick)
    checklist = full.selected(selection.only)
    hooks = parse_hooks(bed_options.hook or (), full.hooks)
    network = None
    if bed_options.network is not None:
        read_network(bed_options.network)  # validates the file as dsjax plan does
        network = json.loads(Path(bed_options.network).read_text(encoding="utf-8"))
    try:
        report = run(_accept(selection, server, bed_options, checklist, hooks, network))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted: the same command resumes from {selection.results}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if report is None:
        return
    report_console().print(report.table())
    print(f"{selection.results}/report.md, report.json, report.xml")
    if code := exit_status(report.judged):
        raise typer.Exit(code)


async def _accept(
    selection: ListOptions,
    server: ServerOptions,
    bed_options: TestBedOptions,
    checklist: "Checklist",
    hooks: Mapping[str, str],
    network: Mapping[str, Any] | None,
) -> "Report | None":
    """Measure and return the report. With `--list`, print the measurements and return None."""
    from dsjax.bench.accept.report import Report
    from dsjax.bench.accept.results import expected_seconds, read_results, run_measurements, time_text
    from dsjax.bench.accept.test_bed import TestBed
    from dsjax.bench.serve.client import open_session
    from dsjax.bench.serve.ready_server import ReadyServer

    # Handle SIGTERM like Ctrl-C, which shells disable for background jobs: an injected fault must not outlive the command.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    say = partial(print, file=sys.stderr, flush=True)
    async with open_session(server.api_key) as session:
        ready = await ReadyServer.connect(session, server)
        bed = TestBed(
            ready, bed_options, network, hooks, secrets.randbits(31), Console(stderr=True), selection.progress
        )
        seconds = {name: expected_seconds(measurement, bed) for name, measurement in checklist.measurements.items()}
        duration = f"about {time_text(sum(seconds.values()))}"
        if selection.show_list:
            rows = []
            for name, measurement in checklist.measurements.items():
                criteria = [f"{c.value_name} {c.bound_text}" for c in checklist.criteria if c.measurement == name]
                why = measurement.why_not(bed)
                title = f"{measurement.title}; not testable: {why}" if why else measurement.title
                rows.append((name, time_text(seconds[name]), title, "; ".join(criteria) or "reported only"))
            names = ("<<measurement", "takes", "<<what", "<<criteria")
            report_console().print(table(f"{checklist.name}: {duration}", names, rows))
            return None
        folder = Path(selection.results)
        command = _shown_command(sys.argv[1:])
        results = read_results(folder, ready.url, fresh=selection.fresh)
        say(f"{ready.facts.model} at {ready.url}: {len(seconds)} measurements, {duration}")
        file = selection.criteria or selection.recipe
        report = Report(checklist, results, ready.url, ready.facts.model, file, selection.quick, command)
        # `on_result` is also called before the first measurement, so that an unwritable folder fails before an hour of load.
        on_result = partial(report.write, folder)
        await run_measurements(checklist, bed, results, fresh=selection.fresh, say=say, on_result=on_result)
    return report


def _shown_command(arguments: Sequence[str]) -> str:
    """Return the command as typed, without API keys, `--only`, `--fresh`, `--list` and the progress options."""
    shown, is_hidden_value = [], False
    for argument in arguments:
        flag = argument.partition("=")[0]
        if is_hidden_value:
            is_hidden_value = False
        elif flag in _HIDDEN_WITH_VALUE:
            is_hidden_value = "=" not in argument
        elif flag not in _HIDDEN_SWITCHES:
            shown.append(argument)
    return shlex.join(["dsjax", *([] if shown[:1] == ["accept"] else ["accept"]), *shown])
