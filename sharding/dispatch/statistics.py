"""``DispatchStatistics``: the counts that dispatches reported, as figures for people, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from sharding.balancing import balancedness_of_ranks
from sharding.dispatch.config import DispatchConfig
from sharding.dispatch.entry import exchange_plan, group_of
from sharding.dispatch.wire import WireFormat
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class DispatchStatistics:
    """Expert load and traffic of one or more layers of one step.

    tokens_per_expert: ``[layers, X]`` int64, (token, expert) pairs of each physical expert, summed over the copies of
        the set of experts that a mesh with ``ep`` < devices has.
    tokens_per_rank: ``[layers, ranks]`` int64, pairs computed on each device (devices that share an expert's width each
        count them).
    rows_sent: rows that had to go to another device; the same number of weighted sums came back. rows_sent_per_rank:
        by the rank that the tokens belong to.
    rounds: exchanges that a rank took part in, summed over layers and chunks: above ``layers × chunks`` tokens overflowed.
    payload_bytes: bytes of those rows, both ways, where they travel at all; wire_bytes: bytes that devices sent, padding included.
    """

    tokens_per_expert: np.ndarray
    tokens_per_rank: np.ndarray
    rows_sent_per_rank: np.ndarray
    rows_received_per_rank: np.ndarray
    rounds: int
    payload_bytes: int
    wire_bytes: int

    @classmethod
    def of(
        cls,
        counts: Mapping[str, np.ndarray],
        spec: MeshSpec,
        config: DispatchConfig,
        *,
        tokens: int,
        width: int,
        top_k: int,
        dtype: jnp.dtype,
        platform: str,
    ) -> DispatchStatistics:
        """Read what ``dispatch`` returned, for one layer or stacked over layers (a scan's output).

        tokens: of one device, as in ``dispatch_collectives``; width: D; dtype: the compute dtype.
        """
        arrays = {name: np.asarray(value).astype(np.int64) for name, value in counts.items()}
        if arrays["rounds"].ndim == 1:
            arrays = {name: value[None] for name, value in arrays.items()}
        per_rank = arrays["tokens_per_expert"]
        per_expert = tokens_per_physical_expert(spec, per_rank)
        experts = per_expert.shape[1]
        group = group_of(spec, config, experts, platform)
        plan = exchange_plan(config, tokens, top_k, group)
        wire = WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
        # One round's collectives of each chunk, times the rounds that each rank counted.
        collectives, rounds = plan.kind.collectives(group, wire, plan, 1), int(arrays["rounds"].sum())
        padded, row_bytes = plan.kind.sends_padding(group), wire.row_bytes + wire.answer_bytes
        payload = int(arrays["rows_sent"].sum()) * row_bytes if collectives else 0
        wire_bytes = 0 if padded else payload
        for each in collectives:
            if padded or each.purpose == "sizes":
                wire_bytes += each.bytes_sent * each.times // plan.chunks * rounds
        return cls(
            tokens_per_expert=per_expert,
            tokens_per_rank=per_rank.sum(axis=2),
            rows_sent_per_rank=arrays["rows_sent"].sum(axis=0),
            rows_received_per_rank=arrays["rows_received"].sum(axis=0),
            rounds=int(arrays["rounds"].max(axis=1).sum()),
            payload_bytes=payload,
            wire_bytes=wire_bytes,
        )

    @property
    def padding_share(self) -> float:
        """Share of the bytes on the wire that nobody needed."""
        return 1.0 - self.payload_bytes / self.wire_bytes if self.wire_bytes else 0.0

    @property
    def balancedness(self) -> float:
        """``Balancedness.of_sums``: the layers' mean ranks ÷ their busiest, each summed; 1 is perfect, and so is no load at all."""
        return balancedness_of_ranks(self.tokens_per_rank).of_sums

    @property
    def layer_balancedness(self) -> float:
        """``Balancedness.of_layers``: the mean over layers of each layer's mean ÷ max."""
        return balancedness_of_ranks(self.tokens_per_rank).of_layers


def tokens_per_physical_expert(spec: MeshSpec, counts: np.ndarray) -> np.ndarray:
    """What each device counted of its own slots, ``[layers, devices, X]``, as ``[layers, slots of an EP group]``: copies of it added up."""
    by_axis = counts.reshape(len(counts), *spec.shape, -1)
    # Devices that share an expert's width counted the same pairs.
    alike = tuple(slice(1) if axis in spec.expert_width_axes else slice(None) for axis in spec.axes)
    copies = by_axis[(slice(None), *alike)].sum(axis=1)
    return copies.reshape(len(counts), -1)
