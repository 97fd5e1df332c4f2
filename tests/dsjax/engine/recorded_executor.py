"""An executor without JAX whose every result and delay is scripted, and which writes down each command that it is given."""

from collections import deque
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from dsjax.engine.contract.commands import (
    TOKEN_MADE,
    Command,
    DropPages,
    Flush,
    PlaceExperts,
    PullPages,
    ReadLoads,
    ReadPages,
    Score,
    SendPages,
    StageExperts,
    Step,
    StorePages,
    encode,
    from_int32s,
    names_of,
)
from dsjax.engine.contract.executor import ExecutorCounts, ExecutorLimits, RankResults, RowResult
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.tiers.page_tiers import PageReporter, PageReports
from dsjax.engine.transfer.messages import ChunkPort, PulledChunk, Source

LAYERS, EXPERTS, SLOTS_PER_RANK, EXPERT_RANKS = 3, 8, 3, 4


class DeviceLostError(RuntimeError):
    """The device of a step is gone."""


class LaunchFailedError(BaseException):
    """A command could not be launched because of an interrupt, which is no loss of a process that a core goes on after."""


class Clock:
    """Seconds that pass only where the script says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
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
    """The line that stands for these bytes."""
    return Line(kind, len(data), sha256(data).hexdigest()[:12], command)


class _Pending:
    def __init__(self, command: Command):
        self.command, self.result, self.done = command, None, False


class _Slot:
    """What the device knows of a slot."""

    def __init__(self, admission):
        self.admission = admission
        self.start, self.last = admission.start, admission.token
        self.drafts: list[int] = []
        self.masks: np.ndarray | None = None


class ScriptedExecutor:
    """Its tokens depend on a request's seed and the token's position alone, so that they are the same however the engine's parts change.

    Pages have no content. What goes to the disk, comes from there, is offered or pulled is done when the virtual clock says so, however
    often anybody asks; chunks move only in `pump`, which the script calls.

    Attributes:
        stream: the lines of all commands so far, those of the executors before this one included.
        disk_seconds, chunk_seconds: until a page is written or read, a chunk is offered or pulled. May be infinite.
        reads_fail, writes_fail, pulls_fail: whether they do now.
        non_finite: by seed the position from which a request's values are not finite.
        impossible: seeds of requests for which no token is allowed.
        lost_at_step: the step, counted from 0, that is never done. failing: kinds of commands whose next launch fails, once for each entry.
        failing_exchanges: numbers, counted from 0, of the commands that move experts and cannot.
        keeps_elsewhere: ranks whose chunks another process keeps.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        stream: list[Line],
        clock: Clock,
        *,
        max_in_flight: int = 2,
        disk: set[bytes] | None = None,
        moves_experts: bool = False,
    ):
        self.limits, self.stream, self.max_in_flight = limits, stream, max_in_flight
        self._clock = clock
        self._step_seconds = 0.01
        self.disk_seconds = self.chunk_seconds = 0.03
        self.reads_fail = self.writes_fail = self.pulls_fail = False
        self.non_finite: dict[int, int] = {}
        self.impossible: set[int] = set()
        self.lost_at_step: int | None = None
        self.failing: list[type] = []
        self.failing_exchanges: set[int] = set()
        self.keeps_elsewhere: set[int] = set()
        self.steps = self._windows = self._exchanges = 0
        self.recording = False
        self._queue: deque[_Pending] = deque()
        self._slots: list[dict[int, _Slot]] = [{} for _ in range(limits.num_ranks)]
        self.disk = set() if disk is None else disk
        self._found: list[bytes] | None = sorted(self.disk) if limits.disk_pages else None
        self._disk_work: list[tuple[float, str, tuple]] = []
        self._reading: set[tuple[int, int]] = set()
        self._chunk_work: list[tuple[float, str, tuple]] = []
        self._offer = self._pull = self._report = None
        self._placement = np.arange(LAYERS * SLOTS_PER_RANK * EXPERT_RANKS).reshape(LAYERS, -1) % EXPERTS
        self._moves_experts = moves_experts

    # What is fixed.

    def extension(self, kind):
        has = {
            PageReporter: bool(self.limits.host_pages_per_rank or self.limits.disk_pages),
            ChunkPort: self.limits.transfers,
            ExpertMover: self._moves_experts,
        }
        return self if has[kind] else None

    @property
    def slots(self) -> ExpertSlots:
        return ExpertSlots(self._placement, EXPERTS, EXPERT_RANKS, 1, 1, 0.5, 1000, 1, (1e-6, 1e-6))

    @property
    def processes_of_ranks(self):
        return [[rank if rank in self.keeps_elsewhere else 0] for rank in range(self.limits.num_ranks)]

    @property
    def chunk_shapes(self):
        return {}

    def counts(self) -> ExecutorCounts:
        return ExecutorCounts()

    def set_recording(self, on: bool) -> None:
        self.recording = on

    def expert_counts(self):
        return None

    def warm_up(self, progress=None) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def send_chunks(self, offer, drop=lambda numbers: None) -> None:
        self._offer = offer

    def pull_chunks(self, pull, report) -> None:
        self._pull, self._report = pull, report

    # Commands.

    def launch(self, command: Command) -> _Pending:
        kind = type(command)
        fails = kind in self.failing
        self.stream.append(line_of(kind.__name__ + "-failed" * fails, encode(command), command))
        if fails:
            self.failing.remove(kind)
            raise LaunchFailedError(kind.__name__)
        pending = _Pending(command)
        self._queue.append(pending)
        assert sum(isinstance(one.command, Step) for one in self._queue) <= 2
        self._run_what_nobody_waits_for()
        return pending

    def wait(self, pending: _Pending) -> None:
        while not pending.done:
            self._run_head()
            self._run_what_nobody_waits_for()

    def collect(self, pending: _Pending):
        self.wait(pending)
        return pending.result

    def _run_what_nobody_waits_for(self) -> None:
        waited_for = Step | Score | Flush | ReadLoads | StageExperts | PlaceExperts
        while self._queue and not isinstance(self._queue[0].command, waited_for):
            self._run_head()

    def _run_head(self) -> None:
        head = self._queue[0]
        head.result = self._run(head.command)
        head.done = True
        self._queue.popleft()

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
        """Offer and pull what is due."""
        for kind, what in self._take_due(self._chunk_work):
            if kind == "offer":
                rank, number = what
                self._offer(number, None if rank in self.keeps_elsewhere else {})
                continue
            rank, source, chunk, numbers = what
            try:
                if self.pulls_fail:
                    raise ConnectionError
                self._pull(source, chunk, None)
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
        if self.lost_at_step is not None and self.steps >= self.lost_at_step:
            raise DeviceLostError("the device is lost")
        self.steps += 1
        self._clock.advance(self._step_seconds)
        return [self._rank(slots, own, step) for slots, own in zip(self._slots, step.ranks, strict=True)]

    def _rank(self, slots: dict[int, _Slot], own, step: Step) -> RankResults:
        for admission in own.admissions:
            slots[admission.slot] = _Slot(admission)
        guides = {guide.slot: guide for guide in own.guides}
        decodes = list(zip(*[iter(from_int32s(own.decodes))] * 2, strict=True))
        for slot in [slot for slot, _ in decodes] + [row.slot for row in own.prefills]:
            guide, words = guides.get(slot), -(-self.limits.vocab_size // 32)
            slots[slot].masks = None if guide is None else np.frombuffer(guide.masks, "<u4").reshape(-1, words)
        return RankResults(
            [self._decode(slots[slot], limit, step) for slot, limit in decodes],
            [self._prefill(slots[row.slot], row, step) for row in own.prefills],
        )

    def _decode(self, slot: _Slot, limit: int, step: Step) -> RowResult:
        most = step.num_drafts if slot.masks is None else min(step.num_drafts, len(slot.masks) - 1)
        width = max(0, min(1 + len(slot.drafts[:most]), limit - slot.start))
        if not width:
            return RowResult()
        drafts, made = slot.drafts[: width - 1], []
        if self._fails(slot):
            return RowResult((), finite=False, num_drafts=len(drafts))
        while True:
            made.append(self._token(slot, slot.start + len(made) + 1, len(made)))
            if len(made) > len(drafts) or made[-1] != drafts[len(made) - 1]:
                break
        slot.start += len(made)
        slot.last = made[-1]
        return self._result(slot, made, step)._replace(num_drafts=len(drafts))

    def _prefill(self, slot: _Slot, row, step: Step) -> RowResult:
        slot.start, slot.drafts = row.start + len(row.tokens) // 4, []
        if self._fails(slot):
            return RowResult((), finite=False)
        slot.last, result = row.next_token, RowResult()
        if row.next_token == TOKEN_MADE:
            slot.last = self._token(slot, slot.start, 0)
            result = self._result(slot, [slot.last], step)
        return result._replace(prompt_scores=[(0, -0.5, 1, [])] * row.scored) if row.scored else result

    def _result(self, slot: _Slot, made: list[int], step: Step) -> RowResult:
        seed = slot.admission.sampling.seed
        if seed in self.impossible:
            return RowResult((), error="no token is allowed")
        slot.drafts = [
            (token_at(seed, at, self.limits.vocab_size) + (at % 3 == 0)) % self.limits.vocab_size
            for at in range(slot.start + 1, slot.start + 1 + step.proposes)
        ]
        scores = None if slot.admission.sampling.logprobs < 0 else [(token, -0.5, 1, []) for token in made]
        return RowResult(made, scores=scores, drafts=slot.drafts if slot.admission.guided else ())

    def _fails(self, slot: _Slot) -> bool:
        return slot.start >= self.non_finite.get(slot.admission.sampling.seed, 2**31)

    def _token(self, slot: _Slot, position: int, place: int) -> int:
        """The token of a position, or the next higher one that the row's guide allows at this place."""
        token = token_at(slot.admission.sampling.seed, position, self.limits.vocab_size)
        if slot.masks is not None and slot.masks[place].any():
            while not int(slot.masks[place][token // 32]) >> (token % 32) & 1:
                token = (token + 1) % self.limits.vocab_size
        return token


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """The scripted model."""
    return ((seed + 1) * 2654435761 + position * 40503 * 65537) % 2**32 // 256 % vocab_size
