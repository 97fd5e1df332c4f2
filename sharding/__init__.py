"""Meshes, partition rules, expert dispatch and placement; knows nothing of any model, request or HTTP."""

from typing import Any

from sharding.errors import MeshError
from sharding.mesh import MeshSpec

__all__ = ["MeshError", "MeshSpec", "Rules"]


def __getattr__(name: str) -> Any:
    """`Rules` comes with JAX, which the planner and the command line must not import for `MeshSpec`."""
    if name == "Rules":
        from sharding.rules import Rules

        return Rules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
