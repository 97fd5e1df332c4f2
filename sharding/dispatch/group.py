"""``ExpertGroup``: the ranks that share one copy of the experts, as seen from inside ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sharding.mesh import MeshSpec

Product = Callable[[Float[Array, "N D"], Int[Array, "N K"], Float[Array, "N K"]], Float[Array, "N D"]]


@dataclass(frozen=True)
class ExpertGroup:
    """The mesh axes an exchange runs over, and what this rank holds. Size-one axes are left out of every collective.

    axes, size: where whole experts are spread, and over how many ranks.
    width_axes, width: where each expert's width is split, and into how many pieces (1: not split). The ranks
        along ``width_axes`` hold the same experts and different tokens.
    experts: physical experts on one rank.
    platform: of the mesh's devices (``cpu``, ``gpu``, ``tpu``), for choices between equal implementations.
    """

    axes: tuple[str, ...]
    size: int
    width_axes: tuple[str, ...]
    width: int
    experts: int
    platform: str

    @classmethod
    def of(cls, spec: MeshSpec, mesh: Mesh, experts: int) -> ExpertGroup:
        """The group that ``spec`` lays out on ``mesh``, with ``experts`` physical experts on each rank."""

        def used(axes: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
            kept = tuple(a for a in axes if mesh.shape[a] > 1)
            size = 1
            for axis in kept:
                size *= mesh.shape[axis]
            return kept, size

        axes, size = used(spec.expert_axes)
        width_axes, width = used(spec.expert_width_axes)
        return cls(axes, size, width_axes, width, experts, mesh.devices.flat[0].platform)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis of size above one that an exchange involves."""
        return self.axes + self.width_axes

    @property
    def all_ranks(self) -> int:
        """Ranks that share one copy of the experts' weights: ``size * width``."""
        return self.size * self.width

    def index(self) -> Int[Array, ""]:
        """This rank's place along ``axes``: it holds physical experts ``[index * experts, (index + 1) * experts)``."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def local_ids(self, slots_NK: Int[Array, "N K"]) -> Int[Array, "N K"]:
        """Physical expert ids (-1: none) as ids of this rank's own experts, -1 for those of others."""
        local = slots_NK - self.index() * self.experts
        return jnp.where((slots_NK >= 0) & (local >= 0) & (local < self.experts), local, -1)

    def exchange(self, rows_GCW: jax.Array) -> jax.Array:
        """``all_to_all`` over the group: row block ``g`` goes to rank ``g``; block ``s`` of the result is from rank ``s``."""
        if self.size == 1:
            return rows_GCW
        return lax.all_to_all(rows_GCW, self.axes, split_axis=0, concat_axis=0, tiled=True)


def fewer_columns(ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"], experts: int):
    """At most ``experts`` columns of ids and weights, where a rank holds fewer experts than a token uses.

    A row's ids are distinct, so column ``x`` of the result says whether the row uses expert ``x``: ``[N, experts]``.
    """
    if experts >= ids_NK.shape[1]:
        return ids_NK, weights_NK
    chosen_NKX = ids_NK[:, :, None] == jnp.arange(experts)
    weights_NX = jnp.sum(jnp.where(chosen_NKX, weights_NK[:, :, None], 0), axis=1)
    return jnp.where(chosen_NKX.any(1), jnp.arange(experts), -1), weights_NX
