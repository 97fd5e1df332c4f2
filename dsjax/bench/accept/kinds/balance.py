"""`BalanceMeasurement`: how even the experts' load is under a load, how often experts move, and how long that takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.errors import NotTestedError
from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.load import LoadMeasurement
from dsjax.bench.accept.watch import OURS
from dsjax.top.reading import Exposition

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed

_NO_EPLB = "the server does not move experts; start it with --enable-eplb"
_STEPS = "dsjax_step_seconds_count"
_FEWEST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class BalanceMeasurement(LoadMeasurement):
    """A load, and what `/metrics` of dsjax says of the experts meanwhile."""

    UNITS: ClassVar = {
        "rank_variation": "",
        "expert_variation": "",
        "balancedness": "",
        "steps": "steps",
        "rebalances_per_1000_steps": "",
        "rebalance_pause": "s",
        "rebalance_seconds": "s",
    }

    async def measure(self, bed: "TestBed") -> Measured:
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
        before, after = counters[0], counters[-1]
        found = Measured(samples=sum(record.succeeded for record in run.counted))
        self._enter_load(found, after)
        steps = sum(after.growth(before, _STEPS).values())
        found.enter("steps", steps, "")
        self._enter_rebalances(found, before, after, steps)
        return found

    def _enter_load(self, found: Measured, after: Exposition) -> None:
        """Tokens since the record began; without a record, those of the last window of the balancer."""
        name = "dsjax_expert_tokens_total"
        ranks, experts = after.by(name, "ep_rank"), after.by(name, "expert")
        if not ranks:
            ranks = after.by("dsjax_eplb_rank_tokens", "ep_rank")
            found.notes.append("The ranks' load is that of the last window of --enable-eplb: no --admin-api-key.")
        why = "the experts' load is not recorded; give --admin-api-key, or start the server with --enable-eplb"
        tokens = list(ranks.values())
        found.enter("rank_variation", variation(tokens), why)
        found.enter("expert_variation", variation(list(experts.values())), why)
        even = sum(tokens) / len(tokens) / max(tokens) if tokens and max(tokens) > 0 else None
        found.enter("balancedness", even, why)

    def _enter_rebalances(self, found: Measured, before: Exposition, after: Exposition, steps: float) -> None:
        names = ("rebalances_per_1000_steps", "rebalance_pause", "rebalance_seconds")
        if not after.by("dsjax_eplb_rebalances_total"):
            for name in names:
                found.enter(name, None, _NO_EPLB)
            return

        def grew(name: str) -> float:
            return sum(after.growth(before, f"dsjax_eplb_{name}_total").values())

        rebalances = grew("rebalances")
        often = rebalances / steps * 1000 if steps >= _FEWEST_STEPS else None
        found.enter(names[0], often, f"the load had {steps:g} steps, and fewer than {_FEWEST_STEPS} tell no frequency")
        none = f"no rebalance ended in the {steps:g} steps of the load"
        found.enter(names[1], grew("exchange_seconds") / rebalances if rebalances else None, none)
        found.enter(names[2], grew("rebalance_seconds") / rebalances if rebalances else None, none)


def variation(tokens: list[float]) -> float | None:
    """Standard deviation ÷ mean, of the population; None of fewer than two values, or of nothing but zeros."""
    if len(tokens) < 2 or not sum(tokens):
        return None
    mean = sum(tokens) / len(tokens)
    return (sum((each - mean) ** 2 for each in tokens) / len(tokens)) ** 0.5 / mean
