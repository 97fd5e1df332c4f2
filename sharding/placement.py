"""``Placement``: the logical expert in each physical slot, and the choice of a replica for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from sharding.balancing import check_load, rebalance
from sharding.errors import MeshError
from sharding.indices import take
from sharding.mesh import MeshSpec


class CopyTables(NamedTuple):
    """Slots of each logical expert's copies: ``physical_EC[e, c]`` for ``c < copies_E[e]``, padded with -1.

    A pytree of int32 arrays: the tables of several layers can be stacked and scanned.
    """

    physical_EC: Int[Array, "E C"]
    copies_E: Int[Array, "E"]


@dataclass(frozen=True)
class Placement:
    """Assignment of logical experts to physical slots. Slots are numbered rank by rank, with the same number on each rank."""

    physical_to_logical: tuple[int, ...]  # the logical expert in each physical slot; each has at least one
    n_logical: int

    def __post_init__(self):
        placed = set(self.physical_to_logical)
        if placed != set(range(self.n_logical)):
            missing = sorted(set(range(self.n_logical)) - placed)[:8]
            unknown = sorted(placed - set(range(self.n_logical)))[:8]
            raise MeshError(
                f"a placement must hold each of the logical experts 0 … {self.n_logical - 1} at least once and no other; "
                f"missing {missing}, unknown {unknown}"
            )

    @classmethod
    def identity(cls, n_logical: int) -> Placement:
        """Place one copy of each expert, in order."""
        return cls(tuple(range(n_logical)), n_logical)

    @classmethod
    def with_redundancy(
        cls, n_logical: int, n_physical: int, *, ranks: int, load: Sequence[float] | None = None
    ) -> Placement:
        """Place copies of the most loaded experts in the extra slots, balanced over ``ranks`` by load: ``rebalance`` of one layer.

        load: tokens per logical expert, from a report; None: uniform. Without a load and extra slots, the experts stay in order.

        Raises:
            MeshError: there are fewer slots than experts, the slots do not divide over the ranks, or the load has the wrong length.
        """
        if load is None and n_physical == n_logical and n_physical % ranks == 0:
            return cls.identity(n_logical)
        load_1E = check_load(np.ones((1, n_logical)) if load is None else np.asarray(load)[None])
        if load_1E.shape[1] != n_logical:
            raise MeshError(
                f"load of {load_1E.shape[1]} experts; expected {n_logical} counts of tokens, one per logical expert"
            )
        return cls(tuple(rebalance(load_1E, n_physical=n_physical, ranks=ranks)[0].tolist()), n_logical)

    @property
    def n_physical(self) -> int:
        """Physical slots over all ranks."""
        return len(self.physical_to_logical)

    @cached_property
    def logical_to_physical(self) -> tuple[tuple[int, ...], ...]:
        """Each logical expert's physical slots, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.n_logical)]
        for physical, logical in enumerate(self.physical_to_logical):
            slots[logical].append(physical)
        return tuple(map(tuple, slots))

    @property
    def tables(self) -> CopyTables:
        """The padded tables that ``assign_copies`` reads, as wide as the expert with the most copies."""
        physical_EC, copies_E = copy_tables(self.physical_to_logical, self.n_logical)
        return CopyTables(physical_EC[:, : copies_E.max()], copies_E)


def copy_tables(physical_to_logical: Int[np.ndarray, "*L P"] | Sequence[int], n_logical: int) -> CopyTables:
    """Return the tables of one layer, or of several along leading axes, wide enough for any placement on the same number of slots."""
    logical = np.asarray(physical_to_logical)
    *layers, slots = logical.shape
    width = slots - n_logical + 1
    order = np.argsort(logical, axis=-1, kind="stable")
    sorted_logical = np.take_along_axis(logical, order, axis=-1)
    copies = (logical[..., None, :] == np.arange(n_logical)[:, None]).sum(axis=-1, dtype=np.int32)
    copy = np.arange(slots) - np.take_along_axis(np.cumsum(copies, axis=-1) - copies, sorted_logical, axis=-1)
    physical = np.full((*layers, n_logical * width), -1, np.int32)
    np.put_along_axis(physical, sorted_logical * width + copy, order, axis=-1)
    return CopyTables(physical.reshape(*layers, n_logical, width), copies)


def assign_copies(
    tables: CopyTables,
    logical_TK: Int[Array, "T K"],
    active_T: Bool[Array, "T"],
    ranks: int = 1,
    distance: Int[np.ndarray, "R P"] | Int[Array, "R P"] | None = None,
    first_rank: int | Int[Array, ""] = 0,
) -> Int[Array, "T K"]:
    """Return the physical expert ids ``[T, K]`` of each token's logical ones, -1 for inactive tokens. Can be jitted.

    A rank sends its active tokens for an expert to the copies round-robin, in token order, and rank r starts at copy r. On each rank, and
    over ranks with one token each, the counts of two copies differ by at most 1. Tables of width 1 (no copies) cost one look-up.

    ranks: the T tokens are this many equal runs, one per DP rank. distance: distance of each run to each physical slot, from
        ``slot_distances``. If given, only the nearest copies are used, and balanced. first_rank: DP rank of the first run.
    """
    active_TK = jnp.broadcast_to(active_T[:, None], logical_TK.shape)
    if tables.physical_EC.shape[1] == 1:
        return jnp.where(active_TK, take(jnp.asarray(tables.physical_EC)[:, 0], logical_TK), -1)
    experts = tables.copies_E.shape[0]
    groups_RP = jnp.where(active_TK, logical_TK, experts).reshape(ranks, -1)
    turn_RP = (
        jax.vmap(lambda group_P: _running_count(group_P, experts + 1))(groups_RP)
        + (first_rank + jnp.arange(ranks))[:, None]
    )
    if distance is None:
        copies_TK = jnp.asarray(tables.copies_E)[logical_TK]
        physical_TK = jnp.asarray(tables.physical_EC)[logical_TK, turn_RP.reshape(logical_TK.shape) % copies_TK]
    else:
        nearest_REC, copies_RE = _nearest(tables, distance)
        rank_RP = jnp.arange(ranks)[:, None]
        logical_RP = logical_TK.reshape(ranks, -1)
        physical_RP = nearest_REC[rank_RP, logical_RP, turn_RP % copies_RE[rank_RP, logical_RP]]
        physical_TK = physical_RP.reshape(logical_TK.shape)
    return jnp.where(active_TK, physical_TK, -1)


def _nearest(tables: CopyTables, distance_RP: Int[np.ndarray, "R P"]) -> tuple[Int[Array, "R E C"], Int[Array, "R E"]]:
    """Return each expert's slots sorted by distance from each rank, and how many share the smallest distance."""
    physical_EC = jnp.asarray(tables.physical_EC)
    away_REC = jnp.where(physical_EC >= 0, jnp.asarray(distance_RP)[:, physical_EC], jnp.iinfo(jnp.int32).max)
    order_REC = jnp.argsort(away_REC, axis=-1, stable=True)
    sorted_REC = jnp.take_along_axis(jnp.broadcast_to(physical_EC, away_REC.shape), order_REC, axis=-1)
    return sorted_REC, jnp.sum(away_REC == away_REC.min(axis=-1, keepdims=True), axis=-1)


def slot_distances(spec: MeshSpec, hosts: Int[np.ndarray, "N"], n_physical: int) -> Int[np.ndarray, "R P"]:
    """Return the distance of each physical slot from each DP rank: 0 on the rank's own devices, 1 on its host, 2 elsewhere.

    hosts: host of each device, in mesh order. If several devices hold parts of a slot, the nearest one counts.
    """
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    index = dict(zip(spec.axes, np.unravel_index(np.arange(spec.num_devices), spec.shape), strict=True))
    place = np.ravel_multi_index([index[a] for a in spec.expert_axes], [sizes[a] for a in spec.expert_axes])
    rank, hosts = np.arange(spec.num_devices) // spec.tp_size, np.asarray(hosts)
    away_NN = np.where(rank[:, None] == rank, 0, np.where(hosts[:, None] == hosts, 1, 2))
    one, other = np.nonzero(index["dp"][:, None] == index["dp"])  # pairs of devices in one copy of the experts
    away = np.full((spec.dp_size, spec.ep_size), 2, np.int32)
    np.minimum.at(away, (rank[one], place[other]), away_NN[one, other])
    return np.repeat(away, n_physical // spec.ep_size, axis=1)


def _running_count(group_P: Int[Array, "P"], groups: int) -> Int[Array, "P"]:
    """Return, for each entry, the number of earlier entries with the same value."""
    size = group_P.shape[0]
    # One packed key instead of an argsort: a one-operand sort is several times faster on CPU.
    sorted_P = lax.sort(group_P.astype(jnp.uint32) * size + lax.iota(jnp.uint32, size), is_stable=False)
    count = jnp.zeros((groups,), jnp.int32).at[group_P].add(1)
    start_P = (jnp.cumsum(count) - count)[sorted_P // size]
    return jnp.zeros((size,), jnp.int32).at[sorted_P % size].set(lax.iota(jnp.int32, size) - start_P)
