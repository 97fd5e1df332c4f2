"""``MeshExecutor``: turns commands into launches of the compiled programs on a mesh, and reads the tokens back."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import (
    Clear,
    Command,
    Copy,
    DropPages,
    DropParcels,
    FetchPages,
    Flush,
    PlaceExperts,
    PlacePages,
    PullPages,
    ReadLoads,
    ReadPages,
    Score,
    SendPages,
    StageExperts,
    Step,
    StorePages,
)
from dsjax.engine.contract.executor import (
    Exchanged,
    ExecutorCounts,
    ExecutorLimits,
    ExpertCounts,
    ExpertSlots,
    PageReports,
    Progress,
)
from dsjax.engine.device import device_state, slots
from dsjax.engine.device.buckets import Buckets, Launch
from dsjax.engine.device.expert_recorder import ExpertRecorder
from dsjax.engine.device.launch_inputs import pack_admissions, pack_launch, split_page_changes
from dsjax.engine.device.launch_results import LaunchOutcome, read_step
from dsjax.engine.device.process import explained_out_of_memory
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.device.programs import Programs
from dsjax.engine.device.slot_rules import RowRules, SlotTable
from dsjax.engine.device.traced_programs import COPIES
from dsjax.engine.experts.expert_exchange import ExpertExchange, Reload
from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.host_pages import HostPages, Shapes
from dsjax.engine.transfer.page_parcels import PageParcels
from dsjax.engine.transfer.page_transfer import Parcel, Pull, PulledParcel
from dsjax.model import step as model_step
from dsjax.model.rows import RowGroup
from sharding.arrays import put
from sharding.layer_placement import LayerPlacements

Running = Generator[Array, None, None]
"""A command being executed: gives, program by program, an array that is ready when the program is done."""


SMALLER_STEPS = (
    "give a smaller --cache-tokens, so that more is left for a step, or make steps smaller with --max-num-batched-tokens, "
    "--prefill-chunk or --moe-chunk-tokens"
)
"""What to do where a step needs more memory than the cache has left it."""


class Pending:
    """A command that was launched.

    Attributes:
        outcomes: of a step, what each of its launches gave, on the devices.
        placements: of a step, where experts were when it began.
        loads: of `ReadLoads`, what was taken off the devices. error: of a command that moves experts, why it could not.
        started, ended: seconds of the monotonic clock; with two steps in flight `started` is when it was enqueued.
    """

    def __init__(self, command: Command):
        self.command = command
        self.running: Running | None = None
        self.last: Array | None = None
        self.outcomes: list[LaunchOutcome] = []
        self.logits: list[Array] = []
        self.loads: Any = None
        self.error: str | None = None
        self.placements: LayerPlacements | None = None
        self.done = False
        self.started = self.ended = 0.0

    @property
    def awaited(self) -> bool:
        """Whether somebody will wait for it."""
        return isinstance(self.command, Step | Score | Flush)

    @property
    def kept(self) -> bool:
        """Whether what its programs gave last is nobody else's, so that it can be waited for at any time."""
        return not isinstance(self.command, Copy | Clear | PlacePages)


class MeshExecutor:
    """Runs one model on one mesh. Every shape is compiled by ``warm_up``, or at first use.

    On one device, and on accelerators, two steps may be in flight: all programs of a command are enqueued at once. On emulated
    devices, programs in flight together can deadlock: each program is waited for before the next one starts, and so is each command.

    meet: waits for the other processes of the mesh, where there are any; they all call it at the same place. library: as of `Programs`.
    """

    def __init__(
        self,
        step: model_step.ModelStep,
        params: Mapping[str, Array],
        limits: ExecutorLimits,
        buckets: Buckets,
        *,
        num_drafts: int = 0,
        experts_per_exchange: int = 0,
        reload: Reload | None = None,
        meet: Callable[[], object] | None = None,
        disk: Callable[[Shapes], DiskPages] | None = None,
        library: ProgramLibrary | None = None,
    ):
        self.model, self.limits, self.buckets = step, limits, buckets
        self.params = {path: params[path] for path in step.table.infos}
        described = device_state.describe(step, limits, num_drafts, counts_loads=experts_per_exchange > 0)
        self.programs = Programs(step, self.params, described, limits, experts_per_exchange, meet, library)
        self.state = self.programs.allocate()
        emulated = step.mesh.devices.flat[0].platform == "cpu" and step.spec.num_devices > 1
        self.max_in_flight = 1 if emulated else 2
        self._slots = SlotTable(limits.num_ranks, limits.max_rows_decode, limits.vocab_size)
        self._new_recorder = lambda: ExpertRecorder(step)
        self._recorder: ExpertRecorder | None = None
        self._exchange = ExpertExchange(self, experts_per_exchange, reload) if experts_per_exchange else None
        self._parcels = PageParcels(self) if limits.transfers else None
        moves = limits.host_pages_per_rank or disk or limits.transfers
        self._host_pages = HostPages(self, disk, self._parcels) if moves else None
        self._queue: deque[Pending] = deque()
        self._padding = 0
        self._warm: frozenset[Hashable] | None = None

    @property
    def expert_slots(self) -> ExpertSlots | None:
        """Where experts are now; None where they cannot be moved."""
        return self._exchange.slots if self._exchange else None

    def launch(self, command: Command) -> Pending:
        """Lay out and send a command's inputs, and start it if the devices may take it now."""
        pending = Pending(command)
        pending.running = self._execution(pending)
        self._queue.append(pending)
        with explained_out_of_memory("a step was launched", SMALLER_STEPS):
            if self.max_in_flight > 1:
                pending.started = time.monotonic()
                for array in pending.running:
                    pending.last = array
                if not pending.kept:
                    pending.last = None  # a part of the state, which the next program takes
            elif len(self._queue) == 1:
                self._advance()
        return pending

    def wait(self, pending: Pending) -> None:
        """Wait until a command is done; start the next one."""
        with explained_out_of_memory("a step was computed", SMALLER_STEPS):
            while not pending.done:
                head = self._queue[0]
                self._finish(head)
                self._queue.popleft()
                if self._queue and self._queue[0].started:  # enqueued before, and begun only now
                    self._queue[0].started = max(self._queue[0].started, head.ended)
                self._advance()

    def collect(self, pending: Pending) -> Any:
        """Wait for a command, and give what came of it."""
        self.wait(pending)
        if isinstance(pending.command, Score):
            return np.concatenate([np.asarray(array) for array in pending.logits])[: len(pending.command.tokens) // 4]
        if isinstance(pending.command, ReadLoads):
            return self._exchange.window(pending.loads)
        if isinstance(pending.command, StageExperts | PlaceExperts):
            return Exchanged(pending.ended - pending.started, pending.error)
        if not isinstance(pending.command, Step):
            return None
        if self._recorder is not None:
            for outcome in pending.outcomes:
                self._recorder.add(outcome.reports, outcome.shape.tokens, pending.placements)
        results = read_step(pending.command, pending.outcomes)
        self._slots.settle(pending.command, results)
        return results

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """What came of pages and the disk since the last time; wait so long for the first of it."""
        return self._host_pages.reports(seconds)

    @property
    def parcel_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Of a parcel's arrays, by name: shape and dtype."""
        described = self.programs.described_moved()
        return {name: ((1, *array.shape[1:]), np.dtype(array.dtype)) for name, array in described.items()}

    @property
    def processes_of_ranks(self) -> Sequence[Sequence[int]]:
        """Of each DP rank the processes that have devices of it; the first one keeps its parcels."""
        return self._parcels.processes

    def send_parcels(
        self, offer: Callable[[int, Parcel | None], None], drop: Callable[[Sequence[int]], None] = lambda numbers: None
    ) -> None:
        """Have parcels offered when they are complete, and dropped when commands say so."""
        self._parcels.send_to(offer, drop)

    def pull_parcels(self, pull: Pull, report: Callable[[PulledParcel], None]) -> None:
        """Pull parcels by this, and say what has come of each."""
        self._parcels.pull_by(pull, report)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program that commands can ask for."""
        self.programs.warm_up(self.buckets, progress)
        if self._exchange:
            self.programs.meet()
            self._exchange.rehearse()
        self._warm = self.programs.compiled

    def counts(self) -> ExecutorCounts:
        """What the last step and the programs count."""
        late = 0 if self._warm is None else len(self.programs.compiled - self._warm)
        return ExecutorCounts(self._padding, late, self._recorder.counts() if self.recording else None)

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""
        return self._recorder is not None

    def set_recording(self, on: bool) -> None:
        """Whether the experts' load is recorded from the next step on; turning it on begins anew. Compiles nothing."""
        if on != self.recording:
            self._recorder = self._new_recorder() if on else None

    def expert_counts(self) -> ExpertCounts | None:
        """What was recorded since recording began; None while it is off, or the model has no experts."""
        return self._recorder.read() if self.recording else None

    def shutdown(self) -> None:
        """Free the state and drop the programs."""
        if self._host_pages:
            self._host_pages.close()
        for array in jax.tree.leaves(self.state):
            array.delete()
        self.programs.drop()

    def release(self) -> None:
        """`shutdown`, and free the parameters too, whatever became of the last step: wait until no program runs any more."""
        arrays = [*jax.tree.leaves(self.state), *self.params.values()]
        arrays += [pending.last for pending in self._queue if pending.last is not None]
        for array in arrays:
            with contextlib.suppress(RuntimeError):  # of the program that made it, or it was given to one that failed
                array.block_until_ready()
        if self._host_pages:
            self._host_pages.close()
        self._queue.clear()
        self.programs.drop()
        self._exchange = self._host_pages = None
        for array in arrays:
            with contextlib.suppress(RuntimeError):
                array.delete()
        self.params = {}

    def _advance(self) -> None:
        """Start what comes next; what nobody waits for is done at once."""
        while self._queue and not self._queue[0].started:
            head = self._queue[0]
            head.started = time.monotonic()
            head.last = next(head.running, None)
            if head.awaited:
                return
            self._finish(head)
            self._queue.popleft()

    def _finish(self, pending: Pending) -> None:
        """Run a command's remaining programs, each when the one before is done on all devices."""
        while pending.last is not None:
            jax.block_until_ready(pending.last)
            pending.last = next(pending.running, None)
        pending.ended = time.monotonic()
        pending.done, pending.running = True, None

    def _execution(self, pending: Pending) -> Running:
        """The command's programs, its inputs sent already."""
        command = pending.command
        if isinstance(command, Step):
            return self._step(pending, command)
        if isinstance(command, Score):
            return self._score(pending, command)
        if isinstance(command, Copy):
            return self._copy(command)
        if isinstance(command, Clear):
            return self._clear([np.frombuffer(own, "<i4") for own in command.ranks])
        if isinstance(command, StorePages):
            return self._host_pages.store(command)
        if isinstance(command, FetchPages):
            return self._host_pages.fetch(command)
        if isinstance(command, PlacePages):
            return self._host_pages.place(command)
        if isinstance(command, ReadPages):
            return self._host_pages.read(command)
        if isinstance(command, DropPages):
            return self._host_pages.drop(command)
        if isinstance(command, SendPages):
            return self._parcels.send(command)
        if isinstance(command, PullPages):
            return self._parcels.pull(command)
        if isinstance(command, DropParcels):
            return self._parcels.drop(command)
        if isinstance(command, ReadLoads):
            return self._exchange.read(pending, command)
        if isinstance(command, StageExperts):
            return self._exchange.stage(pending, command)
        if isinstance(command, PlaceExperts):
            return self._exchange.place(pending, command)
        assert isinstance(command, Flush)
        self._slots.void()
        return self._clear([np.arange(self.limits.pages_per_rank)] * self.limits.num_ranks)

    def _step(self, pending: Pending, command: Step) -> Running:
        """Lay out and send a step's inputs; give its execution."""
        self._slots.admit(command)
        launches = self.buckets.launches(command)
        shapes = [self.programs.shape(launch.decode, launch.prefill) for launch in launches]
        within, before = split_page_changes(command, shapes[0].page_changes if shapes else 0)
        admissions = [self._send(packed) for packed in pack_admissions(command, before)]
        nothing: list[list] = [[] for _ in command.ranks]
        most_drafts = [self._slots.most_drafts(rank) for rank in command.ranks]
        inputs = [
            self._send(pack_launch(command, launch, shape, within if place == 0 else nothing, most_drafts))
            for place, (launch, shape) in enumerate(zip(launches, shapes, strict=True))
        ]
        rules = [
            self._sent(self._slots.rules_of(command, launch, shape))
            for launch, shape in zip(launches, shapes, strict=True)
        ]
        self._padding = sum(shape.tokens for shape in shapes) * self.limits.num_ranks - sum(
            len(rank.decodes) // 8 + sum(row.length for row in rank.prefills) for rank in command.ranks
        )
        laid_out = list(zip(launches, shapes, inputs, rules, strict=True))
        return self._run_step(pending, command, admissions, laid_out, self.recording)

    def _run_step(
        self, pending: Pending, command: Step, admissions: list[Array], launches: list[tuple], recording: bool
    ) -> Running:
        pending.placements = self._exchange.placements if self._exchange else self.model.placement
        for packed in admissions:
            self.state = self.programs.admit()(self.state, packed)
            yield self.state.start
        for launch, shape, packed, rules in launches:
            yield from self._run_launch(pending, launch, shape, packed, rules, command.proposes, recording)

    def _run_launch(
        self,
        pending: Pending,
        launch: Launch,
        shape: slots.LaunchShape,
        packed: Array,
        rules: RowRules,
        proposes: int,
        recording: bool,
    ) -> Running:
        if proposes and launch.prefill is None and rules.wanted is None:
            program = self.programs.drafting_step(shape, proposes)
            self.state, outcome, drafts, reports = program(self.params, self.state, packed)
            yield outcome
            found = LaunchOutcome(launch, shape, outcome, None, None, drafts, reports, rules)
            yield from self._keep(pending, found, recording)
            return
        program = self.programs.step(shape, launch.scored)
        self.state, rows, outcome, logits, hidden, reports, *prompt_scores = program(self.params, self.state, packed)
        yield outcome
        scores, drafts = None, None
        if rules.wanted is not None:
            biased = logits
            for piece in rules.biases:
                biased = self.programs.biases(shape.sampled)(self.state, rows, biased, piece)
                yield biased
            masks = self.programs.no_masks(shape.sampled) if rules.masks is None else rules.masks
            draw = self.programs.draw(shape.sampled)
            self.state, outcome, scores = draw(self.state, rows, logits, biased, masks, rules.wanted)
            yield outcome
        if proposes:
            program = self.programs.drafts(shape, proposes)
            self.state, drafts = program(self.params, self.state, packed, rows, outcome, hidden)
            yield drafts
        found = LaunchOutcome(
            launch, shape, outcome, scores, prompt_scores[0] if prompt_scores else None, drafts, reports, rules
        )
        yield from self._keep(pending, found, recording)

    def _keep(self, pending: Pending, found: LaunchOutcome, recording: bool) -> Running:
        """Keep what a launch gave. What this process cannot read is gathered if somebody wants it, else dropped."""
        if self.programs.shared:
            slots_read = found.rules.slots.values()
            wanted = {
                "scores": found.scores is not None and any(own.sampling.logprobs >= 0 for own in slots_read),
                "prompt_scores": found.prompt_scores is not None,
                "drafts": found.drafts is not None and any(own.guided for own in slots_read),
                "reports": recording and bool(found.reports),
            }
            for name, is_wanted in wanted.items():
                gathered = (
                    self.programs.gather(getattr(found, name)) if is_wanted else {} if name == "reports" else None
                )
                found = found._replace(**{name: gathered})
                if is_wanted:
                    yield jax.tree.leaves(gathered)[0]
        pending.outcomes.append(found)

    def _score(self, pending: Pending, command: Score) -> Running:
        """One sequence in chunks, through pages of rank 0."""
        tokens, pages = np.frombuffer(command.tokens, "<i4"), np.frombuffer(command.pages, "<i4")
        chunk, ranks = self.limits.max_chunk, self.limits.num_ranks
        inputs = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            row, table = np.zeros((ranks, 1, chunk), np.int32), np.zeros((ranks, 1, self.limits.max_pages), np.int32)
            first, length = np.zeros((ranks, 1), np.int32), np.zeros((ranks, 1), np.int32)
            row[0, 0, : len(part)], table[0, 0, : len(pages)] = part, pages
            first[0, 0], length[0, 0] = start, len(part)
            inputs.append(self._send(RowGroup.pack(row, first, length, table)))

        def run() -> Running:
            for packed in inputs:
                self.state, logits = self.programs.every_token()(self.params, self.state, packed)
                pending.logits.append(logits)
                yield logits

        return run()

    def _copy(self, command: Copy) -> Running:
        pairs = [np.frombuffer(own, "<i4").reshape(-1, 2) for own in command.ranks]
        inputs = []
        for start in range(0, max(map(len, pairs)), COPIES):
            piece = np.zeros((len(pairs), COPIES, 2), np.int32)
            for rank, own in enumerate(pairs):
                part = own[start : start + COPIES]
                piece[rank, : len(part)] = part
            inputs.append(self._send(piece))

        def run() -> Running:
            for packed in inputs:
                self.state = self.programs.copy()(self.state, packed)
                yield self.state.start

        return run()

    def _clear(self, pages: list[np.ndarray]) -> Running:
        marked = np.zeros((self.limits.num_ranks, self.limits.pages_per_rank), bool)
        for rank, own in enumerate(pages):
            marked[rank, own] = True
        sent = self._send(marked)

        def run() -> Running:
            self.state = self.programs.clear()(self.state, sent)
            yield self.state.start

        return run()

    def _sent(self, rules: RowRules) -> RowRules:
        """The same, its arrays on the devices."""
        if rules.wanted is None:
            return rules
        masks = None if rules.masks is None else self._send(rules.masks)
        wanted = put(rules.wanted, self.programs.everywhere)
        return rules._replace(wanted=wanted, biases=[self._send(piece) for piece in rules.biases], masks=masks)

    def _send(self, array: np.ndarray) -> Array:
        return put(array, self.programs.rows)
