"""`dsjax plan simulate` on the terminal: a table of loads, and where the mean-value answer is contradicted."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.simulation.outcome import SimulationOutcome, Spread
from dsjax.plan.simulation.reported import calibrated_report
from dsjax.plan.simulation.run import loads, simulate
from dsjax.plan.workload import Objective

_FLOOD = 3.0
"""Times the rate that a deployment keeps up with, above which nothing is played."""


def simulations(
    candidate: Candidate,
    objective: Objective,
    burstiness: float,
    num_requests: int,
    seed: int,
    warmup: int | None = None,
    at_once: bool = False,
) -> list[SimulationOutcome]:
    """The candidate under each of its `loads`, with a progress bar on standard error.

    Raises:
        UserError: so many requests arrive that there is no steady state worth waiting for.
    """
    outcomes, work = [], candidate.decode.workload
    kept = candidate.throughput / work.output.mean
    if work.rate is not None and work.rate > _FLOOD * kept:
        raise UserError(
            f"--request-rate {work.rate:g}: {candidate.name()}, the nearest there is, keeps up with {kept:.3g} requests a second, "
            f"so that queues would grow for as long as it is played; give {kept:.3g} or less"
        )
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        for load in loads(candidate, burstiness, at_once):
            task = bar.add_task(f"simulating {load}", total=num_requests)

            def progress(done: int, _: int, task=task) -> None:
                bar.update(task, completed=done)

            choices = {"num_requests": num_requests, "seed": seed, "warmup": warmup, "at_once": at_once}
            seen = simulate(candidate, load, objective, **choices, progress=progress)
            if at_once and warmup == 0:  # what is left out, no benchmark of the blind rounds left out
                seen = dataclasses.replace(seen, calibrated=calibrated_report(candidate, seen))
            outcomes.append(seen)
    return outcomes


def show_simulation(console: Console, candidate: Candidate, outcomes: list[SimulationOutcome]) -> None:
    """P50, P90 and P99 beside the mean-value answer of the same load."""
    load = outcomes[0].load
    arrivals = "Poisson arrivals" if load.burstiness == 1 else f"burstiness {load.burstiness:g}"
    arrivals = arrivals if load.rate else "a fixed number in flight"
    table = Table(
        title=f"{candidate.name()} simulated, {outcomes[0].requests} requests each, {arrivals}; "
        "milliseconds: P50/P90/P99; mean (mean-value answer)",
        title_justify="left",
    )
    for name in (
        "requests/s" if load.rate else "users",
        "TTFT",
        "mean",
        "TPOT",
        "mean",
        "ITL",
        "tokens/s",
        "goodput",
        "SLO",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        table.add_row(
            f"{one.load.rate or one.load.concurrency:.3g}",
            _percentiles(one.ttft, 0),
            f"{one.ttft.mean * 1e3:.0f} ({one.mean_ttft * 1e3:.0f})",
            _percentiles(one.tpot, 1),
            f"{one.tpot.mean * 1e3:.1f} ({one.mean_tpot * 1e3:.1f})" if one.tpot else "–",
            _percentiles(one.itl, 0),
            f"{one.tokens_per_s:,.0f}",
            f"{one.goodput:.3g}",
            f"{one.kept:.0%}",
        )
    console.print(table)
    for one in outcomes:
        if one.steady:
            _show_benchmark(console, one)
        if one.calibrated:
            _show_calibrated(console, one.calibrated)
    if outcomes[0].classes:
        _show_classes(console, outcomes)
    for one in outcomes:
        for text in one.disagreements():
            console.print(f"{one.load}: {text}", style="yellow", highlight=False)


def _show_benchmark(console: Console, one: SimulationOutcome) -> None:
    """TTFT as a benchmark that begins with all users at once reports it, and once that start is no longer felt."""
    for name, waits in (("as such a benchmark reports it", one), ("in steady state", one.steady)):
        found = waits.ttft
        mean, median, last = (f"{value * 1e3:,.0f}" for value in (found.mean, found.p50, found.p99))
        console.print(
            f"TTFT of {waits.requests:,} requests, {name}: mean {mean}, median {median}, P99 {last} ms", highlight=False
        )


def _show_calibrated(console: Console, held: dict[str, Any]) -> None:
    """The ends that hold 9 of 10 of such benchmarks' reports, and the blind predictions that they rest on."""
    shown = []
    for name, words, factor, digits, unit in (
        ("ttft_mean_s", "TTFT mean", 1e3, 0, "ms"),
        ("ttft_median_s", "TTFT median", 1e3, 0, "ms"),
        ("ttft_p99_s", "TTFT P99", 1e3, 0, "ms"),
        ("tpot_median_s", "TPOT median", 1e3, 1, "ms"),
        ("output_tokens_per_s", "rate", 1, 0, "tokens/s"),
    ):
        if one := held.get(name):
            value, low, high = (f"{one[end] * factor:,.{digits}f}" for end in ("value", "low", "high"))
            shown.append(
                f"  {words} {value} [{low} … {high}] {unit} (by {one['predictions']} blind predictions: {one['by']})"
            )
    console.print(
        "9 of 10 such benchmarks, of ten requests a user, that nobody had looked at report within:", highlight=False
    )
    console.print(Text("\n".join(shown)))


def _show_classes(console: Console, outcomes: list[SimulationOutcome]) -> None:
    table = Table(title="by class of request; milliseconds: P50/P95/P99", title_justify="left")
    table.add_column("class")
    for name in ("load", "requests", "TTFT", "TPOT", "end to end"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        for name, waits in one.classes.items():
            spreads = ((waits.ttft, 0), (waits.tpot, 1), (waits.e2e, 0))
            columns = [
                "–" if s is None else "/".join(f"{v * 1e3:,.{digits}f}" for v in (s.p50, s.p95, s.p99))
                for s, digits in spreads
            ]
            table.add_row(name, f"{one.load.rate or one.load.concurrency:.3g}", str(waits.requests), *columns)
    console.print(table)


def _percentiles(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "–"
    return "/".join(f"{value * 1e3:.{digits}f}" for value in (spread.p50, spread.p90, spread.p99))
