"""Expert dispatch: sending tokens to the ranks of their experts, and the weighted return."""

from sharding.dispatch.choice import choose_method
from sharding.dispatch.config import DispatchConfig, default_capacity
from sharding.dispatch.cost import Collective, dispatch_collectives
from sharding.dispatch.entry import dispatch, resolved_method
from sharding.dispatch.statistics import DispatchStatistics

__all__ = [
    "Collective",
    "DispatchConfig",
    "DispatchStatistics",
    "choose_method",
    "default_capacity",
    "dispatch",
    "dispatch_collectives",
    "resolved_method",
]
