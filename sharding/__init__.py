"""Meshes, partition rules, expert dispatch and placement, independent of models, requests and HTTP.

::

    from sharding import MeshSpec, Rules, dispatch, placement

    spec = MeshSpec.parse("dp=4,tp=2")                       # experts over all 8 devices
    mesh, rules = spec.build(), Rules.for_mesh(spec).replace(shared_width=())
    sharding = rules.sharding(mesh, ("embed", "heads"), (7168, 24576))

    config = dispatch.DispatchConfig(method="padded", report=True)    # or your own subclass of dispatch.Method
    y, counts = dispatch.dispatch(spec, mesh, config, x, slots, weights, params, experts, param_specs)

This module exports `MeshSpec`, `Rules` and `MeshError`. `sharding.dispatch` sends tokens to their experts and back. `sharding.placement`
and `sharding.balancing` place the copies of experts on devices. `sharding.on_ranks` and `sharding.sums` are for code inside `shard_map`.
`sharding.fp8` implements block scales, and `sharding.emulation` emulates devices on a CPU.
"""

from typing import Any

from sharding.errors import MeshError
from sharding.mesh import MeshSpec

__all__ = ["MeshError", "MeshSpec", "Rules"]


def __getattr__(name: str) -> Any:
    """Import `Rules` lazily, because it needs JAX. The planner and the command line use `MeshSpec` without importing JAX."""
    if name == "Rules":
        from sharding.rules import Rules

        return Rules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
