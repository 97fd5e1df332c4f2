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

_SMALL = 64
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
    def is_small(self) -> bool:
        """Whether the devices are few enough to try everything."""
        return self.devices <= _SMALL

    @cached_property
    def all_objectives(self) -> Objective:
        """The objectives, including the throughput that a given request rate needs."""
        rate, throughput = self.workload.rate, self.objective.throughput
        if rate is None:
            return self.objective
        return dataclasses.replace(self.objective, throughput=max(rate * self.workload.output.mean, throughput or 0))

    @cached_property
    def has_objectives(self) -> bool:
        """Whether there is an objective."""
        return self.all_objectives != Objective()

    @property
    def description(self) -> str:
        """The workload and the objectives as one line."""
        about = {"work": self.workload, "bounds": self.objective, "engine": self.options.engine.name}
        return filled("texts", "question.txt", bounded=self.has_objectives, **about)

    @property
    def sort_key(self) -> Callable[[Candidate], tuple[float, ...]]:
        """Sort key of candidates, best first: by tokens per second, or by devices and TPOT if a rate is given, which all serve."""
        if self.workload.rate is not None:
            return lambda c: (c.devices, c.tpot, c.ttft)
        return lambda c: (-c.throughput, c.devices, c.tpot, c.batch)

    def instance(self, layout: InstanceLayout, steps: dict) -> Instance:
        """Return an instance of a layout for this workload. steps: a dict that all layouts with the same unit share."""
        return Instance(self.config, self.cluster, layout, self.options, self.workload, steps)

    def batches_to_try(self, instance: Instance) -> list[int]:
        """Return the batches to try. On many devices, these are powers of two and the largest; the search bisects between them."""
        batches = instance.batches()
        return batches if self.is_small else [b for b in batches if b & (b - 1) == 0 or b == batches[-1]]

    def max_instances(self, layout: InstanceLayout) -> int:
        """Return how many instances the devices hold. Instances that fit a host share it; each side of a larger one takes whole hosts."""
        devices_per_host = self.cluster.devices_per_host
        if layout.devices > devices_per_host:
            return self.devices // _whole_hosts(layout, devices_per_host)
        hosts, rest = divmod(self.devices, devices_per_host)  # the last host may be partial
        return hosts * (devices_per_host // layout.devices) + rest // layout.devices

    def occupied_devices(self, instance: Instance) -> int:
        """Return the devices that an instance occupies: an equal part of a host, or whole hosts for each side."""
        layout = instance.layout
        devices_per_host = min(instance.cluster.devices_per_host, self.devices)
        if layout.devices > devices_per_host:
            return _whole_hosts(layout, devices_per_host)
        instances_per_host = devices_per_host // layout.devices
        return devices_per_host // instances_per_host


def batch_divisor(instance: Instance, count: int) -> int:
    """Return the divisor of the batches that bisection tries: neighbours differ by one user of the whole service, or by 1/64 if more."""
    return min(64, instance.replicas * count)


def _whole_hosts(layout: InstanceLayout, devices_per_host: int) -> int:
    """Return the devices of the fewest whole hosts that hold each side of a layout."""
    sides = (layout.mesh.num_devices, layout.experts)
    return sum(-(-side // devices_per_host) * devices_per_host for side in sides)
