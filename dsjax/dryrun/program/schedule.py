"""Simulation of a compiled program's schedule: when each operation runs, given the caller's prices.

The text of a compiled program is in schedule order. A device has a compute thread, which runs operations sequentially, and
links, each of which carries one transfer at a time. A start issues its transfer as soon as the compute thread reaches it and
the links are free; the operations between start and done run meanwhile; the done waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsjax.dryrun.program.asynchronous import collective_of, is_done, is_start, start_of
from dsjax.dryrun.program.collectives import ProgramCollective
from dsjax.dryrun.program.costs import FREE
from dsjax.dryrun.program.loops import known_trip_count
from dsjax.dryrun.program.text import Computation, Operation, Program
from dsjax.dryrun.program.walk import TripCount

COMPUTE = "compute"


@dataclass(frozen=True)
class OperationCost:
    """Cost of one run of an operation: seconds, and the work behind them."""

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = ""  # the largest component, such as ``memory``


class Prices(Protocol):
    """Costs of all parts of a schedule."""

    def operation(self, program: Program, computation: Computation, operation: Operation) -> OperationCost:
        """Return the cost of an operation on the compute thread."""

    def transfer(self, collective: ProgramCollective) -> Mapping[str, OperationCost]:
        """Return a collective's cost by link; the collective ends with its last link."""

    def copy(self, computation: Computation, operation: Operation) -> Mapping[str, OperationCost]:
        """Return the cost by link of any other asynchronous start."""

    def loop_overhead(self, loop: Operation, known: bool) -> OperationCost:
        """Return the overhead of one loop iteration, without its operations. known: whether the trip count is known in advance."""


@dataclass(frozen=True, eq=False)
class Span:
    """One run of an operation, or all iterations of a loop without transfers."""

    operation: Operation
    thread: str  # ``COMPUTE`` or a link
    begin: float  # seconds; inside a ``body``, from the start of the iteration
    end: float  # likewise
    work: OperationCost
    # index in ``Schedule.spans`` of the span whose end let this one begin; None at the start of the program and inside bodies
    cause: int | None = None
    body: tuple[Span, ...] = ()  # one iteration of a loop
    times: float = 1.0  # number of iterations

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin

    def leaves(self, times: float = 1.0) -> Iterator[tuple[Span, float]]:
        """Yield the operations in the span, each with its number of runs."""
        if not self.body:
            yield self, times
        for inner in self.body:
            yield from inner.leaves(times * self.times)


@dataclass(frozen=True, eq=False)
class LoopIteration:
    """One iteration of a loop whose iterations were simulated one by one."""

    loop: Operation
    index: int
    times: int
    depth: int  # number of enclosing loops
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A simulated program."""

    spans: tuple[Span, ...]  # in order of issue
    iterations: tuple[LoopIteration, ...]  # of the loops with transfers
    last: int | None  # index of the span that ends last; None if nothing takes time

    @property
    def seconds(self) -> float:
        """Duration from the begin of the first operation to the end of the last."""
        return 0.0 if self.last is None else self.spans[self.last].end

    def critical_path(self) -> tuple[int, ...]:
        """Return the indices of the spans that determine the duration: each begins when the previous one ends, the first at 0."""
        path = []
        index = self.last
        while index is not None:
            path.append(index)
            index = self.spans[index].cause
        return tuple(reversed(path))


def play(
    program: Program,
    prices: Prices,
    collectives: Sequence[ProgramCollective] = (),
    trip_count: TripCount = lambda loop: None,
) -> Schedule:
    """Simulate one run of the program.

    collectives: from ``program_collectives`` with the same ``trip_count``; a collective that is not listed
    (because its groups have one member) takes no time. A conditional runs its longest branch.
    """
    builder = _Builder(program, prices, {collective.name: collective for collective in collectives}, trip_count)
    run = _Run()
    run.simulate(builder.items(program.entry), {}, 0)
    last = run.last if run.now > 0 or run.last is not None else None
    return Schedule(tuple(run.spans), tuple(run.iterations), last)


@dataclass(frozen=True, eq=False)
class _Compute:
    operation: Operation
    work: OperationCost


@dataclass(frozen=True, eq=False)
class _Transfer:
    operation: Operation
    works: Mapping[str, OperationCost]
    asynchronous: bool


@dataclass(frozen=True, eq=False)
class _Wait:
    start: str


@dataclass(frozen=True, eq=False)
class _Loop:
    operation: Operation
    times: float
    items: tuple[_Item, ...]

    @property
    def only_computes(self) -> bool:
        """Whether the loop has no transfers, so that all iterations are alike."""
        return all(isinstance(i, _Compute) or (isinstance(i, _Loop) and i.only_computes) for i in self.items)


_Item = _Compute | _Transfer | _Wait | _Loop


@dataclass(frozen=True)
class _Builder:
    """Converts computations to lists of priced items, with loops and branches resolved."""

    program: Program
    prices: Prices
    collectives: Mapping[str, ProgramCollective]
    trip_count: TripCount

    def items(self, computation: Computation) -> tuple[_Item, ...]:
        items: list[_Item] = []
        for operation in computation.operations.values():
            items += self._items(computation, operation)
        return tuple(items)

    def _items(self, computation: Computation, operation: Operation) -> list[_Item]:
        opcode = operation.opcode
        if opcode == "while":
            return self._loop(computation, operation)
        if opcode == "conditional":
            branches = [self.items(self.program.computations[name]) for name in operation.branches]
            return list(max(branches, key=_standalone_seconds))
        if opcode == "call":
            return list(self.items(self.program.computations[operation.called("to_apply")]))
        if is_done(self.program, operation):
            return [_Wait(start_of(self.program, computation, operation))]
        if operation.name in self.collectives:
            works = self.prices.transfer(self.collectives[operation.name])
            return [_Transfer(operation, works, is_start(self.program, operation))]
        if collective_of(self.program, operation):
            return [_Transfer(operation, {}, is_start(self.program, operation))]
        if opcode.endswith("-start"):
            return [_Transfer(operation, self.prices.copy(computation, operation), asynchronous=True)]
        if opcode in FREE or opcode.endswith("-update"):
            return []
        work = self.prices.operation(self.program, computation, operation)
        return [_Compute(operation, work)] if work.seconds > 0 else []

    def _loop(self, computation: Computation, operation: Operation) -> list[_Item]:
        known = known_trip_count(self.program, computation, operation)
        times = self.trip_count(operation) if known is None else known
        times = 1 if times is None else times
        if not times:
            return []
        overhead = self.prices.loop_overhead(operation, known is not None)
        items = self.items(self.program.computations[operation.called("body")])
        if known is None:  # a loop with a known trip count needs no condition
            items = self.items(self.program.computations[operation.called("condition")]) + items
        if overhead.seconds > 0:
            items = (_Compute(operation, overhead), *items)
        return [_Loop(operation, times, items)]


def _standalone_seconds(items: tuple[_Item, ...]) -> float:
    run = _Run()
    run.simulate(items, {}, 0)
    return run.now


class _Run:
    """Clocks of the compute thread and the links, and the recorded spans."""

    def __init__(self):
        self.spans: list[Span] = []
        self.iterations: list[LoopIteration] = []
        self.now = 0.0
        self.last: int | None = None  # the span that ends at `now`
        self.links: dict[str, tuple[float, int]] = {}  # link → (time from which it is free, index of its last span)

    def simulate(self, items: tuple[_Item, ...], started: dict[str, list[int]], depth: int) -> None:
        for item in items:
            if isinstance(item, _Compute):
                self._compute(item.operation, item.work)
            elif isinstance(item, _Transfer):
                transfer = self._transfer(item)
                if item.asynchronous:
                    started[item.operation.name] = transfer
                else:
                    self._wait(transfer)
            elif isinstance(item, _Wait):
                # A done whose start is in another computation waits for all transfers in flight.
                self._wait(started.pop(item.start, [index for _, index in self.links.values()]))
            elif item.only_computes:
                body, seconds = _one_iteration(item)
                if seconds:
                    work = OperationCost(item.times * seconds, bound="loop")
                    self._compute(item.operation, work, body, item.times)
            else:
                self._simulate_iterations(item, depth)

    def _simulate_iterations(self, loop: _Loop, depth: int) -> None:
        """Simulate each iteration: transfers from before the loop may still occupy the links during the first ones."""
        times = round(loop.times)
        for index in range(times):
            begin = self.now
            self.simulate(loop.items, {}, depth + 1)
            self.iterations.append(LoopIteration(loop.operation, index, times, depth, begin, self.now))

    def _compute(
        self, operation: Operation, work: OperationCost, body: tuple[Span, ...] = (), times: float = 1.0
    ) -> None:
        end = self.now + work.seconds
        self.spans.append(Span(operation, COMPUTE, self.now, end, work, self.last, body, times))
        self.now, self.last = end, len(self.spans) - 1

    def _transfer(self, item: _Transfer) -> list[int]:
        begin, cause = self.now, self.last
        for link in item.works:
            free_from, last_span = self.links.get(link, (0.0, 0))
            if free_from > begin:
                begin, cause = free_from, last_span
        transfers = []
        for link, work in item.works.items():
            self.spans.append(Span(item.operation, link, begin, begin + work.seconds, work, cause))
            transfers.append(len(self.spans) - 1)
            self.links[link] = begin + work.seconds, transfers[-1]
        return transfers

    def _wait(self, spans: Sequence[int]) -> None:
        for index in spans:
            if self.spans[index].end > self.now:
                self.now = self.spans[index].end
                self.last = index


def _one_iteration(loop: _Loop) -> tuple[tuple[Span, ...], float]:
    run = _Run()
    run.simulate(loop.items, {}, 0)
    return tuple(run.spans), run.now
