"""`SimulationOutcome`: percentiles and goodput of a simulation beside the mean-value answer at the same load, and where they disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsjax.plan.candidate import Candidate, moved, with_intervals
from dsjax.plan.figure import as_json
from dsjax.plan.host_time import front_door
from dsjax.plan.simulation.load import OfferedLoad
from dsjax.plan.simulation.service import Served
from dsjax.plan.workload import Objective

_FRONT = float(front_door())
"""Seconds of a TTFT that pass before and after the scheduler, which is what is played."""
_AGREES = 0.2
"""A mean that is off by more than this share of the mean-value answer is a disagreement."""


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles, seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[float] | None = None) -> Spread | None:
        """Summarise a sample, each value as often as its weight says; None for an empty one."""
        if not len(values):
            return None
        each = np.asarray(values, float)
        share = np.ones_like(each) if weights is None else np.asarray(weights, float)
        order = np.argsort(each)
        each, below = each[order], np.cumsum(share[order])
        points = [
            float(each[min(np.searchsorted(below, q * below[-1]), len(each) - 1)]) for q in (0.5, 0.9, 0.95, 0.99)
        ]
        return cls(float(np.average(each, weights=share[order])), *points)

    def to_json(self) -> dict[str, float]:
        """Stable fields."""
        return {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p95": self.p95, "p99": self.p99}


@dataclass(frozen=True)
class Played:
    """What a simulation saw: the requests that are measured; when any request ended; (begin, seconds, decodes) of each step."""

    measured: list[Served]
    finishes: list[float]
    gaps: list[tuple[float, float, int]]


@dataclass(frozen=True)
class Waits:
    """What some of the requests waited: for the first token, for each further one (None where outputs have one), and in all."""

    requests: int
    ttft: Spread
    tpot: Spread | None
    e2e: Spread

    @classmethod
    def of(cls, served: Sequence[Served]) -> Waits:
        """Summarise at least one request."""
        return cls(
            len(served),
            Spread.of([one.ttft + _FRONT for one in served]),
            Spread.of([one.tpot for one in served if one.tpot is not None]),
            Spread.of([one.finished - one.arrival + _FRONT for one in served]),
        )

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        tpot = self.tpot and self.tpot.to_json()
        return {"requests": self.requests, "ttft_s": self.ttft.to_json(), "tpot_s": tpot, "e2e_s": self.e2e.to_json()}


@dataclass(frozen=True)
class SimulationOutcome:
    """One load on one candidate, the whole deployment.

    ttft, tpot: over requests; itl: over tokens, the time of the step that made each; None where outputs have one token.
    requests_per_s: that ended from the first measured one's arrival to the last one's end. tokens_per_s: output tokens. goodput:
    requests a second that kept every objective; kept: their share. mean_ttft, mean_tpot: the mean-value answer at the same load.
    e2e: from asking to the last token. classes: of each class of the workload that was asked for, by name. steady: where all users
    began at once, of the requests after each user's first two; None elsewhere, or where there are none. calibrated: what a benchmark
    would report of such a start, with the ends that hold 9 of 10 (`calibrated_report`); None where it was not asked for.
    """

    load: OfferedLoad
    requests: int
    ttft: Spread
    tpot: Spread | None
    itl: Spread | None
    requests_per_s: float
    tokens_per_s: float
    kept: float
    mean_ttft: float
    mean_tpot: float
    e2e: Spread
    classes: dict[str, Waits]
    steady: Waits | None = None
    calibrated: dict[str, Any] | None = None

    @property
    def goodput(self) -> float:
        """Requests a second that kept every objective."""
        return self.kept * self.requests_per_s

    def disagreements(self) -> list[str]:
        """Where the simulation and the mean-value answer part, in words."""
        messages = []
        for name, spread, figure in (("TTFT", self.ttft, self.mean_ttft), ("TPOT", self.tpot, self.mean_tpot)):
            ratio = spread.mean / figure if spread else 1.0
            if abs(ratio - 1) > _AGREES:
                inside = "inside" if figure.low <= spread.mean <= figure.high else "outside"
                messages.append(
                    f"mean {name} {spread.mean * 1e3:,.1f} ms is {ratio:.2f} × the mean-value answer, {inside} its interval"
                )
        return messages

    def to_json(self) -> dict[str, Any]:
        """Stable fields; seconds and requests a second."""
        return {
            "requests_per_s_offered": self.load.rate,
            "concurrency": self.load.concurrency,
            "burstiness": self.load.burstiness,
            "requests": self.requests,
            "ttft_s": self.ttft.to_json(),
            "tpot_s": self.tpot and self.tpot.to_json(),
            "itl_s": self.itl and self.itl.to_json(),
            "e2e_s": self.e2e.to_json(),
            "classes": {name: waits.to_json() for name, waits in self.classes.items()},
            "steady_state": self.steady and self.steady.to_json(),
            "calibrated": self.calibrated,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.tokens_per_s,
            "goodput_requests_per_s": self.goodput,
            "share_within_objectives": self.kept,
            "mean_value": {"ttft_s": as_json(self.mean_ttft), "tpot_s": as_json(self.mean_tpot)},
            "disagreements": self.disagreements(),
        }


def outcome(
    load: OfferedLoad,
    instances: int,
    played: Played,
    objective: Objective,
    candidate: Candidate,
    settled: int | None = None,
) -> SimulationOutcome:
    """Sum up. instances: how many do the same as the one that was played. settled: number of the request from which a start of all
    users at once is no longer felt; None without one.
    """
    measured, gaps = played.measured, played.gaps
    began, ended = measured[0].arrival, max(served.finished for served in measured)
    steps = [(seconds, decodes) for begin, seconds, decodes in gaps if began <= begin]
    made = candidate.decode.options.tokens_a_step
    spoken = made * sum(decodes for begin, _, decodes in gaps if began <= begin <= ended)
    ends = sum(began <= end <= ended for end in played.finishes)
    answer = mean_value(candidate, load)
    every = Waits.of(measured)
    kinds = {one.name: [s for s in measured if s.asked.kind == one.name] for one in candidate.decode.workload.classes}
    return SimulationOutcome(
        load,
        every.requests,
        every.ttft,
        every.tpot,
        Spread.of([seconds for seconds, _ in steps], [decodes for _, decodes in steps]),
        ends / (ended - began) * instances,
        (spoken + ends) / (ended - began) * instances,
        sum(_keeps(served, objective) for served in measured) / len(measured),
        answer.ttft,
        answer.tpot,
        every.e2e,
        {name: Waits.of(served) for name, served in kinds.items() if served},
        Waits.of(after) if (after := [s for s in measured if settled is not None and s.number >= settled]) else None,
    )


def _keeps(served: Served, objective: Objective) -> bool:
    late = objective.ttft is not None and served.ttft + _FRONT > objective.ttft
    slow = objective.tpot is not None and served.tpot is not None and served.tpot > objective.tpot
    return not late and not slow


def mean_value(candidate: Candidate, load: OfferedLoad) -> Candidate:
    """The mean-value answer for a load: the batch at which the candidate's throughput is what is offered, by bisection."""
    output = candidate.decode.workload.output.mean
    if load.rate is None:
        batch = load.concurrency / (candidate.decode.replicas * candidate.count)
        batch = min(batch, candidate.batch)
        return with_intervals(moved(candidate, batch=batch, concurrency=float(load.concurrency)))
    low, high = 0.0, candidate.batch
    for _ in range(12):
        middle = (low + high) / 2
        if moved(candidate, batch=middle).throughput < load.rate * output:
            low = middle
        else:
            high = middle
    return with_intervals(moved(candidate, batch=high))
