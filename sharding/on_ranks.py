"""Lets the code of one rank open a region of its own, or run inside a region that its caller has opened.

A region is a ``jax.shard_map`` over all axes of a mesh. Inside it every array is the part of one rank, so that constraints on how arrays
lie over the mesh have nothing left to say. A rank can also skip work there that it has no tokens for. Outside a region it cannot: XLA's
partitioner has all ranks run the same operations.

Which of the two a piece of code is traced for, the type of its mesh says: ``Mesh`` outside, ``OneRank`` inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool


@dataclass(frozen=True)
class OneRank:
    """The mesh of code that runs inside a region over it, as that of one rank. Whoever opens a region (``on_ranks``) passes it on."""

    mesh: Mesh

    @property
    def devices(self) -> np.ndarray:
        """The devices of all ranks."""
        return self.mesh.devices

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that collectives may name."""
        return self.mesh.axis_names

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis → size."""
        return self.mesh.shape


def on_ranks(function: Callable, mesh: Mesh | OneRank, in_specs: Any, out_specs: Any) -> Callable:
    """``jax.shard_map`` of ``function`` over all axes of a ``Mesh``; for ``OneRank`` ``function`` itself."""
    if isinstance(mesh, OneRank):
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(array: Array, mesh: Mesh | OneRank, spec: P) -> Array:
    """Have an array spread over a ``Mesh``; for ``OneRank`` it is as it is."""
    if isinstance(mesh, OneRank):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def if_any(
    mesh: Mesh | OneRank, active: Bool[Array, "*n"], compute: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """``compute()``, or for ``OneRank``, where this rank has nothing active, ``otherwise()``, of the same shapes.

    ``compute`` must hold no collective: the other ranks would wait in it.
    """
    return jax.lax.cond(active.any(), compute, otherwise) if isinstance(mesh, OneRank) else compute()
