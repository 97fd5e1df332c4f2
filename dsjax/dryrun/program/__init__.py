"""The compiled-program reader: HLO text to operations, collectives with their mesh axes and bytes, costs, and times."""

from dsjax.dryrun.program.collectives import ProgramCollective, program_collectives, true_dtypes
from dsjax.dryrun.program.costs import ProgramCosts, program_costs
from dsjax.dryrun.program.schedule import COMPUTE, LoopIteration, OperationCost, Prices, Schedule, Span, play
from dsjax.dryrun.program.text import Operation, Program, ProgramTextError, Shape
from dsjax.dryrun.program.walk import Executed, executed

__all__ = [
    "COMPUTE",
    "Executed",
    "LoopIteration",
    "Operation",
    "OperationCost",
    "Prices",
    "Program",
    "ProgramCollective",
    "ProgramCosts",
    "ProgramTextError",
    "Schedule",
    "Shape",
    "Span",
    "executed",
    "play",
    "program_collectives",
    "program_costs",
    "true_dtypes",
]
