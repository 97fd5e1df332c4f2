"""Lets the code of one rank open a region of its own, or run inside a region that its caller has opened.

A region is a ``jax.shard_map`` over all axes of a mesh. Inside it every array is the part of one rank, so that constraints on how arrays
lie over the mesh have nothing left to say. A rank can also skip work there that it has no tokens for. Outside a region it cannot: XLA's
partitioner has all ranks run the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool


def on_one_rank() -> bool:
    """Whether the code that is being traced is one rank's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def on_ranks(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """``jax.shard_map`` of ``function`` over all axes of ``mesh``, or inside such a region ``function`` itself."""
    if on_one_rank():
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(array: Array, mesh: Mesh, spec: P) -> Array:
    """Have an array spread over ``mesh``; inside a region it is as it is."""
    return array if on_one_rank() else jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def if_any(active: Bool[Array, "*n"], compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """``compute()``, or inside a region, where this rank has nothing active, ``otherwise()``, of the same shapes.

    ``compute`` must hold no collective: the other ranks would wait in it.
    """
    return jax.lax.cond(active.any(), compute, otherwise) if on_one_rank() else compute()
