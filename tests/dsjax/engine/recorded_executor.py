"""An executor without JAX whose every result and delay is scripted, and which writes down each command that it is given."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from fake_executor import FakeExecutor, Slot

from dsjax.engine.contract.commands import (
    Command,
    DropPages,
    Flush,
    PlaceExperts,
    PullPages,
    ReadLoads,
    ReadPages,
    SendPages,
    StageExperts,
    Step,
    StorePages,
    encode,
    from_int32s,
    names_of,
)
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

    Pages have no content. What goes to the disk, comes from there, is offered or pulled is done when the virtual clock says so, however
    often anybody asks; chunks move only in `pump`, which the script calls.

    Attributes:
        stream: the lines of all commands so far, those of the executors before this one included.
        disk_seconds, chunk_seconds: until a page is written or read, a chunk is offered or pulled. May be infinite.
        reads_fail, writes_fail, pulls_fail: whether they do now.
        non_finite: by seed the position from which a request's values are not finite.
        failing: kinds of commands whose next launch fails, once for each entry.
        failing_exchanges: numbers, counted from 0, of the commands that move experts and cannot.
        keeps_elsewhere: ranks whose chunks another process keeps.
    """

    def __init__(
        self,
        stream: list[Line],
        clock: Clock,
        *,
        disk: set[bytes] | None = None,
        moves_experts: bool = False,
        **options,
    ):
        super().__init__(**options)
        self.stream = stream
        self._clock = clock
        self.disk_seconds = self.chunk_seconds = 0.03
        self.reads_fail = self.writes_fail = self.pulls_fail = False
        self.non_finite: dict[int, int] = {}
        self.failing: list[type] = []
        self.failing_exchanges: set[int] = set()
        self.keeps_elsewhere: set[int] = set()
        self._windows = self._exchanges = 0
        self.disk = set() if disk is None else disk
        self._found: list[bytes] | None = sorted(self.disk) if self.limits.disk_pages else None
        self._disk_work: list[tuple[float, str, tuple]] = []
        self._reading: set[tuple[int, int]] = set()
        self._chunk_work: list[tuple[float, str, tuple]] = []
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
        if isinstance(command, Step):
            return self._step(command)
        if isinstance(command, StorePages):
            for own, names in zip(command.ranks, command.names, strict=True):
                numbers = [number for number in from_int32s(own)[2::3] if number >= 0]
                for number, name in zip(numbers, names_of(names), strict=True):
                    self._later(self._disk_work, self.disk_seconds, "written", (number, name))
        elif isinstance(command, ReadPages):
            every = zip(command.ranks, command.names, command.drops, strict=True)
            for rank, (numbers, names, drops) in enumerate(every):
                self._reading -= {(rank, number) for number in from_int32s(drops)}
                for number, name in zip(from_int32s(numbers), names_of(names), strict=True):
                    self._reading.add((rank, number))
                    self._later(self._disk_work, self.disk_seconds, "read", (rank, number, name))
        elif isinstance(command, DropPages):
            what = command.everything, names_of(command.names)
            self._later(self._disk_work, self.disk_seconds, "drop", what)
        elif isinstance(command, SendPages):
            for rank, own in enumerate(command.ranks):
                for number in dict.fromkeys(from_int32s(own)[::2]):
                    self._later(self._chunk_work, self.chunk_seconds, "offer", (rank, number))
        elif isinstance(command, PullPages):
            for rank, own in enumerate(command.ranks):
                chunks: dict[tuple[int, int], list[int]] = {}
                for index, chunk, _, number in zip(*[iter(from_int32s(own))] * 4, strict=True):
                    chunks.setdefault((index, chunk), []).append(number)
                for (index, chunk), numbers in chunks.items():
                    what = rank, Source(*command.sources[index]), chunk, numbers
                    self._later(self._chunk_work, self.chunk_seconds, "pull", what)
        elif isinstance(command, Flush):
            self._slots = [{} for _ in self._slots]
        elif isinstance(command, ReadLoads):
            return self._loads()
        elif isinstance(command, StageExperts | PlaceExperts):
            return self._exchange(command)
        return None

    # Pages below, and of other engines.

    def _later(self, work: list, seconds: float, kind: str, what: tuple) -> None:
        work.append((self._clock() + seconds, kind, what))

    def _take_due(self, work: list) -> list[tuple[str, tuple]]:
        now = self._clock()
        due = [(kind, what) for at, kind, what in work if at <= now]
        work[:] = [entry for entry in work if entry[0] > now]
        return due

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        found, self._found = self._found, None
        due = self._take_due(self._disk_work)
        if seconds and not due and found is None:
            self._clock.advance(seconds)
            due = self._take_due(self._disk_work)
        reports = PageReports([], [], found)
        for kind, what in due:
            if kind == "written":
                number, name = what
                if not self.writes_fail:
                    self.disk.add(name)
                reports.written.append((number, not self.writes_fail))
            elif kind == "drop":
                everything, names = what
                self.disk -= set(self.disk if everything else names)
            elif what[:2] in self._reading:
                rank, number, name = what
                self._reading.remove((rank, number))
                reports.read.append((rank, number, not self.reads_fail and name in self.disk))
        return reports

    def pump(self) -> None:
        for kind, what in self._take_due(self._chunk_work):
            if kind == "offer":
                rank, number = what
                self._offer(number, None if rank in self.keeps_elsewhere else {})
                continue
            rank, source, chunk, numbers = what
            try:
                if self.pulls_fail:
                    raise ConnectionError
                self._pull_by(source, chunk, None)
                ok = True
            except Exception:
                ok = False
            self._report(PulledChunk(rank, source.link, chunk, numbers, ok))

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

    def _write(self, rank: int, slot: Slot, start: int, tokens: list[int]) -> None:
        pass

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
