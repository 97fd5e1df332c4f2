"""`DryRunReport`: the results of a dry run, and the fields of its JSON (`dsjax dryrun --json`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.compilation import CompiledStep
from dsjax.dryrun.memory import DeviceMemory, Fit
from dsjax.dryrun.orders import OrderReport
from dsjax.dryrun.program import ProgramCollective, ProgramCosts
from dsjax.dryrun.rebalance import ExpertMoves
from dsjax.dryrun.timeline import Timeline
from dsjax.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Costs of one run of a program on one device.

    expert_flops: FLOPs that the routed experts need under even routing, by arithmetic. timeline: the simulated schedule; None if not
    requested.
    """

    collectives: tuple[ProgramCollective, ...]
    costs: ProgramCosts
    expert_flops: float
    timeline: Timeline | None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "collectives": [_collective(one) for one in self.collectives],
            "costs": {**dataclasses.asdict(self.costs), "expert_flops": self.expert_flops},
            "timeline": self.timeline.to_json() if self.timeline else None,
        }


@dataclass(frozen=True, kw_only=True)
class DryRunReport(ProgramReport):
    """All figures of one dry run. Bytes and operations are per device, in one run of the step.

    request: the compiled options, with defaults filled in. hardware: None for the CPU target. cache_tokens: usable slots of a DP
    rank's cache. drafts: the program of the MTP module's passes after the step; None without drafting.
    orders: sums whose order matters; None if not requested. rebalance: cost of moving experts; None if experts do not move.
    fit: the largest batch, context and cache that fit; None if not searched.
    assumptions: about loops of unknown trip count. notes: which figures not to trust, and why.
    compiled: the compiled programs.
    """

    request: dict[str, Any]
    hardware: Hardware | None
    parameters: dict[str, int]
    memory: DeviceMemory
    cache_tokens: int
    drafts: ProgramReport | None
    rebalance: ExpertMoves | None
    orders: OrderReport | None
    fit: Fit | None
    assumptions: dict[str, str]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    compiled: CompiledStep = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Fields of `dsjax dryrun --json`. Bytes and operations are per device, in one run of the step.

        The resolved options come first: `groups` has `rows`, `chunk` and `mla` of each row group; `batch`, `chunk` and `mla` repeat the
        first group's; `halves` is whether two-batch overlap is used; `dispatch` is the resolved `auto` (`local`: one device holds all
        experts); `kernels` maps operation to implementation. Then:

        - `parameters`: component → number of parameters, and `total`
        - `device_bytes`: the fields of `DeviceMemory`, with `weights_total`, `total`, and `memory` of the hardware file (null: CPU target)
        - `cache_tokens`: usable slots of a DP rank's cache, without page 0
        - `collectives`, `costs`: `ProgramCollective`, `ProgramCosts`; `expert_flops` is the FLOPs that the routed experts need
        - `timeline`: `Timeline.to_json`, null without `--timeline`
        - `drafts`: `collectives`, `costs` and `timeline` of the drafting program, or null
        - `rebalance`: `ExpertMoves.to_json`, null without `--enable-eplb`
        - `reductions`: `OrderReport.to_json`, null without `--reductions`
        - `fit`: `Fit`, null without `--fit`
        - `assumptions`, `notes`: text; `seconds`: of `lower`, `compile` and `read`
        """
        memory = self.memory
        return {
            **self.request,
            "parameters": {**self.parameters, "total": sum(self.parameters.values())},
            "device_bytes": {
                **vars(memory),
                "weights_total": memory.weight_bytes,
                "total": memory.total,
                "memory": self.hardware.memory_bytes if self.hardware else None,
            },
            "cache_tokens": self.cache_tokens,
            **super().to_json(),
            "drafts": self.drafts.to_json() if self.drafts else None,
            "rebalance": self.rebalance.to_json() if self.rebalance else None,
            "reductions": self.orders.to_json() if self.orders else None,
            "fit": dataclasses.asdict(self.fit) if self.fit else None,
            "assumptions": self.assumptions,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class StagesReport:
    """Figures of a pipeline-parallel model: a report of each stage's step.

    mesh, devices: of all stages together.
    """

    mesh: str
    devices: int
    stages: tuple[DryRunReport, ...]

    def to_json(self) -> dict[str, Any]:
        """`mesh`, `devices` and `stages`: `DryRunReport.to_json` of each stage.

        Each stage also has `stage`, `layers` (its first and last layer, numbered in the whole model), and `hidden_bytes`, the bytes that a
        DP rank sends to the next stage in a step.
        """
        return {"mesh": self.mesh, "devices": self.devices, "stages": [stage.to_json() for stage in self.stages]}


def _collective(one: ProgramCollective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": None if one.axes is None else list(one.axes),
        "ranks": one.ranks,
        "dtype": one.operand[0].dtype if one.operand else None,
        "operand_bytes": one.operand_bytes,
        "bytes_inside": one.bytes_inside,
        "bytes_between": one.bytes_between,
        "times": one.times,
        "data_dependent": one.data_dependent,
        "asynchronous": one.asynchronous,
        "beside": list(one.beside),
        "name": one.name,
        "op_name": one.op_name,
    }
