"""How the tokens of a step lie over the mesh while they pass through the layers."""

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
    """Constraints on arrays ``[B, T, …]``, where ``B`` are the DP ranks and ``T`` the token slots of one."""

    spec: MeshSpec
    mesh: Mesh | OneRank

    def whole(self, array: Array) -> Array:
        """Keep each DP rank's tokens whole on each of its ``tp`` devices.

        Dispatch splits a rank's tokens over ``tp``. Without this constraint XLA would carry that split backwards, into everything
        that is computed before, and add collectives there.
        """
        return self.constrain(array, self.spec.batch_axes)

    def split(self, array: Array) -> Array:
        """Split each DP rank's tokens over its ``tp`` devices."""
        return self.constrain(array, self.spec.batch_axes, self.spec.head_axes)

    def constrain(self, array: Array, *axes) -> Array:
        """Spread the array's leading axes over these mesh axes, each a name, some names, or None."""
        return constrain(array, self.mesh, P(*axes))

    def if_any(self, active: Bool[Array, "*n"], compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """``sharding.on_ranks.if_any``."""
        return if_any(self.mesh, active, compute, otherwise)

    def on_each_rank(self, choose: Callable, *, by_data: bool = False) -> Callable:
        """``choose(whole, logits, tokens)`` for each DP rank's tokens by itself. whole: what each device has all of. by_data: tokens are
        split over ``tp``."""
        tokens = P(self.spec.batch_axes, self.spec.head_axes if by_data else None)
        return on_ranks(choose, self.mesh, (P(), tokens, tokens), tokens)
