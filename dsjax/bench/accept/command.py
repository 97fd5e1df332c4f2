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

_DROPPED_WITH_VALUE = ("--only", "--api-key", "--admin-api-key")
_DROPPED = ("--fresh", "--list", "--progress", "--no-progress")


@options_of(what=ListOptions, server=ServerOptions, others=TestBedOptions)
def accept(what: ListOptions, server: ServerOptions, others: TestBedOptions) -> None:
    """Run the acceptance checklist of a deployment plan against an OpenAI-compatible server.

    Exit status 0: every criterion is met; 3: one is missed; 4: none is missed, but one could not be tested. After Ctrl-C or SIGTERM,
    the same command resumes where it stopped.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("dsjax accept needs aiohttp, which is not installed: pip install 'dsjax[bench]'")
    from dsjax.bench.accept.criteria import load_checklist
    from dsjax.bench.accept.results import exit_status
    from dsjax.bench.accept.test_bed import parse_hooks
    from dsjax.bench.serve.client import run
    from dsjax.plan.measured import read_network

    whole = _recipe(what) if what.recipe else load_checklist(what.criteria, quick=what.quick)
    checklist, hooks = whole.selected(what.only), parse_hooks(others.hook or (), whole.hooks)
    network = None
    if others.network is not None:
        read_network(others.network)  # validates the file as dsjax plan does
        network = json.loads(Path(others.network).read_text(encoding="utf-8"))
    try:
        report = run(_accept(what, server, others, checklist, hooks, network))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted: the same command goes on from {what.results}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if report is None:
        return
    report_console().print(report.table())
    print(f"{what.results}/report.md, report.json, report.xml")
    if code := exit_status(report.judged):
        raise typer.Exit(code)


async def _accept(
    what: ListOptions,
    server: ServerOptions,
    others: TestBedOptions,
    checklist: "Checklist",
    hooks: Mapping[str, str],
    network: Mapping[str, Any] | None,
) -> "Report | None":
    """Measure and return the report; None with `--list`."""
    from dsjax.bench.accept.report import Report
    from dsjax.bench.accept.results import expected, read_results, run_measurements, time_text
    from dsjax.bench.accept.test_bed import TestBed
    from dsjax.bench.serve.client import open_session
    from dsjax.bench.serve.ready_server import ReadyServer

    # Handle SIGTERM like Ctrl-C, which shells disable for background jobs: an injected fault must not outlive the command.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    say = partial(print, file=sys.stderr, flush=True)
    async with open_session(server.api_key) as session:
        ready = await ReadyServer.connect(session, server)
        bed = TestBed(ready, others, network, hooks, secrets.randbits(31), Console(stderr=True), what.progress)
        seconds = {name: expected(one, bed) for name, one in checklist.measurements.items()}
        takes = f"about {time_text(sum(seconds.values()))}"
        if what.show_list:
            rows = []
            for name, one in checklist.measurements.items():
                criteria = [f"{c.value} {c.bound_text}" for c in checklist.criteria if c.measurement == name]
                why = one.why_not(bed)
                said = f"{one.title}; not testable: {why}" if why else one.title
                rows.append((name, time_text(seconds[name]), said, "; ".join(criteria) or "reported only"))
            names = ("<<measurement", "takes", "<<what", "<<criteria")
            report_console().print(table(f"{checklist.name}: {takes}", names, rows))
            return None
        folder, command = Path(what.results), typed(sys.argv[1:])
        results = read_results(folder, ready.url, fresh=what.fresh)
        say(f"{ready.facts.model} at {ready.url}: {len(seconds)} measurements, {takes}")
        report = Report(
            checklist, results, ready.url, ready.facts.model, what.criteria or what.recipe, what.quick, command
        )
        # Also called before the first measurement, so that an unwritable folder fails before an hour of load.
        write = partial(report.write, folder)
        await run_measurements(checklist, bed, results, fresh=what.fresh, say=say, on_result=write)
    return report


def _recipe(what: ListOptions) -> "Checklist":
    from dsjax.bench.accept.criteria import predicted_checklist
    from dsjax.plan.recipe import read_recipe

    return predicted_checklist(read_recipe(Path(what.recipe)), quick=what.quick)


def typed(words: Sequence[str]) -> str:
    """Return the command as typed, without API keys, `--only`, `--fresh`, `--list` and the progress options."""
    kept, skip = [], False
    for word in words:
        flag = word.partition("=")[0]
        if skip:
            skip = False
        elif flag in _DROPPED_WITH_VALUE:
            skip = "=" not in word
        elif flag not in _DROPPED:
            kept.append(word)
    return shlex.join(["dsjax", *([] if kept[:1] == ["accept"] else ["accept"]), *kept])
