"""`Question`: all that a plan is asked, and which batches are tried to answer it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsjax.config import ModelConfig
from dsjax.plan.cluster import Cluster
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.own_cluster import with_tables
from dsjax.plan.workload import Objective, PlanOptions, Workload

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate

FEW_DEVICES = 64
"""Up to which every size of a prefill instance is paired and every batch is tried; among more the best are enough."""
SHOWN = 60
"""Candidates of a list that get intervals and derivations."""


@dataclass(frozen=True)
class Question:
    """All that a plan is asked.

    Devices of the user's own files are told what tables of operations speak of them where a question is made, so that every mode prices
    them like bundled ones.

    Raises:
        UserError: a device names tables of operations that there are not.
    """

    config: ModelConfig
    cluster: Cluster
    workload: Workload
    objective: Objective
    options: PlanOptions

    def __post_init__(self):
        cluster, tables = with_tables(self.cluster, self.options.operators)
        if cluster is not self.cluster:
            object.__setattr__(self, "cluster", cluster)
        if tables is not self.options.operators:
            object.__setattr__(self, "options", dataclasses.replace(self.options, operators=tables))

    @property
    def devices(self) -> int:
        """Devices that may be used."""
        return min(self.cluster.num_devices, self.options.max_devices or self.cluster.num_devices)

    @property
    def bounds(self) -> Objective:
        """The objectives, with the throughput that the rate asks for."""
        rate, wanted = self.workload.rate, self.objective.throughput
        if rate is None:
            return self.objective
        return dataclasses.replace(self.objective, throughput=max(rate * self.workload.output.mean, wanted or 0))

    @property
    def bounded(self) -> bool:
        """Whether there is any objective to meet."""
        bounds = self.bounds
        return any(value is not None for value in (bounds.ttft, bounds.tpot, bounds.throughput))

    @property
    def words(self) -> str:
        """The workload and the objectives in one line."""
        work, bounds = self.workload, self.objective
        parts = [f"{work.input.mean:g} tokens in, {work.output.mean:g} out"]
        parts += [f"{work.prefix_hit:.0%} of prompts cached"] if work.prefix_hit else []
        parts += [f"{work.concurrency:g} requests in flight"] if work.concurrency is not None else []
        parts += [f"{work.rate:g} requests/s"] if work.rate is not None else []
        parts += [f"TTFT within {bounds.ttft * 1e3:,.10g} ms"] if bounds.ttft is not None else []
        parts += [f"TPOT within {bounds.tpot * 1e3:,.10g} ms"] if bounds.tpot is not None else []
        parts += [f"{bounds.throughput:,.0f} tokens/s"] if bounds.throughput is not None else []
        parts += [] if self.bounded else ["no objectives: most tokens a second"]
        return "; ".join(parts) + f"; engine {self.options.engine.name}"

    @property
    def order(self) -> Callable[[Candidate], tuple[float, ...]]:
        """What candidates are sorted by, best first: tokens a second; at a given load, which all of them serve, the fewest devices for
        it and then the fastest."""
        if self.workload.rate is not None:
            return lambda c: (c.devices, c.tpot, c.ttft)
        return lambda c: (-c.throughput, c.devices, c.tpot, c.batch)

    def instance(self, layout: InstanceLayout, steps: dict) -> Instance:
        """A layout, asked about this workload; steps: shared by all layouts of the same unit."""
        return Instance(self.config, self.cluster, layout, self.options, self.workload, steps)

    def rungs(self, instance: Instance) -> list[int]:
        """Batches to try: on many devices powers of two and the largest, between which the best are bisected."""
        tried = instance.batches()
        return tried if self.devices <= FEW_DEVICES else [b for b in tried if b & (b - 1) == 0 or b == tried[-1]]


def users_told_apart(instance: Instance, count: int) -> int:
    """Parts of a batch that are told apart where one is bisected: single users of the whole service, at most 64."""
    return min(64, instance.replicas * count)
