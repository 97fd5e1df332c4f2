"""How often each operation of a program runs, with the trip counts of nested loops multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsjax.dryrun.program.loops import known_trip_count
from dsjax.dryrun.program.text import Computation, Operation, Program

TripCount = Callable[[Operation], float | None]
"""Returns the caller's trip count for a ``while`` whose text states none; None if the caller has none either."""


@dataclass(frozen=True)
class Executed:
    """A scheduled operation and the computation that contains it."""

    operation: Operation
    computation: Computation
    times: float  # executions per run of the program
    # whether that number depends on values (a loop whose trip count was assumed, a branch of a conditional)
    data_dependent: bool


def executed(program: Program, trip_count: TripCount = lambda loop: None) -> Iterator[Executed]:
    """Yield all scheduled operations in program order; operations inside fusions and reductions are not scheduled.

    ``trip_count`` is called for loops without a known count; if it returns None, the body counts once. All branches of a
    conditional count, as an upper bound.
    """
    yield from _walk(program, program.entry, times=1.0, open_=False, trip_count=trip_count)


def _walk(
    program: Program, computation: Computation, times: float, open_: bool, trip_count: TripCount
) -> Iterator[Executed]:
    for operation in computation.operations.values():
        yield Executed(operation, computation, times, open_)
        if operation.opcode == "while":
            known = known_trip_count(program, computation, operation)
            assumed = trip_count(operation) if known is None else known
            inside = times * (1 if assumed is None else assumed)
            for name in (operation.called("condition"), operation.called("body")):
                yield from _walk(program, program.computations[name], inside, open_ or known is None, trip_count)
        elif operation.opcode == "conditional":
            for name in operation.branches:
                yield from _walk(program, program.computations[name], times, open_=True, trip_count=trip_count)
        elif operation.opcode in ("call", "async-start"):
            name = operation.called("to_apply") or operation.called("calls")
            if name:
                yield from _walk(program, program.computations[name], times, open_, trip_count)
