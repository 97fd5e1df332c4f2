"""From a cluster, a workload and an objective to a layout, every figure with its kind, source and range. No JAX.

`plan`, `estimate` and `compare` are the public functions (docs/planner.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjax.plan.api import compare, estimate, plan

__all__ = ["compare", "estimate", "plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dsjax.plan import api

    return getattr(api, name)
