"""`dsjax bench serve`: the command. The HTTP client and the tokenizers are imported when it runs."""

import asyncio
import datetime
import importlib.util
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED, report_console, write_json
from dsjax.errors import UserError
from dsjax.options import OptionError

_MISSED = 3
"""The exit code where no point meets the objectives."""

if TYPE_CHECKING:
    from dsjax.bench.serve.benchmark import Benchmark
    from dsjax.bench.serve.result_files import PointResult
    from dsjax.bench.serve.server_facts import ServerFacts


@options_of(server=ServerOptions, workload=WorkloadOptions, load=LoadOptions, report=ReportOptions)
def serve(
    server: ServerOptions,
    workload: WorkloadOptions,
    load: LoadOptions,
    report: ReportOptions,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="METRIC:MS")] = None,
) -> None:
    """Put load on an OpenAI-compatible server, and print what `vllm bench serve` prints.

    Ends with 3 where --goodput is missed; of a sweep or a search, where every point misses it. Ctrl-C prints what is done
    so far; a second one ends at once.
    """
    report = _with_more_goodput(report, more_goodput or [])
    # Asked before a benchmark of hours rather than after it.
    for what, package in (("dsjax bench serve", "aiohttp"), *([("--plot", "matplotlib")] if report.plot else [])):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{what} needs {package}, which is not installed: pip install 'dsjax[bench]'")
    from dsjax.bench.serve.benchmark import Benchmark
    from dsjax.bench.serve.client import run
    from dsjax.bench.serve.report import point_progress

    say, progress = partial(print, file=sys.stderr), partial(point_progress, Console(stderr=True), report.progress)
    benchmark = Benchmark(server, workload, load, report, say, progress)
    points, facts, interrupted = run(_measure(benchmark))
    _write(benchmark, points, facts)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not any(one.statistics.completed for one in points):
        raise typer.Exit(1)
    if report.objectives and not any(one.goodput and one.goodput.verdict == "met" for one in points):
        raise typer.Exit(_MISSED)


def _with_more_goodput(report: ReportOptions, words: list[str]) -> ReportOptions:
    """`--goodput ttft:200 tpot:50`, as vLLM takes it: words after the first come as arguments."""
    if words and not report.goodput:
        raise OptionError(f"found {' '.join(words)!r}, which belongs to no option")
    return ReportOptions(**{**vars(report), "goodput": [*(report.goodput or []), *words] or None})


async def _measure(benchmark: "Benchmark") -> tuple[list["PointResult"], "ServerFacts", bool]:
    """Run a benchmark and print each point; its points, what the server said, and whether Ctrl-C has ended it."""
    from dsjax.bench.serve.report import report as render

    server, report = benchmark.server, benchmark.report
    out = sys.stderr if report.json_file == "-" else sys.stdout
    points: list[PointResult] = []
    devices: list[int | None] = [server.devices]

    def on_point(one: "PointResult") -> None:
        points.append(one)
        print(
            render(one.point, one.statistics, report.latencies, devices[0], one.drafts, one.goodput),
            file=out,
            flush=True,
        )

    stop = asyncio.Event()

    def on_ready(facts: "ServerFacts") -> None:
        _let_ctrl_c_set(stop)
        devices[0] = server.devices or facts.num_devices
        benchmark.say(f"{facts.model} at {server.base_url}")

    try:
        facts = await benchmark.run(stop, on_ready, on_point)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    if stop.is_set():
        benchmark.say("interrupted: the figures are of what was done until then")
    return points, facts, stop.is_set()


def _let_ctrl_c_set(stop: asyncio.Event) -> None:
    """From now on the first Ctrl-C sets the event, and the second interrupts as ever."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, once)


def _write(benchmark: "Benchmark", points: list["PointResult"], facts: "ServerFacts") -> None:
    """The files that were asked for, and the table of a sweep."""
    from dsjax.bench.serve.report import sweep_table
    from dsjax.bench.serve.result_files import draw, result_json, write_points_csv, write_requests_csv

    workload, report, swept = benchmark.workload, benchmark.report, benchmark.load.swept
    devices = benchmark.server.devices or facts.num_devices
    head = _head(facts, benchmark.server, workload)
    bodies = [result_json(head, one, devices, report.save_detailed) for one in points]
    if swept:
        report_console(stderr=report.json_file == "-").print(sweep_table(bodies, swept))
    if report.json_file and bodies:
        body = {**head, "swept": swept, "points": bodies} if swept else bodies[0]
        write_json(report.json_file, body, private=report.save_detailed)  # details have the texts of answers
    if report.csv_points and bodies:
        write_points_csv(Path(report.csv_points), bodies)
    if report.csv_requests:
        write_requests_csv(Path(report.csv_requests), points)
    if report.plot and any(one.statistics.completed for one in points):
        draw(Path(report.plot), bodies, f"{facts.model}, {workload.dataset_name}")
    elif report.plot:
        benchmark.say(f"no request was answered, so {report.plot} is not drawn")


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
