"""From a cluster, a workload and an objective to a layout, every figure with its kind, source and range. No JAX.

`plan`, `estimate` and `compare` are the public functions (docs/plan.md, *In Python*). They are imported when they are first asked for.
"""

import importlib
from typing import Any

__all__ = ["compare", "estimate", "plan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dsjax.plan.api"), name)
