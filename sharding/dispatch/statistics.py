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
    tokens_per_rank: ``[layers, ranks]`` int64, pairs that each device computed. Devices that split an expert's width all count its pairs.
    rows_sent_per_rank: ``[ranks]`` int64, rows that dispatch sent to other devices, by owner rank of the tokens. Combine returns one
        weighted sum for each row.
    rows_received_per_rank: ``[ranks]`` int64, rows that dispatch received from other devices.
    rounds: exchanges of the rank with the most in each layer, summed over layers. Tokens overflowed if more than ``layers × chunks``.
    payload_bytes: bytes of rows and weighted sums sent. wire_bytes: all bytes that devices sent, with padding and sizes, but without the
        rows of a fused shared expert whose width is split.
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
        """Compute the statistics from ``dispatch``'s counts of one layer, or of several, stacked by a scan.

        tokens: tokens of one device, as in ``dispatch_collectives``. width: D. dtype: the compute dtype.
        """
        arrays = {name: np.asarray(value).astype(np.int64) for name, value in counts.items()}
        if arrays["rounds"].ndim == 1:
            arrays = {name: value[None] for name, value in arrays.items()}
        rank_counts = arrays["tokens_per_expert"]
        tokens_per_expert = tokens_per_physical_expert(spec, rank_counts)
        group = group_of(spec, config, tokens_per_expert.shape[1], platform)
        plan = exchange_plan(config, tokens, top_k, group)
        wire = WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
        collectives = plan.kind.collectives(group, wire, plan, 1)  # of one round per chunk
        payload = int(arrays["rows_sent"].sum()) * (wire.row_bytes + wire.answer_bytes) if collectives else 0
        # Without padding, collectives send the payload and the sizes that announce it; with padding, always full buffers.
        sends_padding, rounds_of_all_ranks = plan.kind.sends_padding(group), int(arrays["rounds"].sum())
        wire_bytes = 0 if sends_padding else payload
        for collective in collectives:
            if sends_padding or collective.purpose == "sizes":
                wire_bytes += collective.bytes_sent * collective.times // plan.chunks * rounds_of_all_ranks
        return cls(
            tokens_per_expert=tokens_per_expert,
            tokens_per_rank=rank_counts.sum(axis=2),
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
    """Sum each device's counts of its own experts, ``[layers, devices, experts]``, over EP groups: ``[layers, physical experts]``."""
    by_axis = counts.reshape(len(counts), *spec.shape, -1)
    # Devices that split an expert's width count the same pairs: use the first device's count.
    first_of_width = tuple(slice(1) if axis in spec.expert_width_axes else slice(None) for axis in spec.axes)
    return by_axis[(slice(None), *first_of_width)].sum(axis=1).reshape(len(counts), -1)
