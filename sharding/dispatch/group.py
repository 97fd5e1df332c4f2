"""``ExpertGroup``: the ranks that share one copy of the experts, as seen from inside ``shard_map``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from sharding.mesh import MeshSpec
from sharding.sums import tree_sum

Parts = tuple[tuple[int, ...], ...]
"""Ranks along some mesh axes, in parts of equal size that exchange independently (JAX's ``axis_index_groups``)."""


class InMemory(Protocol):
    """An exchange between devices that share memory.

    experts_read_tokens: whether a rank's experts can read and answer the tokens of all ranks in place (``Memory``).
    """

    experts_read_tokens: bool

    def __call__(
        self, rows_NW: jax.Array, axes: tuple[str, ...], ranks: int, gathers: bool, parts: Parts | None = None
    ) -> jax.Array:
        """Exchange rows between ``ranks`` devices: all along the mesh axes, or those of each part.

        Return the result of ``lax.all_gather(rows_NW, axes, axis_index_groups=parts, tiled=True)`` if ``gathers``, otherwise of
        ``lax.all_to_all(rows_NW, axes, 0, 0, axis_index_groups=parts, tiled=True)``.
        """

    def meeting(self, axes: tuple[str, ...]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return the unique number of this device's group along ``axes``, and the device's place in the group."""


@dataclass(frozen=True)
class ExpertGroup:
    """The mesh axes an exchange runs over, and what this rank holds. Axes of size one are left out of every collective.

    axes, size: axes over which whole experts are spread, and the number of ranks.
    width_axes, width: axes over which each expert's width is split, and the number of pieces (1: not split). The ranks
        along ``width_axes`` hold the same experts and different tokens.
    experts: physical experts on one rank.
    platform: of the mesh's devices (``cpu``, ``gpu``, ``tpu``), for choices between equal implementations.
    in_order: whether parts of a width are added in an order that does not depend on the mesh (``sharding.sums``).
    in_memory: carries rows instead of XLA's collectives; None: use XLA's collectives.
    on_host: ranks along ``axes`` that share a host; all are neighbours. parts: set if only some of the ranks along ``axes`` exchange
        with each other; ``size`` is then their number, and ``index`` a rank's place among them.
    """

    axes: tuple[str, ...]
    size: int
    width_axes: tuple[str, ...]
    width: int
    experts: int
    platform: str
    in_order: bool = False
    in_memory: InMemory | None = None
    on_host: int = 1
    parts: Parts | None = None

    @classmethod
    def of(
        cls,
        spec: MeshSpec,
        experts: int,
        platform: str,
        in_order: bool = False,
        in_memory: InMemory | None = None,
        devices_per_host: int | None = None,
    ) -> ExpertGroup:
        """Return the group that ``spec`` lays out, with ``experts`` physical experts in all, a multiple of ``spec.ep_size``.

        devices_per_host: neighbours in the mesh that share a host; None: hosts are unknown.
        """
        several = {axis for axis, size in zip(spec.axes, spec.shape, strict=True) if size > 1}
        axes, width_axes = (tuple(a for a in one if a in several) for one in (spec.expert_axes, spec.expert_width_axes))
        on_rank, on_host = experts // spec.ep_size, spec.expert_ranks_on_host(devices_per_host or 1)
        shape = axes, spec.ep_size, width_axes, spec.expert_width_shards, on_rank
        return cls(*shape, platform, in_order, in_memory, on_host)

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
        if not self.axes:
            return jnp.int32(0)
        own = lax.axis_index(self.axes)
        return own if self.parts is None else places_in(self.parts)[own]

    def in_two_stages(self) -> tuple[ExpertGroup, ExpertGroup]:
        """Return a group of one rank per host, and a group of the ranks of one host. A rank is in one of each; together they reach all.

        In the first group, a host plays the role of a rank: it holds the experts of all of its ranks.
        """
        places = np.arange(self.size).reshape(-1, self.on_host)
        hosts, near = places.shape
        across, inside = (tuple(map(tuple, one.tolist())) for one in (places.T, places))
        between = replace(self, size=hosts, experts=self.experts * near, parts=across)
        return between, replace(self, size=near, parts=inside)

    def exchange(self, rows_NW: jax.Array) -> jax.Array:
        """``all_to_all`` of ``size`` equal blocks of rows: block ``g`` goes to rank ``g``; block ``s`` of the result is from rank ``s``."""
        return rows_NW if self.size == 1 else self._swap(rows_NW, self.axes, self.size)

    def exchange_all(self, rows_NW: jax.Array) -> jax.Array:
        """``exchange`` between all ranks that share one copy of the experts."""
        return self._swap(rows_NW, self.all_axes, self.all_ranks)

    def gather(self, rows_NW: jax.Array) -> jax.Array:
        """The rows of all ranks along ``axes``."""
        return rows_NW if self.size == 1 else self._gather(rows_NW, self.axes, self.size)

    def gather_all(self, rows_NW: jax.Array) -> jax.Array:
        """The rows of all ranks that share one copy of the experts."""
        return self._gather(rows_NW, self.all_axes, self.all_ranks)

    def _gather(self, rows_NW: jax.Array, axes: tuple[str, ...], ranks: int) -> jax.Array:
        if self.in_memory is not None:
            return self.in_memory(rows_NW, axes, ranks, True, self.parts)
        return lax.all_gather(rows_NW, axes, axis=0, axis_index_groups=self.parts, tiled=True)

    def _swap(self, rows_NW: jax.Array, axes: tuple[str, ...], ranks: int) -> jax.Array:
        if self.in_memory is not None:
            return self.in_memory(rows_NW, axes, ranks, False, self.parts)
        return lax.all_to_all(rows_NW, axes, split_axis=0, concat_axis=0, axis_index_groups=self.parts, tiled=True)

    def pool_width(self, rows_NW: jax.Array) -> jax.Array:
        """The rows of all ranks that hold a part of the same experts' width."""
        return rows_NW if self.width == 1 else lax.all_gather(rows_NW, self.width_axes, axis=0, tiled=True)

    def share_width(self, partial_ND: jax.Array) -> jax.Array:
        """Undo ``pool_width``: add up the parts; each rank keeps the rows that it contributed."""
        if self.width == 1:
            return partial_ND
        if self.in_order:
            return tree_sum(partial_ND, self.width_axes, self.width, split=True)
        return lax.psum_scatter(partial_ND, self.width_axes, scatter_dimension=0, tiled=True)


def places_in(parts: Parts) -> Int[Array, "N"]:
    """The place of each rank in its part."""
    return jnp.asarray(np.argsort(np.concatenate(parts)) % len(parts[0]), jnp.int32)
