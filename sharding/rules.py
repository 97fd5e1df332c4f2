"""Partition rules: one table from logical axis names to mesh axes, from which every sharding is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.errors import MeshError
from sharding.host_memory import host_sharding
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class Rules:
    """Logical axis name → the mesh axes over which that dimension is sharded; ``()`` does not shard it.

    To try another layout, replace entries: ``Rules.for_mesh(spec).replace(shared_width=())``.
    """

    table: Mapping[str, tuple[str, ...]]
    # logical axes whose arrays are in the memory of each device's host, instead of on the device (``in_host_memory``)
    in_host: frozenset[str] = frozenset()

    def __post_init__(self):
        object.__setattr__(self, "table", MappingProxyType({name: tuple(axes) for name, axes in self.table.items()}))
        for name, axes in self.table.items():
            if len(set(axes)) != len(axes):
                raise MeshError(f"rule {name!r} → {axes}: a mesh axis can split a dimension once; name it once")

    @classmethod
    def for_mesh(cls, spec: MeshSpec) -> Rules:
        """Return the usual layout: heads and widths are sharded over ``tp``, experts as in ``spec``; other weights are not sharded."""
        return cls(
            {
                "layers": (),
                "embed": (),
                "embedded_vocab": spec.head_axes,
                "vocab": spec.head_axes,
                "head_tokens": (),
                "heads": spec.head_axes,
                "query_latent": (),
                "latent": (),
                "mlp_width": spec.head_axes,
                "shared_width": spec.head_axes,
                "experts": spec.expert_axes,
                "expert_width": spec.expert_width_axes,
                "router_experts": (),
                "stack": (),
                "ranks": spec.batch_axes,
                "tokens": spec.token_axes,
            }
        )

    def replace(self, **changes: tuple[str, ...]) -> Rules:
        """Return a table with some entries changed; their names must exist.

        Raises:
            MeshError: a name that no parameter uses.
        """
        unknown = sorted(set(changes) - set(self.table))
        if unknown:
            raise MeshError(f"no logical axis is called {unknown}; the names are {sorted(self.table)}")
        return dataclasses.replace(self, table={**self.table, **changes})

    def in_host_memory(self, *names: str) -> Rules:
        """Return a table that places arrays with one of these logical axes in pinned host memory, which devices can access."""
        return dataclasses.replace(self, in_host=self.in_host | frozenset(names))

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """Return the ``PartitionSpec`` of an array with these logical axes (None: never sharded).

        Raises:
            MeshError: an unknown name, or two dimensions that claim the same mesh axis.
        """
        entries, taken = [], {}
        for name in axes:
            mesh_axes = self._lookup(name)
            for axis in mesh_axes:
                if axis in taken:
                    raise MeshError(
                        f"axes {axes}: {taken[axis]!r} and {name!r} are both split over mesh axis {axis!r}; "
                        "change one of the two rules"
                    )
                taken[axis] = name
            entries.append(mesh_axes or None)
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Return the ``NamedSharding`` of an array; check that every sharded dimension is divisible.

        Raises:
            MeshError: a dimension is not divisible; names it, its size and the product of its mesh axes.
        """
        spec = self.spec(axes)
        for name, size, entry in zip(axes, shape, spec, strict=True):
            ways = self.ways(mesh, name)
            if size % ways:
                raise MeshError(
                    f"axis {name!r} of size {size} is not divisible by {ways} (mesh axes {entry}); "
                    f"choose a mesh whose product divides {size}, or Rules.replace({name}=())"
                )
        sharding = NamedSharding(mesh, spec)
        return host_sharding(sharding) if self.in_host.intersection(axes) else sharding

    def ways(self, mesh: Mesh, name: str | None) -> int:
        """Return the number of shards of a logical axis on ``mesh``; 1 for None."""
        return math.prod(mesh.shape[axis] for axis in self._lookup(name))

    def _lookup(self, name: str | None) -> tuple[str, ...]:
        if name is None:
            return ()
        if name not in self.table:
            raise MeshError(f"no rule for logical axis {name!r}; the names are {sorted(self.table)}")
        return self.table[name]
