"""`simulate`: a candidate under a load, on virtual time, until enough requests have been served."""

import math
from collections.abc import Callable

from dsjax.plan.candidate import Candidate
from dsjax.plan.simulation.deployment import Service
from dsjax.plan.simulation.outcome import SimulationOutcome, outcome
from dsjax.plan.simulation.service import OfferedLoad, Served, requests
from dsjax.plan.workload import Objective

_LOADS = (0.5, 0.7, 0.85, 0.95)
"""Shares of a candidate's own rate that are played where the question gives neither rate nor concurrency."""

_WARM = 1.25
"""Mean stays of a request before the first that is measured arrives."""


def loads(candidate: Candidate, burstiness: float = 1.0, at_once: bool = False) -> list[OfferedLoad]:
    """The question's own load, or shares of the rate that the mean-value answer promises; at_once: as many users as the plan has."""
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
    """Play requests until `num_requests` after the first `warmup` have finished.

    An aggregated service is one instance under its share of the load; a separated one is played whole.

    Args:
        warmup: requests of the whole service that are left out of the figures. None: a mean stay's and a quarter, so that the steady
            state is seen.
        at_once: a fixed number in flight starts all at once, as benchmarks do, and nobody comes after the last; otherwise one after
            the other over a mean stay, and others behind the last all the time.
        progress: called with the measured requests that have finished.
    """
    work, longest = candidate.decode.workload, candidate.decode.config.max_position_embeddings
    instances = candidate.count if candidate.mode == "aggregated" else 1
    users = max(1, round(load.concurrency / instances)) if load.concurrency else 0
    share = OfferedLoad(load.rate and load.rate / instances, users or None, load.burstiness)
    stay = candidate.ttft + candidate.tpot * work.output.mean
    first = math.ceil(_WARM * (users or stay * share.rate)) if warmup is None else round(warmup / instances)
    last = first + num_requests

    service, source = Service(candidate, longest), requests(share, work, longest, seed)
    measured: list[Served] = []
    finishes: list[float] = []
    coming, done = next(source), 0

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
