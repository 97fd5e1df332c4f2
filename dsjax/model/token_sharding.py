"""Sharding of a step's tokens over the mesh in the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from sharding import MeshSpec
from sharding.on_ranks import OneRank, constrain, if_any, on_ranks


@dataclass(frozen=True, eq=False)
class TokenSharding:
    """Sharding constraints on arrays ``[B, T, …]``: ``B`` DP ranks with ``T`` token slots each."""

    spec: MeshSpec
    mesh: Mesh | OneRank

    def whole(self, array: Array) -> Array:
        """Replicate each DP rank's tokens on its ``tp`` devices.

        Dispatch splits a rank's tokens over ``tp``. Without this constraint XLA would propagate that sharding backwards to all
        earlier computations and add collectives there.
        """
        return self.constrain(array, self.spec.batch_axes)

    def split(self, array: Array) -> Array:
        """Split each DP rank's tokens over its ``tp`` devices."""
        return self.constrain(array, self.spec.batch_axes, self.spec.head_axes)

    def constrain(self, array: Array, *axes) -> Array:
        """Shard the array's leading axes over mesh axes. axes: per array axis a name, several names, or None."""
        return constrain(array, self.mesh, P(*axes))

    def if_any(self, active: Bool[Array, "*n"], compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return ``compute()``, or ``otherwise()`` for a ``OneRank`` mesh without active tokens (``sharding.on_ranks.if_any``)."""
        return if_any(self.mesh, active, compute, otherwise)

    def on_each_rank(self, choose: Callable, *, tokens_split: bool = False) -> Callable:
        """Return ``choose(whole, logits, tokens)``, mapped over the DP ranks' tokens. whole: replicated values. tokens_split: tokens are
        split over ``tp``."""
        tokens = P(self.spec.batch_axes, self.spec.head_axes if tokens_split else None)
        return on_ranks(choose, self.mesh, (P(), tokens, tokens), tokens)
