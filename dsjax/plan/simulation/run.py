"""`simulate`: a candidate under a load, on virtual time, until enough requests have been served."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from dsjax.plan.candidate import Candidate
from dsjax.plan.simulation.deployment import deployment
from dsjax.plan.simulation.load import OfferedLoad, requests
from dsjax.plan.simulation.outcome import Played, SimulationOutcome, outcome
from dsjax.plan.simulation.service import Served
from dsjax.plan.workload import Objective

_LOADS = (0.5, 0.7, 0.85, 0.95)
"""Shares of a candidate's own rate that are played where the question gives neither rate nor concurrency."""

_WARM = 1.25
"""Mean stays of a request before the first that is measured arrives."""


def loads(candidate: Candidate, burstiness: float = 1.0, at_once: bool = False) -> list[OfferedLoad]:
    """The question's own load, or shares of the rate that the mean-value answer promises; at_once: as many users as the plan has."""
    work = candidate.decode.workload
    if at_once and work.concurrency is None:
        return [OfferedLoad(None, max(1, round(candidate.concurrency)))]
    if work.concurrency is not None:
        return [OfferedLoad(None, max(1, round(work.concurrency)))]
    if work.rate is not None:
        return [OfferedLoad(work.rate, None, burstiness)]
    rate = candidate.throughput / work.output.mean
    return [OfferedLoad(share * rate, None, burstiness) for share in _LOADS]


def simulate(
    candidate: Candidate,
    load: OfferedLoad,
    objective: Objective,
    *,
    num_requests: int = 1000,
    seed: int = 0,
    warmup: int | None = None,
    at_once: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationOutcome:
    """Play requests until `num_requests` after the first `warmup` have finished.

    An aggregated service is one instance under its share of the load; a separated one is played whole.

    Args:
        warmup: requests of the whole service that are left out of the figures. None: a mean stay's and a quarter, so that the steady
            state is seen.
        at_once: a fixed number in flight starts all at once, as benchmarks do, and nobody comes after the last; otherwise one after
            the other over a mean stay, and others behind the last all the time.
    """
    instances = candidate.count if candidate.mode == "aggregated" else 1
    users = load.concurrency and max(1, round(load.concurrency / instances))
    share = OfferedLoad(load.rate and load.rate / instances, users, load.burstiness)
    work = candidate.decode.workload
    stay = candidate.ttft + candidate.tpot * work.output.mean
    warm = math.ceil(_WARM * (users or stay * share.rate)) if warmup is None else round(warmup / instances)
    longest = candidate.decode.config.max_position_embeddings
    played = _play(candidate, share, longest, 0.0 if at_once else stay, warm, num_requests, seed, progress)
    return outcome(load, instances, played, objective, candidate, 2 * (users or 0) if at_once else None)


def _play(
    candidate: Candidate,
    load: OfferedLoad,
    longest: int,
    stay: float,
    warm: int,
    wanted: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> Played:
    """The first of a fixed number in flight come one after the other over `stay` seconds; 0: all at once, and none after the last."""
    service, numbers = deployment(candidate, longest), itertools.count()
    source = requests(load, candidate.decode.workload, longest, seed)
    played = Played([], [], [])
    users = load.concurrency or 0
    starts = iter([stay * index / users for index in range(users)])

    arrived = 0

    def arrive(now: float) -> None:
        nonlocal arrived
        arrived += 1
        served = Served(next(numbers), asked, now)
        if warm <= served.number < warm + wanted:
            played.measured.append(served)
        service.add(served, now)

    asked = next(source)
    following = next(starts) if users else asked.arrival
    done = 0
    while done < wanted:
        now = service.next_time()
        if following <= now:
            arrive(following)
            asked = next(source)
            following = next(starts, math.inf) if users else asked.arrival
            continue
        for served in service.advance():
            played.finishes.append(now)
            if warm <= served.number < warm + wanted:
                done += 1
                if progress:
                    progress(done, wanted)
            if users and (stay or arrived < warm + wanted):
                arrive(now)
                asked = next(source)
    played.gaps.extend(service.gaps())
    return played
