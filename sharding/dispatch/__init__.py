"""Expert dispatch and combine: send tokens to the ranks of their experts and return the weighted sums."""

import importlib
from typing import Any

from sharding.dispatch.choice import choose_method
from sharding.dispatch.config import (
    DispatchConfig,
    default_capacity,
    even_routing_rows,
    host_capacity,
    hosts_of_a_token,
)

_LAZY_IMPORTS = {  # name → module of this package, which imports JAX
    "Collective": "collectives",
    "DispatchStatistics": "statistics",
    "Exchange": "entry",
    "ExpertGroup": "group",
    "ExpertsOfMesh": "entry",
    "Method": "transit",
    "Transit": "transit",
    "WireFormat": "wire",
    "dispatch": "entry",
    "dispatch_collectives": "entry",
    "further_together": "entry",
    "over_width": "collectives",
    "resolved_method": "entry",
    "sent_to_experts": "local",
}
__all__ = [
    "DispatchConfig",
    "choose_method",
    "default_capacity",
    "even_routing_rows",
    "host_capacity",
    "hosts_of_a_token",
    *_LAZY_IMPORTS,
]


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY_IMPORTS` when it is used: the planner uses `choose_method` and `default_capacity` without JAX."""
    if name in _LAZY_IMPORTS:
        return getattr(importlib.import_module(f"sharding.dispatch.{_LAZY_IMPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
