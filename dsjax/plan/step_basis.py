"""`StepBasis`: what a step of an instance is priced from, and the figures that all of its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from dsjax.config import ModelConfig
from dsjax.plan.balancing import Slots
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import DryRun
from dsjax.plan.figure import assumed
from dsjax.plan.host_time import OVERLAPPED, HostTime
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.network import own_method
from dsjax.plan.operations import DEEPEP, H800_SMS, NORMAL_SMS
from dsjax.plan.operator_tables import BUNDLED, OperatorTables
from dsjax.plan.precision import Precision
from dsjax.plan.skew import DEFAULT_SKEW, Skew


@dataclass(frozen=True)
class StepBasis:
    """What a step of one instance is priced from. All sizes are of one DP rank, all times seconds.

    overlap: two-batch overlap: the halves of a batch alternate between computing and communicating.
    balanced: experts are placed by their load; with redundant experts they are wherever the engine can (balancing).
    dispatch: `deepep`, DeepEP's kernels as
    published, or one of dsjax's own methods. dry_runs: programs of this layout that price their own exchanges, sums and products.
    operators: tables of operations. host: what a step waits for its host. eager: the kernels of prefill steps are started one by one
    from Python, and each pass of the MTP module by itself, as SGLang and TensorRT-LLM do; otherwise one compiled program has each of
    the two. shared_beside: decode computes the shared expert beside the routed ones. absorbs_below, captured and gathers: as of `Engine`.
    fp8_mla, fp8_rate: see `Chip`. shared: prices that layouts on one cluster have in common in the current draw; pass the same dict to all.
    """

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    precision: Precision
    skew: Skew = DEFAULT_SKEW
    overlap: bool = False
    balanced: bool = False
    balancing: bool = True
    dispatch: str = "deepep"
    dry_runs: tuple[DryRun, ...] = ()
    operators: OperatorTables = BUNDLED
    host: HostTime = OVERLAPPED
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
        key = ("chip", id(self.operators), self.fp8_mla, self.fp8_rate)
        if key not in self.shared:
            known = self.shared.setdefault(tables_of(self.operators), {})
            self.shared[key] = Chip(
                self.cluster.hardware, self.precision, self.operators, known, {}, self.fp8_mla, self.fp8_rate
            )
        object.__setattr__(self, "chip", self.shared[key])

    @property
    def places_by_load(self) -> bool:
        """Whether experts are moved after their load while serving."""
        return self.balanced or (self.balancing and self.layout.redundant > 0)

    @property
    def in_windows(self) -> bool:
        """Whether half batches overlap as dsjax's own step has it, part beside part (`dsjax/model/two_batch.py`), and not as published."""
        return self.dispatch != "deepep"

    def beside_communication(self) -> float | None:
        """With two-batch overlap in prefill: the share of a GPU that communicates and does not compute."""
        if self.cluster.hardware.platform != "cuda":
            return None
        if self.in_windows:
            name, why = "multiprocessors that NCCL takes", "not measured: a block a channel, 8 to 32 of 132"
            return self._known(name, lambda: assumed(16 / H800_SMS, 8 / H800_SMS, 32 / H800_SMS, name, why))
        name, why = "multiprocessors that communicate", f"{DEEPEP}: 24 of 132 by default"
        return self._known(name, lambda: assumed(NORMAL_SMS / H800_SMS, 0.1, 0.2, name, why))

    def _known(self, name: str, make: Callable[[], float]) -> float:
        """A figure that is the same in every step and layout on this cluster, made once."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    @cached_property
    def expert_slots(self) -> Slots:
        """Where the experts may lie: hosts count where each copy of the experts has whole hosts, as in the engine (`hosts_of_experts`)."""
        ranks, each = self.layout.mesh.ep_size, self.cluster.devices_per_host
        hosts = ranks // each if ranks == self.layout.mesh.num_devices and ranks % each == 0 else 1
        return Slots(ranks, self.config.n_routed_experts + self.layout.redundant, self.config.n_group, max(hosts, 1))

    def own_method(self, tokens: float, halved: bool = False) -> str:
        """The method of dsjax's own dispatch for so many tokens of a device."""
        mesh, domain, top_k = self.layout.mesh, self.cluster.domain, self.config.num_experts_per_tok
        return own_method(self.dispatch, mesh, domain, tokens, top_k, halved, self.routed_groups)

    @property
    def routed_groups(self) -> tuple[int, int] | None:
        """Groups of experts, and how many of them a token's are in; None where copies may lie on other hosts than their group."""
        return self.config.routed_groups if self.layout.redundant == 0 else None

    @cached_property
    def sums_experts(self) -> bool:
        """Whether nothing is dispatched, with published kernels: where attention's heads are over all devices of the EP group, each
        has every token, computes those of its experts, and the layer's second sum adds the results up (vLLM's all-to-all is for data
        parallelism; SGLang's `--moe-a2a-backend none`)."""
        return self.dispatch == "deepep" and self.layout.unit.mesh.dp_size == 1


def tables_of(operators: OperatorTables) -> tuple:
    """Under which `StepModel.shared` keeps what was read from tables of operations for one device."""
    return ("tables", id(operators))
