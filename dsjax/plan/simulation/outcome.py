"""`simulate`: run a candidate under a load on virtual time; `SimulationOutcome`: percentiles and goodput beside the mean-value answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsjax.plan.calibration import LEVEL, RATE, TPOT, TTFT, TTFT_MEDIAN, TTFT_P99, calibration, distance_of, ends
from dsjax.plan.candidate import Candidate, recompute, with_intervals
from dsjax.plan.figure import as_json, assumption
from dsjax.plan.simulation.deployment import Service
from dsjax.plan.simulation.service import OfferedLoad, Served, requests
from dsjax.plan.workload import Objective

_FRONT = float(assumption("front door"))
"""Seconds of a TTFT that pass before and after the scheduler, the only part that is simulated."""
FIELDS = {
    TTFT: "ttft_mean_s",
    TTFT_MEDIAN: "ttft_median_s",
    TTFT_P99: "ttft_p99_s",
    TPOT: "tpot_median_s",
    RATE: "output_tokens_per_s",
}
"""Kind of blind prediction → field of `calibrated_report`. The blind rounds simulated public benchmarks, which start all users
at once (`tools/plan_data/replay.py`), and predicted them with `reported`."""


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
        """Summarise a sample, weighted if `weights` are given; None if it is empty."""
        if not len(values):
            return None
        weights = np.ones(len(values)) if weights is None else weights
        points = np.quantile(values, (0.5, 0.9, 0.95, 0.99), method="inverted_cdf", weights=weights)
        return cls(float(np.average(values, weights=weights)), *points.tolist())


@dataclass(frozen=True)
class Waits:
    """TTFT, TPOT (None if outputs have one token) and end-to-end latency of a set of requests, in seconds."""

    requests: int
    ttft: Spread
    tpot: Spread | None
    e2e: Spread

    @classmethod
    def of(cls, served: Sequence[Served]) -> Waits | None:
        """Summarise requests; None if there are none."""
        if not served:
            return None
        ttft, tpot, e2e = _times(served)
        return cls(len(served), Spread.of(ttft), Spread.of(tpot[~np.isnan(tpot)]), Spread.of(e2e))

    def to_json(self) -> dict[str, Any]:
        """Return stable JSON fields."""
        spreads = {f"{name}_s": getattr(self, name) for name in ("ttft", "tpot", "e2e")}
        return {"requests": self.requests, **{name: one and vars(one) for name, one in spreads.items()}}


def _times(served: Sequence[Served]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """TTFT, TPOT (NaN where the output has one token) and end-to-end time of each request, seconds."""
    rows = [(request.arrival, request.first, request.finished, request.output) for request in served]
    arrival, first, finished, output = np.array(rows, float).T
    tpot = (finished - first) / np.where(output > 1, output - 1, np.nan)
    return first - arrival + _FRONT, tpot, finished - arrival + _FRONT


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome(Waits):
    """Result of one load on the whole deployment of a candidate, with the latencies of all requests."""

    load: OfferedLoad
    itl: Spread | None  # over tokens: time of the step that made each; None if outputs have one token
    requests_per_s: float  # finished from the first measured arrival to the last measured finish
    tokens_per_s: float  # output tokens
    kept: float  # share of the requests that met every objective
    mean_ttft: float  # the mean-value answer at the same load
    mean_tpot: float  # likewise
    classes: dict[str, Waits]  # by class name of the workload
    steady: Waits | None  # if all users start at once: the requests after each user's first two, if any
    calibrated: dict[str, Any] | None = None  # `calibrated_report` if all users start at once, or None

    @property
    def goodput(self) -> float:
        """Requests per second that met every objective."""
        return self.kept * self.requests_per_s

    def to_json(self) -> dict[str, Any]:
        """Return stable JSON fields; seconds and requests per second."""
        return {
            "requests_per_s_offered": self.load.rate,
            "concurrency": self.load.concurrency,
            "burstiness": self.load.burstiness,
            **super().to_json(),
            "itl_s": self.itl and vars(self.itl),
            "classes": {name: waits.to_json() for name, waits in self.classes.items()},
            "steady_state": self.steady and self.steady.to_json(),
            "calibrated": self.calibrated,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.tokens_per_s,
            "goodput_requests_per_s": self.goodput,
            "share_within_objectives": self.kept,
            "mean_value": {"ttft_s": as_json(self.mean_ttft), "tpot_s": as_json(self.mean_tpot)},
        }


def outcome(
    load: OfferedLoad,
    instances: int,
    candidate: Candidate,
    objective: Objective,
    measured: list[Served],
    finishes: list[float],
    gaps: list[tuple[float, float, int]],
    settled: int | None,
) -> SimulationOutcome:
    """Summarise the simulation of one of `instances` identical instances.

    finishes: end of every request, measured or not, in seconds. gaps: (begin, seconds, decodes) of each decode step. settled: number of the
    first request that a simultaneous start of all users no longer affects; None without such a start.
    """
    began = measured[0].arrival
    ended = max(served.finished for served in measured)
    begins, seconds, decodes = np.array(gaps, float).reshape(-1, 3).T
    is_measured = begins >= began
    spoken = candidate.decode.options.tokens_a_step * decodes[is_measured & (begins <= ended)].sum()
    ends = np.count_nonzero((began <= np.array(finishes)) & (np.array(finishes) <= ended))
    ttft, tpot, _ = _times(measured)
    missed = ttft > (objective.ttft or np.inf)
    missed |= tpot > (objective.tpot or np.inf)
    answer = mean_value(candidate, load)
    kinds = {c.name: [s for s in measured if s.kind == c.name] for c in candidate.decode.workload.classes}
    return SimulationOutcome(
        **vars(Waits.of(measured)),
        load=load,
        itl=Spread.of(seconds[is_measured], decodes[is_measured]),
        requests_per_s=ends / (ended - began) * instances,
        tokens_per_s=float(spoken + ends) / (ended - began) * instances,
        kept=float(np.mean(~missed)),
        mean_ttft=answer.ttft,
        mean_tpot=answer.tpot,
        classes={name: waits for name, served in kinds.items() if (waits := Waits.of(served))},
        steady=None if settled is None else Waits.of([s for s in measured if s.number >= settled]),
    )


def mean_value(candidate: Candidate, load: OfferedLoad) -> Candidate:
    """Return the mean-value answer for a load: bisect the batch at which the candidate's throughput equals the offered load."""
    if load.rate is None:
        batch = min(load.concurrency / (candidate.decode.replicas * candidate.count), candidate.batch)
        return with_intervals(recompute(candidate, batch=batch, concurrency=float(load.concurrency)))
    low, high = 0.0, candidate.batch
    target = load.rate * candidate.decode.workload.output.mean
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if recompute(candidate, batch=middle).throughput < target else (low, middle)
    return with_intervals(recompute(candidate, batch=high))


def reported(simulated: SimulationOutcome, requests_a_user: float, cold: float) -> dict[str, float]:
    """Return the figures that a benchmark with a simultaneous start reports, by kind: seconds, and tokens/s of the whole service.

    cold: extra seconds of each user's first request. The mean TTFT includes their average over all requests, the P99 all of them.
    """
    figures = {
        RATE: simulated.tokens_per_s,
        TTFT: simulated.ttft.mean + cold / requests_a_user,
        TTFT_MEDIAN: simulated.ttft.p50,
        TTFT_P99: simulated.ttft.p99 + cold,
    }
    return figures | ({TPOT: simulated.tpot.p50} if simulated.tpot else {})


def calibrated_report(candidate: Candidate, simulated: SimulationOutcome) -> dict[str, Any]:
    """Return stable JSON fields of a benchmark that starts all users at once and excludes no request.

    The fields are `level`, `distance`, and for each name in `FIELDS` the value, its 90 % interval, the group of blind predictions that
    the interval is based on, and the group's size.
    """
    distance = distance_of(candidate)
    users = max(1, round(simulated.load.concurrency / (candidate.count if candidate.mode == "aggregated" else 1)))
    figures = reported(simulated, simulated.requests / users, assumption("a user's first prompt"))
    intervals = {
        FIELDS[kind]: {"value": value, **ends(calibration(kind, distance), value)} for kind, value in figures.items()
    }
    return {"level": LEVEL, "distance": distance, **intervals}


_LOADS = (0.5, 0.7, 0.85, 0.95)
"""Shares of a candidate's own rate to simulate if the question gives neither rate nor concurrency."""

_WARM = 1.25
"""Warm-up before the first measured arrival, in mean request latencies."""


def loads(candidate: Candidate, burstiness: float = 1.0, at_once: bool = False) -> list[OfferedLoad]:
    """Return the question's load, or shares of the rate that the mean-value answer predicts; at_once: as many users as the plan has."""
    work = candidate.decode.workload
    if at_once or work.concurrency is not None:
        users = candidate.concurrency if work.concurrency is None else work.concurrency
        return [OfferedLoad(None, max(1, round(users)))]
    most = candidate.throughput / work.output.mean
    rates = [share * most for share in _LOADS] if work.rate is None else [work.rate]
    return [OfferedLoad(rate, None, burstiness) for rate in rates]


def simulate(
    candidate: Candidate,
    load: OfferedLoad,
    objective: Objective,
    *,
    num_requests: int = 1000,
    seed: int = 0,
    warmup: int | None = None,
    at_once: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SimulationOutcome:
    """Simulate requests until `num_requests` after the first `warmup` have finished.

    An aggregated service is simulated as one instance under its share of the load; a separated one is simulated whole.

    Args:
        warmup: requests of the whole service to exclude from the figures. None: those of 1.25 mean request latencies, so that the
            figures describe the steady state.
        at_once: start a fixed concurrency all at once, as benchmarks do, and send nothing after the last measured request. Otherwise
            spread the starts over a mean request latency, and keep sending requests after the last measured one.
        progress: called with the number of measured requests that have finished.
    """
    work = candidate.decode.workload
    longest = candidate.decode.config.max_position_embeddings
    instances = candidate.count if candidate.mode == "aggregated" else 1
    users = max(1, round(load.concurrency / instances)) if load.concurrency else 0
    share = OfferedLoad(load.rate and load.rate / instances, users or None, load.burstiness)
    stay = candidate.ttft + candidate.tpot * work.output.mean
    first = math.ceil(_WARM * (users or stay * share.rate)) if warmup is None else round(warmup / instances)
    last = first + num_requests

    service = Service(candidate, longest)
    source = requests(share, work, longest, seed)
    measured: list[Served] = []
    finishes: list[float] = []
    coming = next(source)
    done = 0

    def arrive(now: float) -> None:
        nonlocal coming
        coming.arrival = now
        if first <= coming.number < last:
            measured.append(coming)
        service.add(coming, now)
        coming = next(source)

    starts = iter([0.0 if at_once else stay * index / users for index in range(users)])
    following = next(starts) if users else coming.arrival
    while done < num_requests:
        now = service.next_time()
        if following <= now:
            arrive(following)
            following = next(starts, math.inf) if users else coming.arrival
            continue
        for served in service.advance():
            finishes.append(now)
            if first <= served.number < last:
                done += 1
                if progress:
                    progress(done)
            if users and (coming.number < last or not at_once):
                arrive(now)
    settled = 2 * users if at_once else None
    return outcome(load, instances, candidate, objective, measured, finishes, service.gaps(), settled)
