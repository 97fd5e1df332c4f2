"""`SideProgram`: a compiled program of the attention or the expert side, with its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.compilation import CompiledProgram
from dsjax.dryrun.report import ProgramReport


@dataclass
class SideProgram:
    """A program of one side."""

    name: str  # what the program belongs to and does
    side: str  # `attention` or `experts`
    times: int  # executions per step
    in_turn: bool  # whether it belongs to an MoE layer, whose two sides compute alternately
    program: CompiledProgram
    report: ProgramReport

    def to_json(self) -> dict[str, Any]:
        """Plain data. `bytes`: on a device, as the compiler counts them."""
        memory = self.program.compiled.memory_analysis()
        sizes = {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        return {"name": self.name, "side": self.side, "times": self.times, "bytes": sizes, **self.report.to_json()}
