"""An executor without JAX, whose state and latent cache are real: it computes from what commands have told it, and from nothing else."""

import itertools
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract import commands
from dsjax.engine.contract.commands import TOKEN_MADE, WINDOW_NUMBERS, Command, Step, from_int32s, names_of
from dsjax.engine.contract.executor import ExecutorCounts, ExecutorLimits, RankResults, RowResult
from dsjax.engine.engine import EngineParts
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.tiers.page_tiers import PageReporter, PageReports
from dsjax.engine.transfer.messages import ChunkGoneError, ChunkPort, PulledChunk, Source

NAN = "not finite"
"""What a poisoned request writes. Whoever then has it in a page, read or not, fails too: 0 × NaN is NaN."""


def next_token(context: list[int], seed: int, vocab_size: int) -> int:
    """The fake model: a token that depends on every token before it, and on the seed."""
    value = seed + 0x9E3779B9
    for token in context:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (value >> 33) % vocab_size


def fold(before: int, token: int) -> int:
    """What a window page holds of a token: it depends on the one before, and so on all."""
    return (before * 6364136223846793005 + token + 1) % 2**64


def folds(tokens: list[int]) -> list[int]:
    return list(itertools.accumulate(tokens, fold, initial=0))[1:]


SIZES = {"num_ranks": 1, "max_rows_decode": 8, "max_rows_prefill": 4, "max_chunk": 8, "page_size": 4}
SIZES |= {"pages_per_rank": 65, "max_model_len": 128, "vocab_size": 300}
WAITED_FOR = Step | commands.Score | commands.Flush | commands.ReadLoads | commands.StageExperts | commands.PlaceExperts


@dataclass(eq=False)
class Pending:
    command: Command
    result: object = None
    done: bool = False


class Slot:
    def __init__(self, admission):
        self.admission = admission
        self.table: dict[int, int] = {}
        self.start, self.last = admission.start, admission.token
        self.drafts: list[int] = []
        self.masks: np.ndarray | None = None


class FakeExecutor:
    """Writes each token to its slot of its page and makes the next one from what the pages then hold.

    With window pages it also keeps there a fold over all tokens so far (`fold`), which each token goes on from, as the state of an
    unfinished compressed entry is: a request that goes on behind a border whose window page is another's is found out.

    A page that two requests write, a page that is lost, or a chunk that is skipped therefore changes the output. Its drafts are often
    right. Commands are executed in their order when one is waited for, so that two can be on their way.

    Attributes:
        step_seconds: how long a step takes. A test may change it at any time, and so hold a step until it has seen what it looks for.
        non_finite: seeds of requests whose values are not finite from now on.
        impossible: seeds of requests for which no token is allowed, and why.
        max_under_way: the most steps that were on their way at a time.
        disk: pages by their names, which the test may give to the next one. disk_takes: polls until a report comes; None: none ever does.
        reads_fail, writes_fail: whether reading and writing fail.
        chunks_take: steps or polls until a chunk is offered or pulled; None: none ever is.
    """

    def __init__(self, *, model=next_token, step_seconds=0.0, max_in_flight=1, disk=None, **limits):
        """limits: fields of `ExecutorLimits` other than `SIZES`."""
        self.limits = ExecutorLimits(**SIZES | limits)
        ranks, pages = range(self.limits.num_ranks), self.limits.pages_per_rank + self.limits.windows_per_rank
        self.max_in_flight, self.model, self.step_seconds = max_in_flight, model, step_seconds
        self.commands: list[Command] = []
        self.keep_commands = self.computing = self.warm = self.closed = False
        self.steps = self.max_under_way = 0
        self.fail_at_step: int | None = None
        self.non_finite: set[int] = set()
        self.impossible: dict[int, str] = {}
        self._queue: deque[Pending] = deque()
        self._cache = [[[None] * self.limits.page_size for _ in range(pages)] for _ in ranks]
        self._slots: list[dict[int, Slot]] = [{} for _ in ranks]
        self._host: list[dict[int, list]] = [{} for _ in ranks]
        self._staged: dict[int, list[list]] = {}
        self.disk: dict[bytes, list] = {} if disk is None else disk
        self.disk_takes: int | None = 1
        self.reads_fail = self.writes_fail = False
        self.chunks_take: int | None = 0
        self.dropped_chunks: list[int] = []
        self._offer = self._pull_by = self._report = None
        self._offers: list[list] = []  # how many polls ago, and what
        self._pulls: list[list] = []
        self._disk_work: list[list] = []
        self._found: dict[bytes, int] | None = dict.fromkeys(self.disk, 1) if self.limits.disk_pages else None
        self._landed: dict[tuple[int, int], list] = {}

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig.from_limits(self.limits, max_num_batched_tokens=16)

    def parts(self, **options) -> EngineParts:
        """What an engine over it is made of, with the tiny tokenizer."""
        return EngineParts(self, tiny_tokenizer(), self.config, **options)

    def launch(self, command: Command) -> Pending:
        pending = Pending(command)
        self._queue.append(pending)
        if self.keep_commands:
            self.commands.append(command)
        under_way = sum(isinstance(one.command, Step) for one in self._queue)
        self.max_under_way = max(self.max_under_way, under_way)
        assert under_way <= 2, "at most one step is launched behind the one that computes"
        self._run_what_nobody_waits_for()
        return pending

    def wait(self, pending: Pending) -> None:
        while not pending.done:
            head = self._queue[0]
            self.computing = isinstance(head.command, Step)
            try:
                self._compute_for(time.monotonic())
                head.result = self._run(head.command)
            finally:
                self.computing = False
            head.done = True
            self._queue.popleft()
            self._run_what_nobody_waits_for()

    def _compute_for(self, began: float) -> None:
        """Take the time that a step takes; one that a test holds ends when the test lowers `step_seconds`."""
        time.sleep(0)
        while self.computing and (left := began + self.step_seconds - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))

    def pages_of(self, kind: type, rank: int) -> set[int]:
        """Pages of the commands of this kind that are on their way."""
        on_their_way = [one.command for one in self._queue if isinstance(one.command, kind)]
        return {page for command in on_their_way for page in from_int32s(command.ranks[rank])}

    def _run_what_nobody_waits_for(self) -> None:
        while self._queue and not isinstance(self._queue[0].command, WAITED_FOR):
            self._run(self._queue.popleft().command)

    def extension(self, kind):
        if kind is PageReporter:
            return self if self.limits.host_pages_per_rank or self.limits.disk_pages else None
        return self if kind is ChunkPort and self.limits.transfers else None

    @property
    def processes_of_ranks(self):
        return [[0]] * self.limits.num_ranks

    def send_chunks(self, offer, drop=None) -> None:
        self._offer = offer

    def pull_chunks(self, pull, report) -> None:
        self._pull_by, self._report = pull, report

    def _later(self, work: list[list], *what) -> None:
        work.append([0, what])

    def _due(self, work: list[list], takes: int | None) -> list[tuple]:
        """Take out what was asked for so many polls ago."""
        due = [what for polls, what in work if takes is not None and polls >= takes]
        work[:] = [[polls + 1, what] for polls, what in work if takes is None or polls < takes]
        return due

    def move_chunks(self, *, pulls: bool = False) -> None:
        """Offer what is ready; `pulls`: and pull what was asked for."""
        for rank, number, pages in self._due(self._offers, self.chunks_take):
            self._offer(number, self._chunk_of(rank, pages))
        for wanted in self._due(self._pulls, self.chunks_take) if pulls else ():
            self._pull(*wanted)

    def _chunk_of(self, rank: int, pages: list) -> dict | None:
        """A chunk as it is offered; None where another process keeps it."""
        return {"tokens": pages}

    def _pull(self, rank, source, chunk, pages) -> None:
        try:
            found = self._pull_by(source, chunk, None)
        except ChunkGoneError:
            found = None
        for place, number in pages:
            if (rank, number) in self._landed and found is not None:
                self._landed[rank, number] = found["tokens"][place]
        self._report(PulledChunk(rank, source.link, chunk, [number for _, number in pages], found is not None))

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        found, self._found = self._found, None
        reports = PageReports([], [], found)
        for kind, *what in self._due(self._disk_work, self.disk_takes):
            if kind == "written":
                number, name, values = what
                if not self.writes_fail:
                    self.disk[name] = values
                    assert len(self.disk) <= self.limits.disk_pages
                reports.written.append((number, not self.writes_fail))
            elif kind == "drop":
                everything, names = what
                for name in list(self.disk) if everything else names:
                    self.disk.pop(name, None)
            elif tuple(what[:2]) in self._landed:
                rank, number, name = what
                there = not self.reads_fail and name in self.disk
                if there:
                    self._landed[rank, number] = self.disk[name]
                else:
                    del self._landed[rank, number]
                reports.read.append((rank, number, there))
        return reports

    def collect(self, pending: Pending):
        self.wait(pending)
        return pending.result

    def counts(self) -> ExecutorCounts:
        return ExecutorCounts(num_padding_tokens=self.steps)

    def set_recording(self, on: bool) -> None:
        pass

    def expert_counts(self):
        return None

    def warm_up(self, progress=None, lazily=False) -> None:
        for done in range(1, 4) if progress else ():
            progress(done, 3, f"bucket {done}")
        self.warm = True

    def shutdown(self) -> None:
        self.closed = True

    def _run(self, command: Command):
        size = self.limits.page_size
        if isinstance(command, Step):
            return self._step(command)
        if isinstance(command, commands.Copy):
            for cache, own in zip(self._cache, command.ranks, strict=True):
                pages = from_int32s(own)
                for source, target in zip(pages[::2], pages[1::2], strict=True):
                    cache[target] = list(cache[source])
        elif isinstance(command, commands.StorePages):
            for cache, host, own, names in zip(self._cache, self._host, command.ranks, command.names, strict=True):
                numbers, names = from_int32s(own), iter(names_of(names))
                for page, slot, number in zip(*(numbers[at::3] for at in range(3)), strict=True):
                    assert slot == -1 or self._in_host(slot)
                    assert slot == -1 or (slot >= WINDOW_NUMBERS) == (page >= self.limits.pages_per_rank)
                    assert slot >= 0 or number >= 0
                    assert None not in cache[page], "only full pages leave"
                    if slot >= 0:
                        host[slot] = list(cache[page])
                    if number >= 0:
                        self._later(self._disk_work, "written", number, next(names), list(cache[page]))
        elif isinstance(command, commands.FetchPages):
            self._staged[command.number] = [
                [self._fetched(rank, number) for number in from_int32s(own)] for rank, own in enumerate(command.ranks)
            ]
        elif isinstance(command, commands.ReadPages):
            told = zip(command.ranks, command.names, command.drops, strict=True)
            for rank, (numbers, names, drops) in enumerate(told):
                for number in from_int32s(drops):
                    self._landed.pop((rank, number), None)
                for number, name in zip(from_int32s(numbers), names_of(names), strict=True):
                    assert (rank, number) not in self._landed, "no number is used twice at a time"
                    self._landed[rank, number] = None
                    self._later(self._disk_work, "read", rank, number, name)
        elif isinstance(command, commands.SendPages):
            for rank, (cache, own) in enumerate(zip(self._cache, command.ranks, strict=True)):
                chunks: dict[int, list] = {}
                for number, page in zip(*[iter(from_int32s(own))] * 2, strict=True):
                    assert None not in cache[page], "only full pages are sent"
                    chunks.setdefault(number, []).append(list(cache[page]))
                for number, pages in chunks.items():
                    assert len(pages) <= 16
                    self._later(self._offers, rank, number, pages)
            if self.chunks_take == 0:
                self.move_chunks()
        elif isinstance(command, commands.PullPages):
            for rank, own in enumerate(command.ranks):
                wanted: dict[tuple, list] = {}
                for index, chunk, place, number in zip(*[iter(from_int32s(own))] * 4, strict=True):
                    source = Source(*command.sources[index])
                    assert (rank, number) not in self._landed, "no number is used twice at a time"
                    self._landed[rank, number] = None
                    wanted.setdefault((source, chunk), []).append((place, number))
                for (source, chunk), pages in wanted.items():
                    self._later(self._pulls, rank, source, chunk, pages)
        elif isinstance(command, commands.DropPages):
            self._later(self._disk_work, "drop", command.everything, names_of(command.names))
        elif isinstance(command, commands.PlacePages):
            here = self._staged.pop(command.number, [[] for _ in command.ranks])
            for cache, staged, own in zip(self._cache, here, command.ranks, strict=True):
                assert len(staged) in (0, len(own) // 4)
                for values, page in zip(staged, from_int32s(own), strict=False):
                    assert page != 0, "page 0 is reserved"
                    cache[page] = values
        elif isinstance(command, commands.Clear):
            for cache, own in zip(self._cache, command.ranks, strict=True):
                for page in from_int32s(own):
                    cache[page] = [None] * size
        elif isinstance(command, commands.Flush):
            self._cache = [[[None] * size for _ in cache] for cache in self._cache]
            self._slots = [{} for _ in self._slots]
        elif isinstance(command, commands.Score):
            return np.zeros((len(command.tokens) // 4, self.limits.vocab_size), np.float32)
        else:
            assert isinstance(command, commands.DropChunks)
            self.dropped_chunks += from_int32s(command.numbers)
        return None

    def _fetched(self, rank: int, number: int) -> list:
        if self._in_host(number):
            return list(self._host[rank][number])
        values = self._landed.pop((rank, number))
        assert values is not None, "only pages that have come are fetched"
        return list(values)

    def _in_host(self, number: int) -> bool:
        if number >= WINDOW_NUMBERS:
            return number - WINDOW_NUMBERS < self.limits.host_windows_per_rank
        return number < self.limits.host_pages_per_rank

    def _step(self, step: Step) -> list[RankResults]:
        assert len(step.ranks) == self.limits.num_ranks, "every rank takes part in every step"
        if self.fail_at_step is not None and self.steps >= self.fail_at_step:
            raise RuntimeError("the fake device is lost")
        self.steps += 1
        return [self._rank(rank, own, step) for rank, own in enumerate(step.ranks)]

    def _rank(self, rank: int, own, step: Step) -> RankResults:
        slots = self._slots[rank]
        for admission in own.admissions:
            slots[admission.slot] = Slot(admission)
        for change in own.pages:
            for index, page in enumerate(change.pages, start=change.first):
                first = self.limits.pages_per_rank if index >= self.limits.max_pages else 0
                last = first + (self.limits.windows_per_rank if first else self.limits.pages_per_rank)
                assert first < page < last, "a page of its kind, and not the reserved one"
                slots[change.slot].table[index] = page
        decodes = list(zip(*[iter(from_int32s(own.decodes))] * 2, strict=True))
        assert len(decodes) <= self.limits.max_rows_decode
        assert len(own.prefills) <= self.limits.max_rows_prefill
        used = [slot for slot, _ in decodes] + [row.slot for row in own.prefills]
        assert len(used) == len(set(used))
        assert all(0 <= slot < self.limits.max_rows_decode for slot in used)
        guides = {guide.slot: guide for guide in own.guides}
        for slot in used:
            guide, words = guides.get(slot), -(-self.limits.vocab_size // 32)
            slots[slot].masks = guide and np.frombuffer(guide.masks, "<u4").reshape(-1, words)
        # All tokens are written before any is read, as on a device.
        widths = {slot: self._write_decode(rank, slots[slot], limit, step.num_drafts) for slot, limit in decodes}
        for row in own.prefills:
            assert 0 < row.length <= self.limits.max_chunk
            assert row.start + row.length <= row.limit
            self._write(rank, slots[row.slot], row.start, list(from_int32s(row.tokens)))
        return RankResults(
            [self._decode(rank, slots[slot], widths[slot], step.proposes) for slot, _ in decodes],
            [self._prefill(rank, slots[row.slot], row, step.proposes) for row in own.prefills],
        )

    def _write_decode(self, rank: int, slot: Slot, limit: int, most_drafts: int) -> int:
        if slot.masks is not None:
            most_drafts = min(most_drafts, len(slot.masks) - 1)
        tokens = [slot.last, *slot.drafts[:most_drafts]][: max(0, limit - slot.start)]
        self._write(rank, slot, slot.start, tokens)
        return len(tokens)

    def _decode(self, rank: int, slot: Slot, width: int, proposes: int) -> RowResult:
        if not width:
            return RowResult()
        if not self._finite(rank, slot, slot.start, width):
            return RowResult((), finite=False, num_drafts=width - 1)
        drafts, made = slot.drafts[: width - 1], []
        while True:
            made.append(self._sample(rank, slot, slot.start + len(made) + 1, len(made)))
            if len(made) > len(drafts) or made[-1] != drafts[len(made) - 1]:
                break
        slot.start += len(made)
        slot.last = made[-1]
        self._propose(rank, slot, proposes)
        return self._result(slot, made)._replace(num_drafts=width - 1)

    def _prefill(self, rank: int, slot: Slot, row, proposes: int) -> RowResult:
        slot.start, slot.drafts = row.start + row.length, []
        if not self._finite(rank, slot, row.start, row.length):
            return RowResult((), finite=False)
        slot.last = row.next_token
        if row.next_token != TOKEN_MADE:
            return self._scored(slot, row, RowResult())
        slot.last = self._sample(rank, slot, slot.start)
        self._propose(rank, slot, proposes)
        return self._scored(slot, row, self._result(slot, [slot.last]))

    def _result(self, slot: Slot, made: list[int]) -> RowResult:
        if slot.admission.sampling.seed in self.impossible:
            return RowResult((), error=self.impossible[slot.admission.sampling.seed])
        wanted, V = slot.admission.sampling.logprobs, self.limits.vocab_size
        drafts = slot.drafts if slot.admission.guided else ()
        if wanted < 0:
            return RowResult(made, drafts=drafts)
        scores = [(t, -0.5, 1, [((t + place) % V, -0.5 - place) for place in range(wanted)]) for t in made]
        return RowResult(made, scores=scores, drafts=drafts)

    def _scored(self, slot: Slot, row, result: RowResult) -> RowResult:
        return result

    def _propose(self, rank: int, slot: Slot, count: int) -> None:
        """Two of three drafts are right, as far as those before them are."""
        slot.drafts = []
        context = [*self._context(rank, slot, slot.start), slot.last]
        for _ in range(count):
            token = self.model(context, self._seed(slot), self.limits.vocab_size)
            slot.drafts.append(token if (len(context) + token) % 3 else (token + 1) % self.limits.vocab_size)
            context.append(slot.drafts[-1])

    def _sample(self, rank: int, slot: Slot, count: int, position: int = 0) -> int:
        """The token behind the first `count` ones, or the next higher one that the guide of this position of the row allows."""
        context = self._context(rank, slot, count)
        assert all(type(token) is int for token in context), "what is read was written"
        if self.limits.windows_per_rank:
            behind, size = max(0, count - self.limits.page_size), self.limits.page_size
            read = [self._cache[rank][self._window(slot, at)][at % size] for at in range(behind, count)]
            assert read == folds(context)[behind:], "the window holds what these tokens, and those before, have left"
        token = self.model(context, self._seed(slot), self.limits.vocab_size)
        held_back = {t: until for t, _, until in zip(*[iter(from_int32s(slot.admission.biases))] * 3, strict=True)}
        while count - slot.admission.sampling.num_prompt_tokens < held_back.get(token, 0):
            token = (token + 1) % self.limits.vocab_size
        return self._allowed(slot, position, token)

    def _allowed(self, slot: Slot, position: int, token: int) -> int:
        if slot.masks is not None and slot.masks[position].any():
            while not slot.masks[position][token // 32] >> np.uint32(token % 32) & 1:
                token = (token + 1) % self.limits.vocab_size
        return token

    def _seed(self, slot: Slot) -> int:
        sampling = slot.admission.sampling
        return sampling.seed if sampling.temperature > 0 else 0

    def _context(self, rank: int, slot: Slot, count: int) -> list:
        size = self.limits.page_size
        return [self._cache[rank][slot.table[at // size]][at % size] for at in range(count)]

    def _window(self, slot: Slot, position: int) -> int:
        ring = position // self.limits.page_size % self.limits.window_columns
        return slot.table[self.limits.max_pages + ring]

    def _finite(self, rank: int, slot: Slot, start: int, length: int) -> bool:
        pages = {page for index, page in slot.table.items() if index < self.limits.max_pages}
        if self.limits.windows_per_rank:
            window = range(max(0, start - self.limits.page_size + 1), start + length)
            pages |= {self._window(slot, position) for position in window}
        return not any(NAN in self._cache[rank][page] for page in pages)

    def _write(self, rank: int, slot: Slot, start: int, tokens: list[int]) -> None:
        size = self.limits.page_size
        poisoned = slot.admission.sampling.seed in self.non_finite
        for position, token in enumerate(tokens, start=start):
            page = slot.table[position // size]
            self._cache[rank][page][position % size] = NAN if poisoned else token
            if self.limits.windows_per_rank:
                before = self._cache[rank][self._window(slot, position - 1)][(position - 1) % size] if position else 0
                entry = NAN if poisoned or before == NAN else fold(before, token)
                self._cache[rank][self._window(slot, position)][position % size] = entry


def expected_tokens(prompt: list[int], count: int, seed: int = 0, vocab_size: int = 300, model=next_token) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(model(context, seed, vocab_size))
    return context[len(prompt) :]
