"""Output of `dsjax plan simulate`: a table of loads, with the mean-value answer beside each simulated mean."""

import dataclasses
import sys

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dsjax.plan.candidate import Candidate
from dsjax.plan.rules import refuse
from dsjax.plan.simulation.outcome import SimulationOutcome, Spread, Waits, calibrated_report, loads, simulate
from dsjax.plan.simulation.service import OfferedLoad
from dsjax.plan.workload import Objective
from dsjax.tables import table
from dsjax.texts import filled

_MAX_OVERLOAD = 3.0
"""Largest request rate that is simulated, as a multiple of the rate that the deployment sustains."""

_COLUMNS = ("TTFT", "mean", "TPOT", "mean", "ITL", "tokens/s", "goodput", "SLO")


def simulations(
    candidate: Candidate,
    objective: Objective,
    burstiness: float,
    num_requests: int,
    seed: int,
    warmup: int | None = None,
    at_once: bool = False,
) -> list[SimulationOutcome]:
    """Simulate the candidate under each of its `loads`, with a progress bar on standard error.

    Raises:
        UserError: the request rate is more than `_MAX_OVERLOAD` times what the candidate sustains.
    """
    outcomes = []
    workload = candidate.decode.workload
    sustained = candidate.throughput / workload.output.mean
    refuse("overload", rate=workload.rate, most=_MAX_OVERLOAD * sustained, sustained=sustained, name=candidate.name())
    choices = {"num_requests": num_requests, "seed": seed, "warmup": warmup, "at_once": at_once}
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        for load in loads(candidate, burstiness, at_once):
            task = bar.add_task(f"simulating {load}", total=num_requests)

            def progress(done: int, task=task) -> None:
                bar.update(task, completed=done)

            outcome = simulate(candidate, load, objective, **choices, progress=progress)
            if at_once and warmup == 0:  # as in the benchmarks that `calibrated_report` is calibrated with
                outcome = dataclasses.replace(outcome, calibrated=calibrated_report(candidate, outcome))
            outcomes.append(outcome)
    return outcomes


def show_simulation(console: Console, candidate: Candidate, outcomes: list[SimulationOutcome]) -> None:
    """Print P50, P90 and P99 beside the mean-value answer for the same load."""
    load = outcomes[0].load
    arrivals = "Poisson arrivals" if load.burstiness == 1 else f"burstiness {load.burstiness:g}"
    title = (
        f"{candidate.name()} simulated, {outcomes[0].requests} requests each, "
        f"{arrivals if load.rate else 'a fixed number in flight'}; milliseconds: P50/P90/P99; mean (mean-value answer)"
    )
    console.print(table(title, ("requests/s" if load.rate else "users", *_COLUMNS), map(_cells, outcomes)))
    for outcome in outcomes:
        if lines := filled("texts", "reported.txt", one=outcome):
            console.print(Text(lines))
    classes = [
        _class_cells(name, outcome.load, waits) for outcome in outcomes for name, waits in outcome.classes.items()
    ]
    if classes:
        names = ("<class", "load", "requests", "TTFT", "TPOT", "end to end")
        console.print(table("by class of request; milliseconds: P50/P95/P99", names, classes))


def _cells(outcome: SimulationOutcome) -> tuple[str, ...]:
    return (
        _load_text(outcome.load),
        _percentiles(outcome.ttft, 0),
        f"{outcome.ttft.mean * 1e3:.0f} ({outcome.mean_ttft * 1e3:.0f})",
        _percentiles(outcome.tpot, 1),
        f"{outcome.tpot.mean * 1e3:.1f} ({outcome.mean_tpot * 1e3:.1f})" if outcome.tpot else "–",
        _percentiles(outcome.itl, 0),
        f"{outcome.tokens_per_s:,.0f}",
        f"{outcome.goodput:.3g}",
        f"{outcome.kept:.0%}",
    )


def _class_cells(name: str, load: OfferedLoad, waits: Waits) -> tuple[str, ...]:
    with_digits = (waits.ttft, 0), (waits.tpot, 1), (waits.e2e, 0)
    times = (_percentiles(spread, digits, "p95") for spread, digits in with_digits)
    return name, _load_text(load), str(waits.requests), *times


def _load_text(load: OfferedLoad) -> str:
    return f"{load.rate or load.concurrency:.3g}"


def _percentiles(spread: Spread | None, digits: int, middle: str = "p90") -> str:
    if spread is None:
        return "–"
    return "/".join(f"{value * 1e3:,.{digits}f}" for value in (spread.p50, getattr(spread, middle), spread.p99))
