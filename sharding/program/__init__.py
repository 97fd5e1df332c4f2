"""The compiled-program reader: HLO text to operations, collectives with their mesh axes and bytes, costs, and times."""

from sharding.program.collectives import ProgramCollective, program_collectives, true_dtypes
from sharding.program.costs import ProgramCosts, program_costs
from sharding.program.schedule import COMPUTE, OperationCost, Prices, Schedule, Span, Turn, play
from sharding.program.text import Operation, Program, ProgramTextError, Shape
from sharding.program.walk import Executed, executed

__all__ = [
    "COMPUTE",
    "Executed",
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
    "Turn",
    "executed",
    "play",
    "program_collectives",
    "program_costs",
    "true_dtypes",
]
