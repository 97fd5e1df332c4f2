"""`BalanceMeasurement`: how even the experts' load is under a load, how often experts move, and how long that takes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.load import LoadMeasurement
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.bench.accept.watch import OURS
from dsjax.top.reading import Exposition

_NO_EPLB = "the server does not move experts; start it with --enable-eplb"
_UNRECORDED = "the experts' load is not recorded; give --admin-api-key, or start the server with --enable-eplb"
_FEWEST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class BalanceMeasurement(LoadMeasurement):
    """A load, and what `/metrics` of dsjax says of the experts meanwhile."""

    KIND: ClassVar = "balance"
    UNITS: ClassVar = {
        "rank_variation": "",
        "expert_variation": "",
        "balancedness": "",
        "steps": "steps",
        "rebalances_per_1000_steps": "",
        "rebalance_pause": "s",
        "rebalance_seconds": "s",
    }

    async def measure(self, bed: TestBed) -> Measured:
        """Put the load on the server; record the experts' load where the admin key lets us."""
        async with bed.watch(60.0) as glance:
            pass
        if not any(each.by(OURS) for each in glance.counters):
            raise NotTestedError("the server has no /metrics of dsjax, which tells of experts and ranks")
        records = bed.options.admin_api_key is not None and await bed.admin("/start_expert_distribution_record") is None
        try:
            run = await self.put_load(bed)
        finally:
            if records:
                await bed.admin("/stop_expert_distribution_record")
        counters = [each for each in run.watch.counters if each.by(OURS)]
        if len(counters) < 2:
            raise NotTestedError("the server's /metrics did not answer during the load")
        found = Measured(samples=sum(record.succeeded for record in run.counted))
        enter_balance(found, counters[0], counters[-1])
        return found


def enter_balance(found: Measured, before: Exposition, after: Exposition) -> None:
    """Enter the values of two scrapes, at a load's begin and end.

    Tokens are those since the record began; without a record, those of the balancer's last window.
    """
    name = "dsjax_expert_tokens_total"
    ranks, experts = after.by(name, "ep_rank"), after.by(name, "expert")
    if not ranks:
        ranks = after.by("dsjax_eplb_rank_tokens", "ep_rank")
        found.notes.append("The ranks' load is that of the last window of --enable-eplb: no --admin-api-key.")
    tokens = list(ranks.values())
    even = float(np.mean(tokens)) / max(tokens) if tokens and max(tokens) > 0 else None
    variations = {"rank_variation": variation(tokens), "expert_variation": variation(experts.values())}
    found.enter(variations | {"balancedness": even}, _UNRECORDED)

    def grew(name: str) -> float:
        return sum(after.growth(before, name).values())

    steps = grew("dsjax_step_seconds_count")
    found.enter({"steps": steps})
    if not after.by("dsjax_eplb_rebalances_total"):
        found.enter(dict.fromkeys(("rebalances_per_1000_steps", "rebalance_pause", "rebalance_seconds")), _NO_EPLB)
        return
    rebalances = grew("dsjax_eplb_rebalances_total")
    often = rebalances / steps * 1000 if steps >= _FEWEST_STEPS else None
    few = f"the load had {steps:g} steps, and fewer than {_FEWEST_STEPS} tell no frequency"
    found.enter({"rebalances_per_1000_steps": often}, few)
    for name, counter in (("rebalance_pause", "exchange_seconds"), ("rebalance_seconds", "rebalance_seconds")):
        each = grew(f"dsjax_eplb_{counter}_total") / rebalances if rebalances else None
        found.enter({name: each}, f"no rebalance ended in the {steps:g} steps of the load")


def variation(tokens: Collection[float]) -> float | None:
    """Standard deviation ÷ mean, of the population; None of fewer than two values, or of nothing but zeros."""
    values = np.array(list(tokens), float)
    return float(values.std() / values.mean()) if len(values) > 1 and values.any() else None
