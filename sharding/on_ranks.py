"""Run per-rank code inside a ``shard_map`` region, opened either by the code itself or by its caller.

A region is a ``jax.shard_map`` over all axes of a mesh. Inside, every array is one rank's shard, so sharding constraints do not apply, and
a rank without tokens can skip work. The type of the mesh tells the code where it is traced: ``Mesh`` outside, ``OneRank`` inside.
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
    """The mesh of a region, for code of one rank that runs inside it. The code that opens the region (``on_ranks``) passes it on."""

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
    """Return ``jax.shard_map`` of ``function`` over all axes of a ``Mesh``, or ``function`` itself for ``OneRank``."""
    if isinstance(mesh, OneRank):
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(array: Array, mesh: Mesh | OneRank, spec: P) -> Array:
    """Constrain an array's sharding over a ``Mesh``; return it unchanged for ``OneRank``."""
    if isinstance(mesh, OneRank):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def if_any(
    mesh: Mesh | OneRank, active: Bool[Array, "*n"], compute: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Return ``compute()``, or ``otherwise()`` (same shapes) if the mesh is ``OneRank`` and this rank has nothing active.

    ``compute`` must contain no collective, or the other ranks would wait in it.
    """
    return jax.lax.cond(active.any(), compute, otherwise) if isinstance(mesh, OneRank) else compute()
