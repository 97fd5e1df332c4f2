"""``DispatchStatistics``: expert load and traffic, from the counts that ``dispatch`` returns, on the host."""

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

    tokens_per_expert: ``[layers, X]`` int64, (token, expert) pairs of each physical expert, summed over EP groups.
    tokens_per_rank: ``[layers, ranks]`` int64, pairs that each device computed. Devices that share an expert's width each count them.
    rows_sent_per_rank: ``[ranks]`` int64, rows sent to another device, by the rank that the tokens belong to; as many weighted sums
        came back. rows_received_per_rank: likewise, by the rank that received them.
    rounds: exchanges that a rank took part in, over all layers and chunks. More than ``layers × chunks``: tokens overflowed.
    payload_bytes: bytes of the rows sent, both ways. wire_bytes: bytes that devices sent, padding included.
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
        """Return the statistics of ``dispatch``'s counts, of one layer or stacked over layers (a scan's output).

        tokens: tokens of one device, as in ``dispatch_collectives``. width: D. dtype: the compute dtype.
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
        """Share of the bytes sent that are padding."""
        return 1.0 - self.payload_bytes / self.wire_bytes if self.wire_bytes else 0.0

    @property
    def balancedness(self) -> float:
        """``Balancedness.of_sums``: Σ over layers of the mean rank's load ÷ Σ of the busiest rank's; 1 is perfect. 1 without load."""
        return balancedness_of_ranks(self.tokens_per_rank).of_sums

    @property
    def layer_balancedness(self) -> float:
        """``Balancedness.of_layers``: mean over layers of the mean rank's load ÷ the busiest rank's."""
        return balancedness_of_ranks(self.tokens_per_rank).of_layers


def tokens_per_physical_expert(spec: MeshSpec, counts: np.ndarray) -> np.ndarray:
    """Sum the devices' counts of their own slots, ``[layers, devices, slots]``, over EP groups: ``[layers, slots of an EP group]``."""
    by_axis = counts.reshape(len(counts), *spec.shape, -1)
    # Devices that share an expert's width counted the same pairs.
    alike = tuple(slice(1) if axis in spec.expert_width_axes else slice(None) for axis in spec.axes)
    copies = by_axis[(slice(None), *alike)].sum(axis=1)
    return copies.reshape(len(counts), -1)
