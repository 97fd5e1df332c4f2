"""What a benchmark that begins with all users at once reports of a deployment, with the ends that hold 9 of 10 such reports.

The blind rounds played public benchmarks (`tools/plan_data/replay.py`) and were predicted by `reported`. Nothing else predicts a time to
the first token as a benchmark reports it, so that the calibration of the TTFT is of these figures alone.
"""

from __future__ import annotations

from typing import Any

from dsjax.plan.assumptions import assumption
from dsjax.plan.calibration import LEVEL, RATE, TPOT, TTFT, TTFT_MEDIAN, TTFT_P99, calibration, distance_of, ends
from dsjax.plan.candidate import Candidate
from dsjax.plan.simulation.outcome import SimulationOutcome

FIELDS = {
    TTFT: "ttft_mean_s",
    TTFT_MEDIAN: "ttft_median_s",
    TTFT_P99: "ttft_p99_s",
    TPOT: "tpot_median_s",
    RATE: "output_tokens_per_s",
}
"""Names of what is reported, by the kind of blind prediction that calibrates it."""


def reported(seen: SimulationOutcome, requests_a_user: float, cold: float) -> dict[str, float]:
    """What is reported of a start of all users at once, by kind: seconds, and tokens a second of the whole service.

    cold: seconds that the first request of each user waits longer, which the mean has a share of, and the P99 the whole.
    """
    figures = {
        RATE: seen.tokens_per_s,
        TTFT: seen.ttft.mean + cold / requests_a_user,
        TTFT_MEDIAN: seen.ttft.p50,
        TTFT_P99: seen.ttft.p99 + cold,
    }
    return figures | ({TPOT: seen.tpot.p50} if seen.tpot else {})


def calibrated_report(candidate: Candidate, seen: SimulationOutcome) -> dict[str, Any]:
    """Stable fields of a start of all users at once with nothing left out.

    They are `level`, `distance`, and for each name of `FIELDS` the value, the ends that hold 9 of 10, the group that they rest on and
    its size.
    """
    distance = distance_of(candidate)
    users = max(1, round(seen.load.concurrency / (candidate.count if candidate.mode == "aggregated" else 1)))
    figures = reported(seen, seen.requests / users, assumption("a user's first prompt"))
    found = {
        FIELDS[kind]: {"value": value, **ends(calibration(kind, distance), value)} for kind, value in figures.items()
    }
    return {"level": LEVEL, "distance": distance, **found}
