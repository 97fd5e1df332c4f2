"""``DispatchStatistics``: the counts that dispatches reported, as figures for people, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from sharding.balancing import balancedness_of_ranks
from sharding.dispatch.config import DispatchConfig
from sharding.dispatch.cost import dispatch_collectives
from sharding.dispatch.entry import exchange_plan
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.ragged import NATIVE_PLATFORMS
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
    payload_bytes: bytes of those rows, both ways. wire_bytes: bytes that devices sent, padding included.
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
        exchanges: int = 1,
    ) -> DispatchStatistics:
        """Read what ``dispatch`` returned, for one layer or stacked over layers (a scan's output).

        tokens: of one device, as in ``dispatch_collectives``; width: D; dtype: the compute dtype. exchanges: how many of so many tokens
        were added up in a layer's counts.
        """
        arrays = {name: np.asarray(value).astype(np.int64) for name, value in counts.items()}
        if arrays["rounds"].ndim == 1:
            arrays = {name: value[None] for name, value in arrays.items()}
        per_rank = arrays["tokens_per_expert"]
        per_expert = tokens_per_physical_expert(spec, per_rank)
        shape = {"tokens": tokens, "width": width, "top_k": top_k, "dtype": dtype, "platform": platform}
        shape["experts"] = per_expert.shape[1]
        group = ExpertGroup.of(
            spec, shape["experts"], platform, config.by_choice, devices_per_host=config.devices_per_host
        )
        choices = exchange_plan(config, tokens, top_k, group).choices
        wire = WireFormat(width, choices, jnp.dtype(dtype), config.wire == "fp8")
        row_bytes = wire.row_bytes + width * np.dtype(dtype).itemsize
        payload = int(arrays["rows_sent"].sum()) * row_bytes
        return cls(
            tokens_per_expert=per_expert,
            tokens_per_rank=per_rank.sum(axis=2),
            rows_sent_per_rank=arrays["rows_sent"].sum(axis=0),
            rows_received_per_rank=arrays["rows_received"].sum(axis=0),
            rounds=int(arrays["rounds"].max(axis=1).sum()),
            payload_bytes=payload,
            wire_bytes=_wire_bytes(arrays, spec, config, payload, shape, exchanges),
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


def _wire_bytes(
    arrays: Mapping[str, np.ndarray], spec: MeshSpec, config: DispatchConfig, payload: int, shape: dict, exchanges: int
) -> int:
    """Bytes that all devices sent: one round's collectives times the rounds that each rank counted."""
    hosts = config.devices_per_host
    group = ExpertGroup.of(spec, shape["experts"], shape["platform"], devices_per_host=hosts)
    plan = exchange_plan(config, shape["tokens"], shape["top_k"], group)
    method, chunks = plan.method, plan.chunks
    collectives = dispatch_collectives(spec, config, **shape)
    if method == "ragged" and shape["platform"] in NATIVE_PLATFORMS and group.width == 1:
        collectives = tuple(c for c in collectives if c.purpose == "sizes")
    else:
        payload = 0
    rounds = int(arrays["rounds"].sum())
    # Further rounds of ``gather`` bring terms back; its tokens are gathered once for each chunk.
    gathers = arrays["rounds"].size * chunks * exchanges if method == "gather" else rounds
    sent = {"dispatch": gathers, "sizes": rounds, "combine": rounds}
    return payload + sum(c.bytes_sent * c.times // chunks * sent[c.purpose] for c in collectives)
