"""`DryRunReport`: the results of a dry run, and the fields of its JSON (`dsjax dryrun --json`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.apart_memory import SideMemory
from dsjax.dryrun.compilation import CompiledStep
from dsjax.dryrun.memory import DeviceMemory, Fit
from dsjax.dryrun.orders import OrderReport
from dsjax.dryrun.program import ProgramCollective, ProgramCosts
from dsjax.dryrun.rebalance import ExpertMoves
from dsjax.dryrun.timeline import Timeline
from dsjax.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Costs of one run of a program on one device."""

    collectives: tuple[ProgramCollective, ...]
    costs: ProgramCosts
    expert_flops: float  # FLOPs that the routed experts need under even routing, from their shapes
    timeline: Timeline | None  # simulated schedule; None if not requested

    def to_json(self) -> dict[str, Any]:
        """Return `collectives`, `costs` and `timeline`, as plain data."""
        return {
            "collectives": [_collective(collective) for collective in self.collectives],
            "costs": {**dataclasses.asdict(self.costs), "expert_flops": self.expert_flops},
            "timeline": self.timeline.to_json() if self.timeline else None,
        }


def memory_json(memory: DeviceMemory | SideMemory, hardware: Hardware | None) -> dict[str, Any]:
    """Return the bytes of a device by kind, and `weights_total`, `total` and `memory`: the device's memory, None without hardware."""
    sums = {"weights_total": memory.weight_bytes, "total": memory.total}
    return {**vars(memory), **sums, "memory": hardware.memory_bytes if hardware else None}


@dataclass(frozen=True, kw_only=True)
class DryRunReport(ProgramReport):
    """All figures of one dry run. Bytes and operations are per device, in one run of the step."""

    request: dict[str, Any]  # the compiled options, with defaults filled in
    hardware: Hardware | None  # None for the CPU target
    parameters: dict[str, int]  # component → number
    memory: DeviceMemory
    cache_tokens: int  # usable slots of a DP rank's cache
    drafts: ProgramReport | None  # the program of the MTP module's passes after the step; None without drafting
    rebalance: ExpertMoves | None  # cost of rebalancing experts; None if experts do not move
    orders: OrderReport | None  # reductions whose order of additions matters; None if not requested
    fit: Fit | None  # the largest batch, context and cache that fit; None if not searched
    assumptions: dict[str, str]  # about loops of unknown trip count
    notes: tuple[str, ...]  # which figures not to trust, and why
    seconds: dict[str, float]  # of `lower`, `compile` and `read`
    compiled: CompiledStep = dataclasses.field(repr=False)  # the compiled programs

    def to_json(self) -> dict[str, Any]:
        """Fields of `dsjax dryrun --json`. Bytes and operations are per device, in one run of the step.

        The resolved options come first: `groups` has `rows`, `chunk` and `mla` of each row group; `batch`, `chunk` and `mla` repeat the
        first group's; `halves` is whether two-batch overlap is used; `dispatch` is what `auto` resolved to (`local`: one device holds all
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
        return {
            **self.request,
            "parameters": {**self.parameters, "total": sum(self.parameters.values())},
            "device_bytes": memory_json(self.memory, self.hardware),
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
    """Figures of a pipeline-parallel model: a report of each stage's step."""

    mesh: str  # of all stages together
    devices: int  # of all stages together
    stages: tuple[DryRunReport, ...]

    def to_json(self) -> dict[str, Any]:
        """`mesh`, `devices` and `stages`: `DryRunReport.to_json` of each stage.

        Each stage also has `stage`, `layers` (its first and last layer, numbered in the whole model), and `hidden_bytes`, the bytes that a
        DP rank sends to the next stage in a step.
        """
        return {"mesh": self.mesh, "devices": self.devices, "stages": [stage.to_json() for stage in self.stages]}


def _collective(collective: ProgramCollective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "axes": None if collective.axes is None else list(collective.axes),
        "ranks": collective.ranks,
        "dtype": collective.operand[0].dtype if collective.operand else None,
        "operand_bytes": collective.operand_bytes,
        "bytes_inside": collective.bytes_inside,  # sent within the host, per run
        "bytes_between": collective.bytes_between,  # sent to other hosts, per run
        "times": collective.times,
        "data_dependent": collective.data_dependent,
        "asynchronous": collective.asynchronous,
        "beside": list(collective.beside),  # operations scheduled between its start and its done
        "name": collective.name,
        "op_name": collective.op_name,
    }
