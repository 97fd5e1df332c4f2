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
"""Most devices for which the search pairs every prefill instance size and tries every batch; beyond, only the best."""


@dataclass(frozen=True)
class Question:
    """All inputs of a plan. Devices from user files are resolved in the operator tables, so that they are priced like bundled ones.

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
        """The objectives, including the throughput that a given request rate needs."""
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
        """Sort key of candidates, best first: by tokens per second, or by devices and TPOT if a rate is given, which all serve."""
        if self.workload.rate is not None:
            return lambda c: (c.devices, c.tpot, c.ttft)
        return lambda c: (-c.throughput, c.devices, c.tpot, c.batch)

    def instance(self, layout: InstanceLayout, steps: dict) -> Instance:
        """Return an instance of a layout for this workload. steps: a dict that all layouts with the same unit share."""
        return Instance(self.config, self.cluster, layout, self.options, self.workload, steps)

    def rungs(self, instance: Instance) -> list[int]:
        """Return the batches to try. On many devices, these are powers of two and the largest; the search bisects between them."""
        tried = instance.batches()
        return tried if self.few else [b for b in tried if b & (b - 1) == 0 or b == tried[-1]]

    def most_instances(self, layout: InstanceLayout) -> int:
        """Return how many instances the devices hold. Instances that fit a host share it; each side of a larger one takes whole hosts."""
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


def distinguishable_users(instance: Instance, count: int) -> int:
    """Return the parts into which bisection divides a batch of 1: one per user of the whole service, at most 64."""
    return min(64, instance.replicas * count)


def _room(devices: int, per_host: int, size: int) -> int:
    """Return how many instances of `size` devices fit in `devices` devices. The last host may be partial."""
    if size > per_host:
        return devices // _whole_hosts(size, per_host)
    hosts, rest = divmod(devices, per_host)
    return hosts * (per_host // size) + rest // size


def _whole_hosts(size: int, per_host: int) -> int:
    """Devices of the fewest whole hosts that hold `size` devices."""
    return -(-size // per_host) * per_host
