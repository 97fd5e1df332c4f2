"""When each operation of a compiled program runs: its schedule played through at prices that the caller names.

The text of a compiled program is in schedule order. One device has a compute thread, which runs operations one after the
other, and links, each of which carries one transfer at a time. A start hands a transfer to its links as soon as the compute
thread comes to it and the links are free; what stands between start and done runs meanwhile; the done waits.
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
    """What one run of an operation costs: seconds, and what they are made of. bound: which of its costs is the largest."""

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = ""


class Prices(Protocol):
    """Seconds of everything that a schedule is made of."""

    def operation(self, program: Program, computation: Computation, operation: Operation) -> OperationCost:
        """An operation of the compute thread."""

    def transfer(self, collective: ProgramCollective) -> Mapping[str, OperationCost]:
        """A collective: link → work; it ends when the last of its links does."""

    def copy(self, computation: Computation, operation: Operation) -> Mapping[str, OperationCost]:
        """The start of anything else that is asynchronous."""

    def turn(self, loop: Operation, known: bool) -> OperationCost:
        """What one turn of a loop costs beside the operations in it. known: whether the number of turns is known before it runs."""


@dataclass(frozen=True, eq=False)
class Span:
    """One run of an operation, or all runs of a loop in which nothing is asynchronous.

    thread: ``COMPUTE`` or a link. begin, end: seconds; inside a ``body``, from the beginning of one turn. cause: the
    index in ``Schedule.spans`` of the span whose end let this one begin; None for what begins the program, and inside bodies.
    body: of a loop, one turn; times: how many turns.
    """

    operation: Operation
    thread: str
    begin: float
    end: float
    work: OperationCost
    cause: int | None = None
    body: tuple[Span, ...] = ()
    times: float = 1.0

    @property
    def seconds(self) -> float:
        """From begin to end."""
        return self.end - self.begin

    def leaves(self, times: float = 1.0) -> Iterator[tuple[Span, float]]:
        """The operations in it, each with how often it runs."""
        if not self.body:
            yield self, times
        for inner in self.body:
            yield from inner.leaves(times * self.times)


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of a loop whose turns were played one by one. depth: loops around it."""

    loop: Operation
    index: int
    times: int
    depth: int
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A program that was played through. spans: in order of issue. turns: of loops with transfers in them.

    last: the span that ends last; None where nothing takes time.
    """

    spans: tuple[Span, ...]
    turns: tuple[Turn, ...]
    last: int | None

    @property
    def seconds(self) -> float:
        """From the first operation's begin to the last one's end."""
        return 0.0 if self.last is None else self.spans[self.last].end

    def critical_path(self) -> tuple[int, ...]:
        """Indices of the spans that determine the time: each begins when the one before it ends, the first at 0."""
        path, at = [], self.last
        while at is not None:
            path.append(at)
            at = self.spans[at].cause
        return tuple(reversed(path))


def play(
    program: Program,
    prices: Prices,
    collectives: Sequence[ProgramCollective] = (),
    trip_count: TripCount = lambda loop: None,
) -> Schedule:
    """Play the program through once.

    collectives: those of ``program_collectives``, with the same ``trip_count``; a collective that is not among them
    (because its groups have one member) takes no time. Of a conditional the longest branch runs.
    """
    builder = _Builder(program, prices, {one.name: one for one in collectives}, trip_count)
    run = _Run()
    run.play(builder.items(program.entry), {}, 0)
    last = run.last if run.now > 0 or run.last is not None else None
    return Schedule(tuple(run.spans), tuple(run.turns), last)


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
    def alone(self) -> bool:
        """Nothing in it is asynchronous, so that all turns are alike."""
        return all(isinstance(i, _Compute) or (isinstance(i, _Loop) and i.alone) for i in self.items)


_Item = _Compute | _Transfer | _Wait | _Loop


@dataclass(frozen=True)
class _Builder:
    """Computations as lists of priced items, loops and branches resolved."""

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
            return list(max(branches, key=_alone_seconds))
        if opcode == "call":
            return list(self.items(self.program.computations[operation.computation("to_apply")]))
        if is_done(self.program, operation):
            return [_Wait(start_of(self.program, computation, operation))]
        if operation.name in self.collectives:
            works = self.prices.transfer(self.collectives[operation.name])
            return [_Transfer(operation, works, is_start(self.program, operation))]
        if collective_of(self.program, operation):
            return [_Transfer(operation, {}, is_start(self.program, operation))]
        if opcode.endswith("-start"):
            return [_Transfer(operation, self.prices.copy(computation, operation), True)]
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
        turn = self.prices.turn(operation, known is not None)
        items = self.items(self.program.computations[operation.computation("body")])
        if known is None:  # otherwise nothing has to be looked at to go on
            items = self.items(self.program.computations[operation.computation("condition")]) + items
        if turn.seconds > 0:
            items = (_Compute(operation, turn), *items)
        return [_Loop(operation, times, items)]


def _alone_seconds(items: tuple[_Item, ...]) -> float:
    run = _Run()
    run.play(items, {}, 0)
    return run.now


class _Run:
    """The clocks of the compute thread and of the links, and what was recorded."""

    def __init__(self):
        self.spans: list[Span] = []
        self.turns: list[Turn] = []
        self.now = 0.0
        self.last: int | None = None  # whose end is `now`
        self.links: dict[str, tuple[float, int]] = {}  # free from when, after which span

    def play(self, items: tuple[_Item, ...], started: dict[str, list[int]], depth: int) -> None:
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
                # A done whose start stands in another computation waits for all that is on its way.
                self._wait(started.pop(item.start, [index for _, index in self.links.values()]))
            elif item.alone:
                body, seconds = _one_turn(item)
                if seconds:
                    work = OperationCost(item.times * seconds, bound="loop")
                    self._compute(item.operation, work, body, item.times)
            else:
                self._turns(item, depth)

    def _turns(self, loop: _Loop, depth: int) -> None:
        """Turn by turn: transfers from before the loop may still be on the links in the first ones."""
        times = round(loop.times)
        for index in range(times):
            begin = self.now
            self.play(loop.items, {}, depth + 1)
            self.turns.append(Turn(loop.operation, index, times, depth, begin, self.now))

    def _compute(
        self, operation: Operation, work: OperationCost, body: tuple[Span, ...] = (), times: float = 1.0
    ) -> None:
        end = self.now + work.seconds
        self.spans.append(Span(operation, COMPUTE, self.now, end, work, self.last, body, times))
        self.now, self.last = end, len(self.spans) - 1

    def _transfer(self, item: _Transfer) -> list[int]:
        begin, cause = self.now, self.last
        for link in item.works:
            free, after = self.links.get(link, (0.0, 0))
            if free > begin:
                begin, cause = free, after
        transfers = []
        for link, work in item.works.items():
            self.spans.append(Span(item.operation, link, begin, begin + work.seconds, work, cause))
            transfers.append(len(self.spans) - 1)
            self.links[link] = begin + work.seconds, transfers[-1]
        return transfers

    def _wait(self, spans: Sequence[int]) -> None:
        for index in spans:
            if self.spans[index].end > self.now:
                self.now, self.last = self.spans[index].end, index


def _one_turn(loop: _Loop) -> tuple[tuple[Span, ...], float]:
    run = _Run()
    run.play(loop.items, {}, 0)
    return tuple(run.spans), run.now
