"""``ExpertRecorder``: expert load and dispatch counters, summed over the steps of a recording."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.model.apart import LayerPass
from dsjax.model.rows import GroupShape
from dsjax.model.step import ModelStep
from sharding.dispatch import DispatchStatistics
from sharding.layer_placement import LayerPlacements

_MAX_UNREAD = 64
"""Maximum number of launches whose reports are still on the devices."""
_SECONDS = 1.0
"""Seconds after which the next launch reads the reports from the devices."""

_Size = tuple[int, int]
"""Token slots per DP rank in one exchange, and exchanges per layer (one per micro-batch)."""


class ExpertRecorder:
    """Sums the counts that dispatch reports in each step. Each recording has a recorder of its own.

    Reports stay on the devices for up to 64 launches or one second. ``counts`` leaves them there; ``read`` reads them first.
    """

    def __init__(self, step: ModelStep):
        self._step = step
        self._unread: list[tuple[Mapping[str, Array], _Size, LayerPlacements]] = []
        self._last_read_time = 0.0
        self._placements: LayerPlacements | None = None  # in the last launch that was read
        # Sums over the launches read: tokens per physical and per logical expert, rows sent per rank, rounds, payload and wire bytes.
        self._sums: list[Any] = [0] * 6

    def add(self, reports: Mapping[str, Array], groups: Sequence[GroupShape], placements: LayerPlacements) -> None:
        """Keep a launch's reports. groups: the launch's row groups on a DP rank. placements: the expert placement that it used."""
        if not reports:
            return
        exchanges = self._step.num_micro_batches(groups)
        size = -(-sum(group.tokens for group in groups) // exchanges), exchanges
        self._unread.append((dict(reports), size, placements))
        if len(self._unread) >= _MAX_UNREAD or time.monotonic() - self._last_read_time >= _SECONDS:
            self._read()

    def counts(self) -> ExpertCounts | None:
        """Return the sums without the reports that are still on the devices; None until reports have been read."""
        if self._placements is None:
            return None
        tokens, logical, rows, rounds, payload, wire = self._sums
        return ExpertCounts(
            tokens,
            rows,
            logical,
            self._placements.physical_to_logical[: len(tokens)],
            rounds=int(rounds),
            dispatch_bytes=int(wire),
            padding_share=float(1.0 - payload / wire if wire else 0.0),
        )

    def read(self) -> ExpertCounts | None:
        """Read all reports and return the sums since recording began; None before the first launch."""
        self._read()
        return self.counts()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self._last_read_time = time.monotonic()
        reports = jax.device_get([report for report, _, _ in unread])
        # Launches of the same size and placement are evaluated together, as one launch with more layers.
        batches: dict[tuple[_Size, int], list[int]] = {}
        for index, (_, size, placements) in enumerate(unread):
            batches.setdefault((size, id(placements)), []).append(index)
        for indices in batches.values():
            _, size, placements = unread[indices[0]]
            self._enter([reports[index] for index in indices], size, placements)

    def _enter(self, reports: list[Mapping[str, np.ndarray]], size: _Size, placements: LayerPlacements) -> None:
        """Add the reports of launches of the same size and placement to the sums, by layer."""
        stats = self._statistics(
            {name: np.concatenate([report[name] for report in reports]) for name in reports[0]}, size
        )
        tokens = stats.tokens_per_expert.reshape(len(reports), -1, stats.tokens_per_expert.shape[1]).sum(axis=0)
        logical = placements.logical_load(tokens)
        added = tokens, logical, stats.rows_sent_per_rank, stats.rounds, stats.payload_bytes, stats.wire_bytes
        self._sums = [total + more for total, more in zip(self._sums, added, strict=True)]
        self._placements = placements

    def _statistics(self, counts: Mapping[str, np.ndarray], size: _Size) -> DispatchStatistics:
        """Return the statistics of counts ``[launches × layers, ...]``. With AFD (``apart``), rows are exchanged between two meshes."""
        step, (slots, exchanges) = self._step, size
        if step.apart is not None:
            shape = step.spec.dp_size, slots
            return LayerPass(step, "moe_layers", 0, 0, shape).between().statistics(counts, padded=step.apart.padded)
        if exchanges > 1:
            step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, overlapped=True))
        return DispatchStatistics.of(
            counts,
            step.spec,
            step.experts.config,
            tokens=-(-slots // step.spec.tp_size),
            width=step.config.hidden_size,
            top_k=step.config.num_experts_per_tok,
            dtype=step.dtype,
            platform=step.mesh.devices.flat[0].platform,
        )
