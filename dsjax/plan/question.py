"""`Question`: all inputs of a plan, the batches to try, and the number of instances that the devices hold."""

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
"""Devices up to which the search pairs every size of a prefill instance and tries every batch; beyond, only the best."""


@dataclass(frozen=True)
class Question:
    """All inputs of a plan. Devices from files of the user are resolved in the operator tables, so that they are priced like bundled ones.

    Raises:
        UserError: a device names operator tables that do not exist.
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
        """Devices that the plan may use."""
        return min(self.cluster.num_devices, self.options.max_devices or self.cluster.num_devices)

    @cached_property
    def few(self) -> bool:
        """Whether the devices are few enough to try everything."""
        return self.devices <= _FEW

    @cached_property
    def bounds(self) -> Objective:
        """The objectives, with the throughput for the request rate."""
        rate, wanted = self.workload.rate, self.objective.throughput
        if rate is None:
            return self.objective
        return dataclasses.replace(self.objective, throughput=max(rate * self.workload.output.mean, wanted or 0))

    @cached_property
    def bounded(self) -> bool:
        """Whether there is an objective."""
        return self.bounds != Objective()

    @property
    def words(self) -> str:
        """The workload and the objectives as one line."""
        about = {"work": self.workload, "bounds": self.objective, "engine": self.options.engine.name}
        return filled("texts", "question.txt", bounded=self.bounded, **about)

    @property
    def order(self) -> Callable[[Candidate], tuple[float, ...]]:
        """Sort key of candidates, best first: by tokens a second; with a given rate, which all of them serve, by devices, then TPOT."""
        if self.workload.rate is not None:
            return lambda c: (c.devices, c.tpot, c.ttft)
        return lambda c: (-c.throughput, c.devices, c.tpot, c.batch)

    def instance(self, layout: InstanceLayout, steps: dict) -> Instance:
        """An instance of a layout for this workload. steps: a dict that all layouts with the same unit share."""
        return Instance(self.config, self.cluster, layout, self.options, self.workload, steps)

    def rungs(self, instance: Instance) -> list[int]:
        """Batches to try; on many devices only powers of two and the largest, between which the search bisects."""
        tried = instance.batches()
        return tried if self.few else [b for b in tried if b & (b - 1) == 0 or b == tried[-1]]

    def most_instances(self, layout: InstanceLayout) -> int:
        """Instances that the devices hold. Instances that fit a host share it; each side of a larger one has whole hosts."""
        here, attention, experts = self.cluster.devices_per_host, layout.mesh.num_devices, layout.experts
        if layout.devices <= here:
            return _room(self.devices, here, layout.devices)
        return self.devices // (_whole_hosts(attention, here) + _whole_hosts(experts, here))

    def devices_kept(self, instance: Instance) -> int:
        """Devices that an instance occupies: an even part of a host, or whole hosts for each side."""
        layout, here = instance.layout, min(instance.cluster.devices_per_host, self.devices)
        if layout.devices <= here:
            return here // (here // layout.devices)
        return _whole_hosts(layout.mesh.num_devices, here) + _whole_hosts(layout.experts, here)


def users_told_apart(instance: Instance, count: int) -> int:
    """Resolution of a bisected batch: one user of the whole service, at most 64 parts."""
    return min(64, instance.replicas * count)


def _room(devices: int, per_host: int, size: int) -> int:
    """Instances of `size` devices that fit `devices`, of which the last host may be a part."""
    if size > per_host:
        return devices // _whole_hosts(size, per_host)
    hosts, rest = divmod(devices, per_host)
    return hosts * (per_host // size) + rest // size


def _whole_hosts(size: int, per_host: int) -> int:
    """Devices of the fewest whole hosts that hold `size` devices."""
    return -(-size // per_host) * per_host
