"""The compiled-program reader: HLO text to operations, collectives with their mesh axes and bytes, and costs."""

from sharding.program.collectives import ProgramCollective, program_collectives, true_dtypes
from sharding.program.costs import ProgramCosts, program_costs
from sharding.program.text import Operation, Program, ProgramTextError, Shape
from sharding.program.walk import Executed, executed

__all__ = [
    "Executed",
    "Operation",
    "Program",
    "ProgramCollective",
    "ProgramCosts",
    "ProgramTextError",
    "Shape",
    "executed",
    "program_collectives",
    "program_costs",
    "true_dtypes",
]
