"""`DryRunReport`: what a dry run found, and its JSON, whose fields `docs/dryrun.md` documents."""

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
    """What one run of a program does on one device.

    expert_flops: what the routed experts must compute under even routing, by arithmetic. timeline: the schedule played through; None
    where it was not asked for.
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
    """All figures of one dry run: those of the step's program, and what goes with it. Bytes and operations are one device's, in
    one run of the step.

    request: what was compiled, with defaults filled in. hardware: None for the CPU target. cache_tokens: usable slots of a DP
    rank's cache. drafts: the program of the MTP module's passes after the step; None where nothing is drafted.
    orders: sums whose order matters; None where they were not asked for. rebalance: what moving experts takes; None where they
    stay where they are. fit: the largest that fits; None where it was not searched.
    assumptions: what loops of unknown length were taken for. notes: which figures not to trust, and why.
    compiled: the programs themselves.
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
        """Plain data, ready for `json.dumps`."""
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
    """The figures of a model in stages: of each stage those of its own step, on one of its devices.

    mesh, devices: of all stages together.
    """

    mesh: str
    devices: int
    stages: tuple[DryRunReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
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
