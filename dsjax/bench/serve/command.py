"""`dsjax bench serve`: the command. The HTTP client and the tokenizers are imported when it runs."""

import asyncio
import datetime
import functools
import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.cli.options import options_of
from dsjax.cli.output import report_console, write_json
from dsjax.errors import UserError
from dsjax.options import OptionError

if TYPE_CHECKING:
    from dsjax.bench.serve.result_files import PointResult
    from dsjax.bench.serve.server_facts import ServerFacts

_INTERRUPTED = 130


@options_of(server=ServerOptions, workload=WorkloadOptions, load=LoadOptions, report=ReportOptions)
def serve(
    server: ServerOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    report: ReportOptions,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="METRIC:MS")] = None,
) -> None:
    """Put load on an OpenAI-compatible server, and print what `vllm bench serve` prints.

    Ctrl-C prints what is done so far; a second one ends at once.
    """
    report = _with_more_goodput(report, more_goodput or [])
    # Asked before a benchmark of hours rather than after it.
    for what, package in (("dsjax bench serve", "aiohttp"), *([("--plot", "matplotlib")] if report.plot else [])):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{what} needs {package}, which is not installed: pip install 'dsjax[bench]'")
    from dsjax.bench.serve.client import run

    points, facts, interrupted = run(_measure(server, workload, load, report))
    _write(points, facts, server, workload, load, report)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)
    if not any(one.statistics.completed for one in points):
        raise typer.Exit(1)


def _with_more_goodput(report: ReportOptions, words: list[str]) -> ReportOptions:
    """`--goodput ttft:200 tpot:50`, as vLLM takes it: words after the first come as arguments."""
    if words and not report.goodput:
        raise OptionError(f"found {' '.join(words)!r}, which belongs to no option")
    return ReportOptions(**{**vars(report), "goodput": [*(report.goodput or []), *words] or None})


async def _measure(
    server: ServerOptions, workload: WorkloadOptions, load: LoadOptions, report: ReportOptions
) -> tuple[list["PointResult"], "ServerFacts", bool]:
    from dsjax.bench.serve.benchmark import Benchmark
    from dsjax.bench.serve.progress import point_progress
    from dsjax.bench.serve.report import report as render

    screen = Console(stderr=True)
    progress = functools.partial(point_progress, screen, report.progress)
    say = functools.partial(print, file=sys.stderr)
    out = sys.stderr if report.json_file == "-" else sys.stdout
    points: list[PointResult] = []
    devices: list[int | None] = [server.devices]

    def on_point(one: "PointResult") -> None:
        points.append(one)
        print(render(one.point, one.statistics, report.latencies, devices[0], one.drafts), file=out, flush=True)

    stop = asyncio.Event()

    def on_ready(facts: "ServerFacts") -> None:
        _let_ctrl_c_set(stop)
        devices[0] = server.devices or facts.num_devices
        say(f"{facts.model} at {server.base_url}")

    try:
        facts = await Benchmark(server, workload, load, report, say, progress).run(stop, on_ready, on_point)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    if stop.is_set():
        say("interrupted: the figures are of what was done until then")
    return points, facts, stop.is_set()


def _let_ctrl_c_set(stop: asyncio.Event) -> None:
    """From now on the first Ctrl-C sets the event, and the second interrupts as ever."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, once)


def _write(
    points: list["PointResult"],
    facts: "ServerFacts",
    server: ServerOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    report: ReportOptions,
) -> None:
    """The files that were asked for, and the table of a sweep."""
    from dsjax.bench.serve.picture import draw
    from dsjax.bench.serve.report import sweep_table
    from dsjax.bench.serve.result_files import result_json, write_points_csv, write_requests_csv

    devices = server.devices or facts.num_devices
    head = _head(facts, server, workload)
    bodies = [result_json(head, one, devices, report.save_detailed) for one in points]
    by_concurrency, by_rate = load.search == "concurrency", load.search == "rate"
    swept = (
        "max_concurrency"
        if load.sweep_concurrency or by_concurrency
        else "request_rate"
        if load.sweep_rate or by_rate
        else None
    )
    if swept:
        report_console(stderr=report.json_file == "-").print(sweep_table(bodies, swept))
    if report.json_file and bodies:
        write_json(report.json_file, {**head, "swept": swept, "points": bodies} if swept else bodies[0])
    if report.csv_points and bodies:
        write_points_csv(Path(report.csv_points), bodies)
    if report.csv_requests:
        write_requests_csv(Path(report.csv_requests), points)
    if report.plot:
        draw(Path(report.plot), bodies, f"{facts.model}, {workload.dataset_name}")


def _head(facts: "ServerFacts", server: ServerOptions, workload: WorkloadOptions) -> dict[str, Any]:
    from dsjax.bench.serve.client import PATHS

    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if server.endpoint == "chat" else "openai",
        "endpoint": PATHS[server.endpoint],
        "base_url": server.base_url,
        "model_id": facts.model,
        "tokenizer_id": server.tokenizer or facts.root or facts.model,
        "dataset_name": workload.dataset_name,
        "seed": workload.seed,
    }
