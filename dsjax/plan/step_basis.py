"""`StepBasis`: what a step of an instance is priced from, and what its parts ask of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsjax.config import ModelConfig
from dsjax.plan.balancing import Slots
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.operator_tables import BUNDLED, OperatorTables
from dsjax.plan.precision import Precision
from dsjax.plan.skew import DEFAULT_SKEW, Skew
from sharding.dispatch import choose_method


@dataclass(frozen=True)
class StepBasis:
    """What a step of one instance is priced from. Sizes are of one DP rank, times in seconds.

    overlap: two-batch overlap. balancing: redundant experts are placed by their load. dispatch: `deepep`, or one of dsjax's own methods.
    dry_runs: programs of this layout that price their own exchanges, sums and products. host: a step is planned while the one before
    computes (`overlapped`), or after it (`serial`). eager, shared_beside, absorbs_below, captured, gathers: as of `Engine`; fp8_mla,
    fp8_rate: as of `Chip`. shared: prices that layouts on one cluster have in common in the current draw; pass the same dict to all.
    """

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    precision: Precision
    skew: Skew = DEFAULT_SKEW
    overlap: bool = False
    balancing: bool = True
    dispatch: str = "deepep"
    dry_runs: tuple[DryRun, ...] = ()
    operators: OperatorTables = BUNDLED
    host: str = "overlapped"
    eager: bool = True
    shared_beside: bool = True
    absorbs_below: int = 0
    captured: int = 0
    gathers: bool = False
    fp8_mla: bool = False
    fp8_rate: tuple[float, float, float] | None = None
    shared: dict = field(default_factory=dict, compare=False, repr=False)
    chip: Chip = field(init=False)

    def __post_init__(self):
        tables = self.once(tables_of(self.operators), dict)
        about = self.cluster.hardware, self.precision, self.operators, tables, {}, self.fp8_mla, self.fp8_rate
        key = ("chip", id(self.operators), self.fp8_mla, self.fp8_rate)
        object.__setattr__(self, "chip", self.once(key, lambda: Chip(*about)))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is the same for all layouts that give the same key, made once in a draw."""
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
