"""`StepBasis`: what a step of an instance is priced from, and what its parts ask of a layout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsjax.config import ModelConfig
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.engine import Engine
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.operator_tables import OperatorTables
from dsjax.plan.skew import Slots
from dsjax.plan.workload import PlanOptions
from sharding.dispatch import choose_method


@dataclass(frozen=True)
class StepBasis:
    """What a step of one instance is priced from. Sizes are of one DP rank, times in seconds.

    dry_runs: compiled programs of this layout; their collectives and products replace the estimates. shared: a dict that all layouts on one
    cluster share, with prices that they have in common in the current draw.
    """

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    options: PlanOptions
    overlap: bool = False  # two-batch overlap
    balancing: bool = True  # redundant experts are placed by their load
    dry_runs: tuple[DryRun, ...] = ()
    shared: dict = field(default_factory=dict, compare=False, repr=False)
    chip: Chip = field(init=False)
    engine: Engine = field(init=False)
    dispatch: str = field(init=False)  # `deepep`, or a method of dsjax
    absorbs_below: int = field(init=False)  # `Engine.absorbs_below`, 0 on Blackwell

    def __post_init__(self):
        options, engine, blackwell = self.options, self.options.engine, self.cluster.hardware.is_blackwell
        rate = engine.fp8_rate if blackwell else None
        tables = self.once(tables_of(options.operators), dict)
        about = self.cluster.hardware, options.precision, options.operators, tables, {}, engine.fp8_mla, rate
        key = ("chip", id(options.operators), engine.fp8_mla, rate)
        object.__setattr__(self, "chip", self.once(key, lambda: Chip(*about)))
        object.__setattr__(self, "engine", engine)
        object.__setattr__(self, "dispatch", options.dispatch)
        object.__setattr__(self, "absorbs_below", 0 if blackwell else engine.absorbs_below)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `make`, computed once in a draw for all layouts with the same key."""
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = make()
        return found

    @property
    def places_by_load(self) -> bool:
        """Whether experts are moved after their load while serving."""
        return self.balancing and self.layout.redundant > 0

    @property
    def in_windows(self) -> bool:
        """Whether half batches overlap as in dsjax's own step, window by window (`dsjax/model/two_batch.py`), and not as published."""
        return self.dispatch != "deepep"

    @cached_property
    def expert_slots(self) -> Slots:
        """Where the experts may lie: hosts count where each copy of the experts has whole hosts, as in the engine (`hosts_of_experts`)."""
        ranks, each = self.layout.mesh.ep_size, self.cluster.devices_per_host
        hosts = ranks // each if ranks == self.layout.mesh.num_devices and ranks % each == 0 else 1
        return Slots(ranks, self.config.n_routed_experts + self.layout.redundant, self.config.n_group, max(hosts, 1))

    def slowest(self, rows: float) -> float:
        """Load of the busiest rank ÷ the mean, with `rows` rows on the average rank (`Skew.slowest`)."""
        return self.options.skew.slowest(self.expert_slots, self.config.n_routed_experts, rows, self.places_by_load)

    def own_method(self, tokens: float, halved: bool = False) -> str:
        """The method of dsjax's own dispatch for so many tokens of a device (or of its half batch), as the engine resolves it."""
        mesh, whole = self.layout.mesh, max(1, math.ceil(tokens))
        about = {"overlapped": halved, "on_host": self._ranks_on_host, "routed_groups": self.routed_groups}
        return choose_method(self.dispatch, whole, self.config.num_experts_per_tok, mesh.ep_size, "gpu", **about)

    @cached_property
    def _ranks_on_host(self) -> int:
        return self.layout.mesh.expert_ranks_on_host(self.cluster.domain)

    @property
    def routed_groups(self) -> tuple[int, int] | None:
        """(groups of experts, groups that a token's are in); None where copies may lie on other hosts than their group."""
        return self.config.routed_groups if self.layout.redundant == 0 else None

    @cached_property
    def sums_experts(self) -> bool:
        """Whether nothing is dispatched, with published kernels: where one DP rank is the whole EP group, each device has every token,
        computes its own experts, and the layer's second sum adds the results up (vLLM's all-to-all is for data parallelism; SGLang's
        `--moe-a2a-backend none`)."""
        return self.dispatch == "deepep" and self.layout.unit.mesh.dp_size == 1


def tables_of(operators: OperatorTables) -> tuple:
    """Key of `StepBasis.shared` for what was read from tables of operations for one device."""
    return ("tables", id(operators))
