"""``memory``: no exchange between devices that share memory, because each rank's experts read all ranks' tokens in place."""

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
    """``Method`` for emulated devices. Their experts add a token's terms in the order of its choices. ``compute`` does all the work."""

    group: ExpertGroup

    name = "memory"
    keeps_choices = True

    @classmethod
    def of(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, fused_shared: bool) -> Memory:
        """As ``Method.of``; ``ByChoice`` handles ``fused_shared``."""
        return cls(group)

    @classmethod
    def collectives(cls, group: ExpertGroup, wire: WireFormat, plan: ExchangePlan, rounds: int) -> list[Collective]:
        """Return an empty list."""
        return []

    def prepare(self, x_TD, slots_TK, weights_TK) -> Transit:
        """Pass on the tokens without packing them."""
        return Transit((x_TD, weights_TK), slots_TK)

    def compute(self, transit: Transit, experts: RankExperts) -> Transit:
        """Compute the weighted sums of this rank's tokens over the experts of all ranks."""
        (x_TD, weights_TK), slots_TK = transit.rows, transit.kept
        y_TD, seen = experts.together(x_TD, slots_TK, weights_TK)
        return Transit(y_TD, sent_to_experts(self.group, seen, slots_TK, 1))

    def add(self, transit: Transit, experts: RankExperts) -> tuple[Array, Counts]:
        """Return the sums unchanged."""
        return transit.rows, transit.kept
