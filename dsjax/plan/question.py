"""`Question`: all that a plan is asked, which batches are tried to answer it, and how many instances of a layout there is room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dsjax.config import ModelConfig
from dsjax.plan.cluster import Cluster
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.own_cluster import with_tables
from dsjax.plan.workload import Objective, PlanOptions, Workload
from dsjax.texts import filled

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate

_FEW = 64
"""Devices up to which every size of a prefill instance is paired and every batch is tried; among more the best are enough."""


@dataclass(frozen=True)
class Question:
    """All that a plan is asked.

    Devices of the user's own files are told what tables of operations speak of them where a question is made, so that every mode prices
    them like bundled ones.

    Raises:
        UserError: a device names tables of operations that there are not, or a model whose operations are not known.
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

    @cached_property
    def devices(self) -> int:
        """Devices that may be used."""
        return min(self.cluster.num_devices, self.options.max_devices or self.cluster.num_devices)

    @cached_property
    def few(self) -> bool:
        """Whether the devices are so few that everything is tried."""
        return self.devices <= _FEW

    @cached_property
    def bounds(self) -> Objective:
        """The objectives, with the throughput that the rate asks for."""
        rate, wanted = self.workload.rate, self.objective.throughput
        if rate is None:
            return self.objective
        return dataclasses.replace(self.objective, throughput=max(rate * self.workload.output.mean, wanted or 0))

    @cached_property
    def bounded(self) -> bool:
        """Whether there is any objective to meet."""
        return self.bounds != Objective()

    @property
    def words(self) -> str:
        """The workload and the objectives in one line."""
        about = {"work": self.workload, "bounds": self.objective, "engine": self.options.engine.name}
        return filled("texts", "question.txt", bounded=self.bounded, **about)

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
        return tried if self.few else [b for b in tried if b & (b - 1) == 0 or b == tried[-1]]

    def most_instances(self, layout: InstanceLayout) -> int:
        """How many instances there is room for: one that fits into a host shares it, of a larger one either side has whole hosts."""
        here, attention, experts = self.cluster.devices_per_host, layout.mesh.num_devices, layout.experts
        if layout.devices <= here:
            return _room(self.devices, here, layout.devices)
        return self.devices // (_whole_hosts(attention, here) + _whole_hosts(experts, here))

    def devices_kept(self, instance: Instance) -> int:
        """Devices that an instance keeps from all others: an even part of a host, or whole hosts on either side."""
        layout, here = instance.layout, min(instance.cluster.devices_per_host, self.devices)
        if layout.devices <= here:
            return here // (here // layout.devices)
        return _whole_hosts(layout.mesh.num_devices, here) + _whole_hosts(layout.experts, here)


def users_told_apart(instance: Instance, count: int) -> int:
    """Parts of a batch that are told apart where one is bisected: single users of the whole service, at most 64."""
    return min(64, instance.replicas * count)


def _room(devices: int, per_host: int, size: int) -> int:
    """How many times `size` devices fit into so many, the last host perhaps being a part of one."""
    if size > per_host:
        return devices // _whole_hosts(size, per_host)
    hosts, rest = divmod(devices, per_host)
    return hosts * (per_host // size) + rest // size


def _whole_hosts(size: int, per_host: int) -> int:
    """Devices of the fewest whole hosts that have `size` of them."""
    return -(-size // per_host) * per_host
