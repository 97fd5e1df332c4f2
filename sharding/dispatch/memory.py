"""``memory``: devices that share a memory need no exchange, since each rank's experts read everybody's tokens where they lie."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array

from sharding.dispatch.collectives import Collective
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, RankExperts, sent_to_experts
from sharding.dispatch.transit import ExchangePlan, Method, Transit
from sharding.dispatch.wire import WireFormat


@dataclass(frozen=True)
class Memory(Method):
    """``Method`` of emulated devices, whose experts add a token's terms in the order of its choices. All of it is ``compute``."""

    group: ExpertGroup

    name = "memory"
    keeps_choices = True

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, home: bool) -> Memory:
        """As ``Method.of``; ``ByChoice`` sees to ``home``."""
        return cls(group)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """None."""
        return []

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Nothing to pack."""
        return Transit((x_TD, weights_TK), slots_TK)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """The weighted sums of this rank's tokens, whosever experts they have."""
        (x_TD, weights_TK), slots_TK = transit.rows, transit.kept
        y_TD, seen = experts.together(x_TD, slots_TK, weights_TK)
        return Transit(y_TD, sent_to_experts(self.group, seen, slots_TK, 1))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """The sums as they are."""
        return transit.rows, transit.kept
