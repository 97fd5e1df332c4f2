"""The `dsjax bench serve` command. Imports the HTTP client and the tokenizers only when it runs."""

import asyncio
import datetime
import importlib.util
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED, report_console, write_json
from dsjax.errors import UserError
from dsjax.options import OptionError

if TYPE_CHECKING:
    from dsjax.bench.serve.benchmark import Benchmark, Point
    from dsjax.bench.serve.server_facts import ServerFacts

_MISSED = 3
"""Exit status if no point meets the objectives."""


@options_of(server=ServerOptions, workload=WorkloadOptions, load=LoadOptions, report=ReportOptions)
def serve(
    server: ServerOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    report: ReportOptions,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="METRIC:MS")] = None,
) -> None:
    """Benchmark an OpenAI-compatible server, and print a report like that of `vllm bench serve`.

    Exit status 1: no request succeeded; 3: --goodput is missed (in a sweep or a search: at every point). Ctrl-C prints the results so far;
    a second Ctrl-C exits at once.
    """
    report = _with_more_goodput(report, more_goodput or [])
    # Check before hours of benchmarking, not after.
    requirements = [("dsjax bench serve", "aiohttp")]
    if report.plot:
        requirements.append(("--plot", "matplotlib"))
    for what, package in requirements:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{what} needs {package}, which is not installed: pip install 'dsjax[bench]'")
    from dsjax.bench.serve.client import run

    points: list[Point] = []
    interrupted = run(_run(server, workload, load, report, points))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not any(point.body["completed"] for point in points):
        raise typer.Exit(1)
    if report.objectives and not any(point.body["goodput_verdict"] == "met" for point in points):
        raise typer.Exit(_MISSED)


def _with_more_goodput(report: ReportOptions, words: list[str]) -> ReportOptions:
    """Accept `--goodput ttft:200 tpot:50` like vLLM: typer passes the words after the first as arguments."""
    if words and not report.goodput:
        raise OptionError(f"found {' '.join(words)!r}, which belongs to no option")
    return ReportOptions(**{**vars(report), "goodput": [*(report.goodput or []), *words] or None})


async def _run(
    server: ServerOptions, workload: WorkloadOptions, load: LoadOptions, report: ReportOptions, points: "list[Point]"
) -> bool:
    """Measure the points, print each, and write the files; return whether Ctrl-C ended the run."""
    from dsjax.bench.serve.benchmark import Benchmark
    from dsjax.bench.serve.report import point_progress, render

    say = partial(print, file=sys.stderr)
    progress = partial(point_progress, Console(stderr=True), report.progress)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    benchmark = Benchmark(server, workload, load, report, say, progress, stop)
    out = sys.stderr if report.json_file == "-" else sys.stdout

    def on_point(point: "Point") -> None:
        points.append(point)
        print(render(point.body, report.latencies, report.percentiles), file=out, flush=True)

    def first_ctrl_c() -> None:  # the second one interrupts as usual
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    def on_ready(facts: "ServerFacts") -> None:
        loop.add_signal_handler(signal.SIGINT, first_ctrl_c)
        say(f"{facts.model} at {server.base_url}")

    try:
        facts = await benchmark.run(on_ready, on_point)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if stop.is_set():
        say("interrupted: the figures are of what was done until then")
    _write(benchmark, points, facts)
    return stop.is_set()


def _write(benchmark: "Benchmark", points: "list[Point]", facts: "ServerFacts") -> None:
    """Write the requested files, and print the table of a sweep."""
    from dsjax.bench.serve.client import PATHS
    from dsjax.bench.serve.report import details, draw, sweep_table, write_points_csv

    server, workload, report = benchmark.server, benchmark.workload, benchmark.report
    swept = benchmark.load.swept
    head = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if server.endpoint == "chat" else "openai",
        "endpoint": PATHS[server.endpoint],
        "base_url": server.base_url,
        "model_id": facts.model,
        "tokenizer_id": server.tokenizer or facts.root or facts.model,
        "dataset_name": workload.dataset_name,
        "seed": workload.seed,
    }
    bodies = [head | point.body | (details(point.records) if report.save_detailed else {}) for point in points]
    if swept:
        report_console(stderr=report.json_file == "-").print(sweep_table(bodies, swept))
    if report.json_file and bodies:
        body = {**head, "swept": swept, "points": bodies} if swept else bodies[0]
        write_json(report.json_file, body, private=report.save_detailed)  # details contain the answers' text
    if report.csv_points and bodies:
        write_points_csv(Path(report.csv_points), bodies)
    if report.plot and any(point.body["completed"] for point in points):
        draw(Path(report.plot), bodies, f"{facts.model}, {workload.dataset_name}")
    elif report.plot:
        benchmark.say(f"no request was answered, so {report.plot} is not drawn")
