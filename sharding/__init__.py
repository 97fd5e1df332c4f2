"""Meshes, partition rules, expert dispatch and placement; knows nothing of any model, request or HTTP.

::

    from sharding import MeshSpec, Rules, dispatch, placement

    spec = MeshSpec.parse("dp=4,tp=2")                       # experts over all 8 devices
    mesh, rules = spec.build(), Rules.for_mesh(spec).replace(shared_width=())
    sharding = rules.sharding(mesh, ("embed", "heads"), (7168, 24576))

    config = dispatch.DispatchConfig(method="padded", report=True)    # or a class of yours: dispatch.Method
    y, counts = dispatch.dispatch(spec, mesh, config, x, slots, weights, params, experts, param_specs)

`MeshSpec`, `Rules`, `MeshError` are here. `sharding.dispatch` sends tokens to their experts and back; `sharding.placement` and
`sharding.balancing` say which device has which copy of an expert; `sharding.on_ranks` and `sharding.sums` are for code inside
`shard_map`; `sharding.fp8` has block scales, `sharding.emulation` devices on a CPU.
"""

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
