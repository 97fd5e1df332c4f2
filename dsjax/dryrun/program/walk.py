"""How often each operation of a program runs: loops multiplied out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsjax.dryrun.program.loops import known_trip_count
from dsjax.dryrun.program.text import Computation, Operation, Program

TripCount = Callable[[Operation], float | None]
"""How often a ``while`` whose count the text does not tell runs its body, as far as the caller can tell."""


@dataclass(frozen=True)
class Executed:
    """An operation of the schedule with the computation it stands in.

    times: how often it runs in one run of the program. data_dependent: whether that depends on values (a loop whose trip
    count was assumed, a branch of a conditional).
    """

    operation: Operation
    computation: Computation
    times: float
    data_dependent: bool


def executed(program: Program, trip_count: TripCount = lambda loop: None) -> Iterator[Executed]:
    """All operations that are scheduled by themselves, in program order; those inside fusions and reductions are not.

    ``trip_count`` answers for loops without a known count; where it gives None, the body counts once. All branches of a
    conditional count, as an upper bound.
    """
    yield from _walk(program, program.entry, 1.0, False, trip_count)


def _walk(
    program: Program, computation: Computation, times: float, open_: bool, trip_count: TripCount
) -> Iterator[Executed]:
    for operation in computation.operations.values():
        yield Executed(operation, computation, times, open_)
        if operation.opcode == "while":
            known = known_trip_count(program, computation, operation)
            assumed = trip_count(operation) if known is None else known
            inside = times * (1 if assumed is None else assumed)
            for name in (operation.computation("condition"), operation.computation("body")):
                yield from _walk(program, program.computations[name], inside, open_ or known is None, trip_count)
        elif operation.opcode == "conditional":
            for name in operation.branches:
                yield from _walk(program, program.computations[name], times, True, trip_count)
        elif operation.opcode in ("call", "async-start"):
            name = operation.computation("to_apply") or operation.computation("calls")
            if name:
                yield from _walk(program, program.computations[name], times, open_, trip_count)
