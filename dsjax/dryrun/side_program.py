"""`SideProgram`: a compiled program of attention or of experts, and what was read in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.apart_memory import program_bytes
from dsjax.dryrun.compilation import CompiledProgram
from dsjax.dryrun.report import ProgramReport


@dataclass
class SideProgram:
    """A program of one side.

    name: what it belongs to and does. side: `attention` or `experts`. times: runs of it in a step. in_turn: it is of a layer with experts,
    whose two sides compute in turn.
    """

    name: str
    side: str
    times: int
    in_turn: bool
    program: CompiledProgram
    report: ProgramReport

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "side": self.side,
            "times": self.times,
            "bytes": program_bytes(self.program),
            **self.report.to_json(),
        }
