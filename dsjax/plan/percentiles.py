"""Objectives as percentiles, of all requests or of one class: deployments are played, and loaded as far as they keep them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.search import Plan
from dsjax.plan.simulation.outcome import SimulationOutcome, loads, simulate
from dsjax.plan.simulation.service import OfferedLoad
from dsjax.plan.workload import Objective, Workload
from dsjax.tables import table

METRICS, PERCENTILES = ("ttft", "tpot", "e2e"), ("p50", "p90", "p95", "p99")
_PLAYED, _HALVINGS = 4, 5
"""Deployments that are played, best mean values first; and how often the load of each is halved towards what it keeps."""


@dataclass(frozen=True)
class Slo:
    """One bound: `metric` of METRICS, `percentile` of PERCENTILES, seconds; of: a class of requests, or `` for all of them."""

    metric: str
    percentile: str
    seconds: float
    of: str = ""

    @classmethod
    def parse(cls, text: str, work: Workload) -> Slo:
        """`ttft-p95=370`, or `long:e2e-p99=20000` for a class of the workload; milliseconds.

        Raises:
            UserError: anything else, or no such class.
        """
        name, _, value = text.partition("=")
        of, _, bound = name.rpartition(":")
        metric, _, percentile = bound.partition("-")
        try:
            seconds = float(value) / 1e3
        except ValueError:
            seconds = 0.0
        if metric not in METRICS or percentile not in PERCENTILES or not 0 < seconds < math.inf:
            raise UserError(
                f"--slo is {text!r}, expected a metric ({', '.join(METRICS)}), a percentile ({', '.join(PERCENTILES)}) and milliseconds: "
                "ttft-p95=370; with a class of --class before it: long:ttft-p95=900"
            )
        names = [one.name for one in work.classes]
        if of and of not in names:
            raise UserError(
                f"--slo {text} is of class {of!r}; expected one that --class names: {', '.join(names) or 'there is none'}"
            )
        return cls(metric, percentile, seconds, of)

    def __str__(self) -> str:
        named = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}[self.metric]
        return f"{self.percentile.upper()} of {named}{f' of {self.of}' if self.of else ''} within {self.seconds * 1e3:,.10g} ms"

    def simulated_seconds(self, outcome: SimulationOutcome) -> float:
        """Seconds that were played; 0 where outputs have one token and no time between tokens.

        Raises:
            UserError: no request that was played is of its class.
        """
        waits = outcome.classes.get(self.of) if self.of else outcome
        if waits is None:
            raise UserError(
                f"--slo {self.of}:{self.metric}-{self.percentile}: none of {outcome.requests} played requests is of class {self.of!r}; "
                "give more with --num-prompts, or the class a larger share"
            )
        spread = getattr(waits, self.metric)
        return getattr(spread, self.percentile) if spread else 0.0


@dataclass(frozen=True)
class Kept:
    """A deployment at the largest load that was found to keep every bound; broken: those that no load kept, at the smallest one."""

    candidate: Candidate
    outcome: SimulationOutcome
    broken: tuple[Slo, ...]

    def to_json(self, slos: list[Slo]) -> dict[str, Any]:
        """Stable fields."""
        return {
            "deployment": self.candidate.name(),
            "requests_per_s": self.outcome.load.rate,
            "concurrency": self.outcome.load.concurrency,
            "output_tokens_per_s": self.outcome.tokens_per_s,
            "kept": not self.broken,
            "objectives": [
                {
                    "metric": slo.metric,
                    "percentile": slo.percentile,
                    "class": slo.of or None,
                    "bound_s": slo.seconds,
                    "played_s": slo.simulated_seconds(self.outcome),
                }
                for slo in slos
            ],
        }


def guide(objective: Objective, slos: list[Slo], work: Workload) -> Objective:
    """Bounds on means with which the search finds deployments worth playing.

    A mean is below a high percentile of the same times. A bound on a P50 says nothing of the mean. One on the TTFT of a class whose prompts
    are shorter than the mean prompt says nothing of the mean of all, which the others may exceed. One on the end-to-end time leaves open
    how it is divided: it bounds the tokens' after the first, or the TTFT where outputs have one token.
    """
    for slo in slos:
        kind = next((one for one in work.kinds if one.name == slo.of), None)
        prompt, output = (kind.input, kind.output) if kind else (work.input, work.output)
        name, bound = slo.metric, slo.seconds
        if name == "e2e":
            name, bound = ("tpot", bound / (output.mean - 1)) if output.mean > 1 else ("ttft", bound)
        if slo.percentile == "p50" or (name == "ttft" and prompt.mean < work.input.mean):
            continue
        objective = dataclasses.replace(objective, **{name: min(bound, getattr(objective, name) or bound)})
    return objective


def within(
    plan: Plan, slos: list[Slo], *, num_requests: int, seed: int, burstiness: float = 1.0, played: int = _PLAYED
) -> tuple[Plan, list[Kept]]:
    """The plan with deployments that keep every bound before the others, and what was played, most tokens a second first.

    The first `played` of the plan are played: at the question's own rate or concurrency, or else at the largest share of the rate that
    they promise with which the bounds hold, found by bisection. Where none meets the bounds on means, nothing is played.
    """
    if not plan.ranked:
        return plan, []
    kept = [_kept(candidate, slos, num_requests, seed, burstiness) for candidate in plan.ranked[:played]]
    kept.sort(key=lambda one: (bool(one.broken), -one.outcome.tokens_per_s))
    good = [one.candidate for one in kept if not one.broken]
    rest = [c for c in plan.ranked if c not in good]
    missed = plan.missed if good else [*plan.ranked, *plan.missed]
    return dataclasses.replace(plan, ranked=[*good, *rest] if good else [], missed=missed, unkept=not good), kept


def _kept(candidate: Candidate, slos: list[Slo], num_requests: int, seed: int, burstiness: float) -> Kept:
    def play(load: OfferedLoad) -> Kept:
        outcome = simulate(candidate, load, Objective(), num_requests=num_requests, seed=seed)
        return Kept(candidate, outcome, tuple(slo for slo in slos if slo.simulated_seconds(outcome) > slo.seconds))

    work = candidate.decode.workload
    if work.rate is not None or work.concurrency is not None:
        return play(loads(candidate, burstiness)[0])
    low, high, best = 0.0, 1.0, None
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        one = play(OfferedLoad(share * candidate.throughput / work.output.mean, None, burstiness))
        low, high = (low, share) if one.broken else (share, high)
        best = one if not one.broken or best is None or best.broken else best
    return best


def show_within(console: Console, kept: list[Kept], slos: list[Slo]) -> None:
    """What was played, and where no load keeps a bound."""
    rows = []
    for one in kept:
        cells = [f"{slo.simulated_seconds(one.outcome) * 1e3:,.0f}{' ✗' * (slo in one.broken)}" for slo in slos]
        rows.append([one.candidate.name(), str(one.outcome.load), f"{one.outcome.tokens_per_s:,.0f}", *cells])
    names = ("<deployment", "load", "tokens/s", *map(str, slos))
    console.print(table("percentiles, played: the largest load that keeps them", names, rows))
    if kept and all(one.broken for one in kept):
        nearest = min(kept, key=lambda one: max(slo.simulated_seconds(one.outcome) / slo.seconds for slo in one.broken))
        broken = ", ".join(f"{slo} ({slo.simulated_seconds(nearest.outcome) * 1e3:,.0f} ms)" for slo in nearest.broken)
        said = (
            f"none of those played keeps every percentile; {nearest.candidate.name()} comes nearest, without {broken}"
        )
        console.print(Text(said, "yellow"))
