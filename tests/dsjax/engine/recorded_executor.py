"""An executor without JAX whose every result and delay is scripted, and which writes down each command that it is given."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from fake_executor import FakeExecutor, Slot

from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts, Step, encode, from_int32s
from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.tiers.page_tiers import PageReports
from dsjax.engine.transfer.messages import PulledChunk, Source

LAYERS, EXPERTS, SLOTS_PER_RANK, EXPERT_RANKS = 3, 8, 3, 4


class LaunchFailedError(BaseException):
    """A command could not be launched because of an interrupt, which is no loss of a process that a core goes on after."""


class Clock:
    """Seconds that pass only where the script says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Line:
    """A command of a stream. command: None where the line is something else than a command."""

    kind: str
    length: int
    digest: str
    command: Command | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.length} {self.digest}"


def line_of(kind: str, data: bytes, command: Command | None = None) -> Line:
    return Line(kind, len(data), sha256(data).hexdigest()[:12], command)


class ScriptedExecutor(FakeExecutor):
    """Its tokens depend on a request's seed and the token's position alone, so that they are the same however the engine's parts change.

    What goes to the disk, comes from there, is offered or pulled is done when the virtual clock says so, however often anybody asks; chunks
    move only in `pump`, which the script calls.

    Attributes:
        name, stream: the lines of all commands so far, those of the executors of this name before this one included.
        disk_seconds, chunk_seconds: until a page is written or read, a chunk is offered or pulled. May be infinite.
        pulls_fail: whether no chunk can be pulled now.
        non_finite: by seed the position from which a request's values are not finite.
        failing: kinds of commands whose next launch fails, once for each entry.
        failing_exchanges: numbers, counted from 0, of the commands that move experts and cannot.
        keeps_elsewhere: ranks whose chunks another process keeps.
    """

    def __init__(self, name: str, stream: list[Line], clock: Clock, *, moves_experts: bool = False, **options):
        super().__init__(**options)
        self.name, self.stream = name, stream
        self._clock = clock
        self.disk_seconds = self.chunk_seconds = 0.03
        self.pulls_fail = False
        self.non_finite: dict[int, int] = {}
        self.failing: list[type] = []
        self.failing_exchanges: set[int] = set()
        self.keeps_elsewhere: set[int] = set()
        self._windows = self._exchanges = 0
        self._found = self._found and dict(sorted(self._found.items()))
        self._placement = np.arange(LAYERS * SLOTS_PER_RANK * EXPERT_RANKS).reshape(LAYERS, -1) % EXPERTS
        self._moves_experts = moves_experts

    def extension(self, kind):
        if kind is ExpertMover:
            return self if self._moves_experts else None
        return super().extension(kind)

    @property
    def slots(self) -> ExpertSlots:
        return ExpertSlots(self._placement, EXPERTS, EXPERT_RANKS, 1, 1, 0.5, 1000, 1, (1e-6, 1e-6))

    @property
    def processes_of_ranks(self):
        return [[rank if rank in self.keeps_elsewhere else 0] for rank in range(self.limits.num_ranks)]

    # Commands.

    def launch(self, command: Command):
        kind = type(command)
        fails = kind in self.failing
        self.stream.append(line_of(kind.__name__ + "-failed" * fails, encode(command), command))
        if fails:
            self.failing.remove(kind)
            raise LaunchFailedError(kind.__name__)
        return super().launch(command)

    def _run(self, command: Command):
        if isinstance(command, ReadLoads):
            return self._loads()
        if isinstance(command, StageExperts | PlaceExperts):
            return self._exchange(command)
        return super()._run(command)

    # Pages below, and of other engines.

    def _later(self, work: list, *what) -> None:
        work.append([self._clock() + (self.disk_seconds if work is self._disk_work else self.chunk_seconds), what])

    def _due(self, work: list, takes: int | None = None) -> list[tuple]:
        now = self._clock()
        due = [what for at, what in work if at <= now]
        work[:] = [one for one in work if one[0] > now]
        return due

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        if seconds and self._found is None and all(at > self._clock() for at, _ in self._disk_work):
            self._clock.advance(seconds)
        return super().page_reports()

    def move_chunks(self, *, pulls: bool = False) -> None:
        """Chunks move in `pump` alone."""

    def pump(self) -> None:
        super().move_chunks(pulls=True)

    def _chunk_of(self, rank: int, pages: list) -> dict | None:
        return None if rank in self.keeps_elsewhere else super()._chunk_of(rank, pages)

    def _pull(self, rank: int, source: Source, chunk: int, pages: list) -> None:
        if self.pulls_fail:
            self._report(PulledChunk(rank, source.link, chunk, [number for _, number in pages], False))
        else:
            super()._pull(rank, source, chunk, pages)

    # Experts.

    def _loads(self) -> LoadWindow:
        """In each window other experts are busy, each layer's in another order."""
        self._windows += 1
        layer, expert = np.arange(LAYERS)[:, None], np.arange(EXPERTS)[None]
        heat = (expert * 3 + layer + self._windows) % EXPERTS
        loads = (1 + heat**3 + 7 * expert + layer).astype(np.int64)
        by_rank = np.zeros((LAYERS, EXPERT_RANKS), np.int64)
        for own, row, sums in zip(loads, self._placement, by_rank, strict=True):
            for slot, one in enumerate(row):
                sums[slot // SLOTS_PER_RANK] += own[one] // int((row == one).sum())
        return LoadWindow(loads, by_rank)

    def _exchange(self, command: StageExperts | PlaceExperts) -> Exchanged:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        if number in self.failing_exchanges:
            return Exchanged(0.0, "the link is down")
        if isinstance(command, PlaceExperts):
            self._placement = self._placement.copy()
            self._placement[command.layer] = from_int32s(command.physical_to_logical)
        return Exchanged(0.001)

    # Steps.

    def _step(self, step: Step) -> list[RankResults]:
        results = super()._step(step)
        self._clock.advance(0.01)
        return results

    def _finite(self, rank: int, slot: Slot, start: int, length: int) -> bool:
        return slot.start < self.non_finite.get(slot.admission.sampling.seed, 2**31)

    def _scored(self, slot: Slot, row, result: RowResult) -> RowResult:
        return result._replace(prompt_scores=[(0, -0.5, 1, [])] * row.scored) if row.scored else result

    def _propose(self, rank: int, slot: Slot, count: int) -> None:
        seed, V = slot.admission.sampling.seed, self.limits.vocab_size
        first = slot.start + 1
        slot.drafts = [(token_at(seed, at, V) + (at % 3 == 0)) % V for at in range(first, first + count)]

    def _sample(self, rank: int, slot: Slot, count: int, position: int = 0) -> int:
        return self._allowed(slot, position, token_at(slot.admission.sampling.seed, count, self.limits.vocab_size))


def token_at(seed: int, position: int, vocab_size: int) -> int:
    return ((seed + 1) * 2654435761 + position * 40503 * 65537) % 2**32 // 256 % vocab_size
