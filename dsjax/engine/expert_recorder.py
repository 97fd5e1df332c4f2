"""``ExpertRecorder``: what the steps' dispatches reported, added up while somebody wants to know."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.executor import ExpertCounts
from dsjax.model.step import Step
from sharding.dispatch import DispatchStatistics


class ExpertRecorder:
    """Every step computes the counts, which takes no collective; only a recorder that is on brings them to the host.

    So recording compiles nothing. ``on`` says whether it records; setting it to True begins anew.
    """

    def __init__(self, step: Step):
        self._step = step
        self._on = False
        self._sums: DispatchSums | None = None

    @property
    def on(self) -> bool:
        """Whether launches are recorded."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        if on and not self._on:
            self._sums = None
        self._on = on

    def add(self, reports: Mapping[str, Array], tokens_per_rank: int) -> None:
        """Enter a launch's reports; ``tokens_per_rank``: token slots of a DP rank in it, padding included."""
        if not self._on or not reports:
            return
        step = self._step
        statistics = DispatchStatistics.of(
            jax.device_get(dict(reports)),
            step.spec,
            step.dispatch,
            tokens=-(-tokens_per_rank // step.spec.tp_size),
            width=step.config.hidden_size,
            top_k=step.config.num_experts_per_tok,
            dtype=step.dtype,
            platform=step.mesh.devices.flat[0].platform,
        )
        self._sums = DispatchSums(statistics) if self._sums is None else self._sums.add(statistics)

    def counts(self) -> ExpertCounts | None:
        """All since recording began; None while it is off, and before the first launch."""
        return self._sums.counts() if self._on and self._sums is not None else None


class DispatchSums:
    """Sums over launches."""

    def __init__(self, first: DispatchStatistics):
        self._tokens, self._rows = first.tokens_per_expert.copy(), first.rows_sent_per_rank.copy()
        self._rounds, self._payload, self._wire = first.rounds, first.payload_bytes, first.wire_bytes

    def add(self, more: DispatchStatistics) -> DispatchSums:
        """Add a launch."""
        self._tokens += more.tokens_per_expert
        self._rows += more.rows_sent_per_rank
        self._rounds += more.rounds
        self._payload += more.payload_bytes
        self._wire += more.wire_bytes
        return self

    def counts(self) -> ExpertCounts:
        """A copy that stays as it is."""
        padding = 1.0 - self._payload / self._wire if self._wire else 0.0
        return ExpertCounts(np.array(self._tokens), np.array(self._rows), self._rounds, self._wire, padding)
