"""``MeshExecutor``: carries out commands by launching compiled programs on a mesh, and reads the tokens back."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.contract.commands import Clear, Command, Copy, Custom, Flush, Score, Step
from dsjax.engine.contract.executor import (
    CompileRest,
    ExecutorCounts,
    ExecutorLimits,
    ExpertCounts,
    Progress,
    RankResults,
)
from dsjax.engine.device import device_state
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Kind, Pending, Running
from dsjax.engine.device.buckets import Buckets, Launch, num_decodes, padded_pieces
from dsjax.engine.device.expert_recorder import ExpertRecorder
from dsjax.engine.device.launch_results import LaunchOutcome, read_step
from dsjax.engine.device.launch_rows import RowRules, SlotTable, pack_admissions, pack_launch, split_page_changes
from dsjax.engine.device.lowered_programs import COPIES
from dsjax.engine.device.page_staging import PageStaging
from dsjax.engine.device.process import explained_out_of_memory
from dsjax.engine.device.programs import Programs
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.model import step as model_step
from dsjax.model.rows import RowGroup
from sharding.cut import Worker
from sharding.layer_placement import LayerPlacements

SMALLER_STEPS = (
    "give a smaller --cache-tokens, so that more is left for a step, or make steps smaller with --max-num-batched-tokens, "
    "--prefill-chunk or --moe-chunk-tokens"
)
"""Advice for a step that needs more memory than the cache leaves."""


@dataclass
class StepOutcomes:
    """What a step keeps until its results are collected."""

    recording: bool  # whether the experts' load is recorded
    outcomes: list[LaunchOutcome] = field(default_factory=list)  # of launches, on the devices
    placements: LayerPlacements | None = None  # of experts, when the step began; None without experts


PartMaker = Callable[[DeviceAccess, PageStaging], DevicePart]
"""Makes an optional part of an executor, which moves pages or experts."""


class MeshExecutor(DeviceAccess):
    """Runs one model on one mesh. ``warm_up`` compiles every shape; otherwise a shape is compiled at first use.

    Two steps may be in flight, and all programs of a command are enqueued at once. Exception: on several emulated devices, programs in
    flight at the same time can deadlock, so each program waits for the previous one, of the same command or another.

    Args:
        parts: makers of the optional parts, which carry out their own commands. Pages are looked up in this order.
        meet: a barrier of the processes of the mesh; None: there is only this process.
        library, experts: as in `Programs`.
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
        parts: Sequence[PartMaker] = (),
        meet: Callable[[], object] | None = None,
        library: ProgramLibrary | None = None,
        experts: Worker | None = None,
    ):
        params = {path: params[path] for path in step.table.infos}
        described = device_state.describe(step, limits, num_drafts, counts_loads=experts_per_exchange > 0)
        programs = Programs(step, params, described, limits, experts_per_exchange, meet, library, experts)
        super().__init__(step, limits, programs, params, programs.allocate(), step.placement)
        self.buckets = buckets
        emulated = step.mesh.devices.flat[0].platform == "cpu" and step.spec.num_devices > 1
        self.max_in_flight = 1 if emulated else 2
        self._slots = SlotTable(limits.num_ranks, limits.max_rows_decode, limits.vocab_size)
        self._recorder: ExpertRecorder | None = None
        self._table, staging = CommandTable(), PageStaging(self)
        self._table.add(Step, Handler(self._step, self._collect_step, is_awaited=True))
        self._table.add(Score, Handler(self._score, _collect_score, is_awaited=True))
        self._table.add(Flush, Handler(self._flush, is_awaited=True))
        self._table.add(Copy, Handler(self._copy, keeps_last=False))
        self._table.add(Clear, Handler(self._clear, keeps_last=False))
        with contextlib.ExitStack() as created:  # if a part cannot be made, earlier parts end their threads
            self._parts = [created.enter_context(contextlib.closing(make(self, staging))) for make in parts]
            created.pop_all()
        for part in (staging, *self._parts):
            part.register(self._table)
        self._queue: deque[Pending] = deque()
        self._padding = 0
        self._known_programs: frozenset[Hashable] | None = None  # compiled when last counted; None before the warm-up
        self._late_compilations = 0

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return what a part offers under this type, or None."""
        return next((offered for part in self._parts if (offered := part.extension(kind)) is not None), None)

    def awaits(self, command: Command) -> bool:
        """Whether a caller waits for commands of this kind. Nobody waits for page copies and KV connectors' own commands."""
        handler = self._table.get(type(command))
        return handler is not None and handler.is_awaited

    def launch(self, command: Command) -> Pending:
        """Send a command's inputs. Then enqueue all its programs, or on emulated devices start it if no other command is running."""
        handler = self._table[command.source if isinstance(command, Custom) else type(command)]
        pending = Pending(command, handler)
        pending.running = handler.execute(pending, command)
        self._queue.append(pending)
        with explained_out_of_memory("a step was launched", SMALLER_STEPS):
            if self.max_in_flight > 1:
                pending.started = time.monotonic()
                for array in pending.running:  # each iteration enqueues a program
                    pending.last = array
                if not handler.keeps_last:
                    pending.last = None  # part of the state, which is donated to the next program
            elif len(self._queue) == 1:
                self._advance()
        return pending

    def wait(self, pending: Pending) -> None:
        """Wait until a command, and all commands before it, are done; start the next one."""
        with explained_out_of_memory("a step was computed", SMALLER_STEPS):
            while not pending.done:
                head = self._queue[0]
                self._finish(head)
                self._queue.popleft()
                if self._queue and self._queue[0].started:  # was enqueued earlier, but runs only now
                    self._queue[0].started = max(self._queue[0].started, head.ended)
                self._advance()

    def collect(self, pending: Pending) -> Any:
        """Wait for a command and return its results."""
        self.wait(pending)
        return pending.handler.collect(pending)

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> CompileRest | None:
        """Compile every program that commands can ask for. lazily: only those wanted first; return a call that compiles the rest."""
        labels = self.programs.labels(self.buckets)
        first = self.programs.wanted_first(self.buckets) if lazily else labels
        self.programs.warm_up(first, progress)
        if self._parts:
            self.programs.meet()
        for part in self._parts:
            part.rehearse(lambda command: self.collect(self.launch(command)))
        self._known_programs = self.programs.compiled
        remaining = [key for key in labels if key not in first]
        return partial(self.programs.compile_beside, remaining) if remaining else None

    def counts(self) -> ExecutorCounts:
        """Return the padding of the last step, the number of late compilations, and the counts of experts."""
        if self._known_programs is not None:
            late = self.programs.compiled - self._known_programs - self.programs.compiled_beside
            self._known_programs |= late
            if not self.recording:  # recording compiles programs when they first run, see `set_recording`
                self._late_compilations += len(late)
        experts = self._recorder.counts() if self.recording else None
        return ExecutorCounts(self._padding, self._late_compilations, experts)

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""
        return self._recorder is not None

    def set_recording(self, on: bool) -> None:
        """Switch the recording of the experts' load on or off, from the next step on. Switching on resets the counts.

        Without ``--enable-eplb``, steps with counts are other programs, which are compiled when they first run.
        """
        if on != self.recording:
            self._recorder = ExpertRecorder(self.model) if on else None

    def expert_counts(self) -> ExpertCounts | None:
        """Return the counts since recording began; None if it is off or the model has no experts."""
        return self._recorder.read() if self.recording else None

    def shutdown(self, held: HeldWeights | None = None) -> None:
        """Free the state, the parameters and the programs, even if the last step has failed.

        held: takes over the parameters that a checkpoint has; None: free them too.
        """
        arrays = [*jax.tree.leaves(self.state), *self.params.values()]
        arrays += [pending.last for pending in self._queue if pending.last is not None]
        for array in arrays:
            with contextlib.suppress(RuntimeError):  # its program has failed, or it was donated to a failed one
                array.block_until_ready()
        for part in self._parts:
            part.close()
            part.release(held)
        self._queue.clear()
        self.programs.drop()
        self._parts = []
        params, self.params = self.params, {}
        if held is not None:
            held.keep(self.model, params, self.placements)
            table = self.model.table.infos
            kept = {id(array) for path, array in params.items() if table[path].init != "derived"}
            arrays = [array for array in arrays if id(array) not in kept]
        for array in arrays:
            with contextlib.suppress(RuntimeError):
                array.delete()

    def replace_programs(self, model: model_step.ModelStep, programs: Programs) -> None:
        """Use other programs from now on. The recording of experts starts over."""
        super().replace_programs(model, programs)
        self._recorder = ExpertRecorder(self.model) if self.recording else None
        self._known_programs = self.programs.compiled

    def _advance(self) -> None:
        """Start the first command of the queue that a caller waits for; before that, run the commands ahead of it to their end."""
        while self._queue and not self._queue[0].started:
            head = self._queue[0]
            head.started = time.monotonic()
            head.last = next(head.running, None)
            if head.handler.is_awaited:
                return
            self._finish(head)
            self._queue.popleft()

    def _finish(self, pending: Pending) -> None:
        """Run a command's remaining programs, each after the previous one is done on all devices."""
        while pending.last is not None:
            pending.last.block_until_ready()
            pending.last = next(pending.running, None)
        pending.ended = time.monotonic()
        pending.done, pending.running = True, None

    def _step(self, pending: Pending, command: Step) -> Running:
        """Send a step's inputs and return its execution."""
        pending.kept = StepOutcomes(self.recording)
        self._slots.admit(command)
        launches = self.buckets.launches(command)
        shapes = [self.programs.shape(launch.decode, launch.prefill) for launch in launches]
        room = shapes[0].page_changes if shapes else 0
        of_first_launch, before = split_page_changes(command, room, self.limits.pages_per_rank)
        admit = self._change("admit", pack_admissions(command, before))
        most_drafts = [self._slots.most_drafts(rank) for rank in command.ranks]
        inputs, changes = [], of_first_launch
        for launch, shape in zip(launches, shapes, strict=True):
            inputs.append(self.programs.put_rows(pack_launch(command, launch, shape, changes, most_drafts)))
            changes = [[] for _ in command.ranks]
        rules = [self._rules(command, launch, shape) for launch, shape in zip(launches, shapes, strict=True)]
        self._padding = sum(shape.tokens for shape in shapes) * self.limits.num_ranks - sum(
            num_decodes(rank) + sum(row.length for row in rank.prefills) for rank in command.ranks
        )

        def run() -> Running:
            pending.kept.placements = self.placements
            yield from admit
            for launch, shape, packed, row_rules in zip(launches, shapes, inputs, rules, strict=True):
                yield from self._run(pending, launch, shape, packed, row_rules)

        return run()

    def _run(self, pending: Pending, launch: Launch, shape: LaunchShape, packed: Array, rules: RowRules) -> Running:
        """Run a launch and keep its outcome. Greedy decodes and drafts are one program; else step, draw, scores and drafts are separate."""
        command = pending.command
        proposes = command.proposes if command.num_drafts or launch.prefill is not None else 0
        if proposes and launch.prefill is None and rules.ops is None and not rules.scored:
            program = self.programs.get("drafting step", shape, proposes, self._reports(pending))
            self.state, outcome, drafts, reports = program(self.params, self.state, packed, *self._incoming_hidden())
            yield outcome
            yield from self._keep(pending, LaunchOutcome(launch, shape, rules, outcome, reports, drafts))
            return
        program = self.programs.get("step", shape, launch.scored, self._reports(pending))
        self.state, positions, outcome, logits, hidden, reports, *prompt_scores = program(
            self.params, self.state, packed, *self._incoming_hidden()
        )
        yield outcome
        scores, drafts = None, None
        if rules.ops is not None:
            outcome = yield from self._draw(shape, positions, logits, rules)
        if rules.scored:
            scores = self.programs.get("score", shape.positions)(logits, outcome)
            yield scores.ranks
        if proposes:
            program = self.programs.get("drafts", shape, proposes)
            self.state, drafts = program(self.params, self.state, packed, positions, outcome, hidden)
            yield drafts
        launched = LaunchOutcome(launch, shape, rules, outcome, reports, drafts, scores, *prompt_scores)
        yield from self._keep(pending, launched)

    def _draw(self, shape: LaunchShape, positions: Array, raw: Array, rules: RowRules) -> Generator[Array, None, Array]:
        """Sample again from raw logits, by the rows' rules: the step has sampled greedily. Return the outcome."""
        biased = raw
        for piece in rules.biases:
            biased = self.programs.get("biases", shape.positions)(self.state, positions, biased, piece)
            yield biased
        masks = self.programs.no_masks(shape.positions) if rules.masks is None else rules.masks
        program = self.programs.get("draw", shape.positions)
        self.state, outcome = program(self.state, positions, raw, biased, masks, rules.ops)
        yield outcome
        return outcome

    def _reports(self, pending: Pending) -> bool:
        """Whether a step needs special programs that report the dispatch's counts. With ``--enable-eplb``, all programs do."""
        return pending.kept.recording and not self.programs.counts_loads

    def _incoming_hidden(self) -> tuple[Array, ...]:
        """Return the last argument of programs with layers: the hidden states of the previous stage, if there is one."""
        return ()

    def _keep(self, pending: Pending, launched: LaunchOutcome) -> Running:
        """Keep a launch's outcome. If processes share the mesh, gather what is wanted of the results besides tokens; drop the rest."""
        if self.programs.shared:
            has_guide = any(rules.guided for rules in launched.rules.slots.values())
            wanted = {
                "prompt_scores": launched.prompt_scores,
                "drafts": launched.drafts if has_guide else None,
                "reports": launched.reports if pending.kept.recording and launched.reports else None,
            }
            for name, tree in wanted.items():
                gathered = None if tree is None else self.programs.gather(tree)
                launched = launched._replace(**{name: gathered})
                if gathered is not None:
                    yield jax.tree.leaves(gathered)[0]
        pending.kept.outcomes.append(launched)

    def _score(self, pending: Pending, command: Score) -> Running:
        """Send one sequence in chunks, on pages of rank 0. Numbers from ``pages_per_rank`` on are window pages."""
        pending.kept = []
        tokens, pages = np.frombuffer(command.tokens, "<i4"), np.frombuffer(command.pages, "<i4")
        limits = self.limits
        chunk, ranks, columns = limits.max_chunk, limits.num_ranks, limits.max_pages + limits.window_columns
        windows, pages = pages[pages >= limits.pages_per_rank], pages[pages < limits.pages_per_rank]
        inputs = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            row, table = np.zeros((ranks, 1, chunk), np.int32), np.zeros((ranks, 1, columns), np.int32)
            first, length = np.zeros((ranks, 1), np.int32), np.zeros((ranks, 1), np.int32)
            row[0, 0, : len(part)], table[0, 0, : len(pages)] = part, pages
            table[0, 0, limits.max_pages : limits.max_pages + len(windows)] = windows - limits.pages_per_rank
            first[0, 0], length[0, 0] = start, len(part)
            inputs.append(self.programs.put_rows(RowGroup.pack(row, first, length, table)))

        def run() -> Running:
            for packed in inputs:
                program = self.programs.get("every token")
                self.state, logits = program(self.params, self.state, packed, *self._incoming_hidden())
                pending.kept.append(logits)
                yield logits

        return run()

    def _copy(self, _: Pending, command: Copy) -> Running:
        pairs = [np.frombuffer(rank_pairs, "<i4").reshape(-1, 2) for rank_pairs in command.ranks]
        return self._change("copy", padded_pieces(pairs, COPIES, 0))

    def _clear(self, _: Pending, command: Clear) -> Running:
        marked = np.zeros((self.limits.num_ranks, self._num_pages), bool)
        for rank, rank_pages in enumerate(command.ranks):
            marked[rank, np.frombuffer(rank_pages, "<i4")] = True
        return self._change("clear", [marked])

    def _flush(self, _: Pending, command: Flush) -> Running:
        self._slots.reset()
        return self._change("clear", [np.ones((self.limits.num_ranks, self._num_pages), bool)])

    @property
    def _num_pages(self) -> int:
        """Number of pages of both kinds on a rank."""
        return self.limits.pages_per_rank + self.limits.windows_per_rank

    def _change(self, kind: str, inputs: Iterable[np.ndarray]) -> Running:
        """Send all inputs now. The execution changes the state: it runs the program of this kind once for each input."""
        sent = [self.programs.put_rows(packed) for packed in inputs]

        def run() -> Running:
            for packed in sent:
                self.state = self.programs.get(kind)(self.state, packed)
                yield self.state.slots

        return run()

    def _rules(self, command: Step, launch: Launch, shape: LaunchShape) -> RowRules:
        """Return the sampling inputs of a launch's rows, on the devices."""
        rules = self._slots.rules_of(command, launch, shape)
        if rules.ops is None:
            return rules
        send = self.programs.put_rows
        masks = None if rules.masks is None else send(rules.masks)
        ops = self.send_everywhere(rules.ops)
        return rules._replace(ops=ops, biases=[send(piece) for piece in rules.biases], masks=masks)

    def _collect_step(self, pending: Pending) -> list[RankResults]:
        """Return the results of a step's rows, and commit them to the slots."""
        kept: StepOutcomes = pending.kept
        if self._recorder is not None:
            for launch in kept.outcomes:
                self._recorder.add(launch.reports, launch.shape.groups, kept.placements)
        results = read_step(pending.command, kept.outcomes)
        self._slots.commit(pending.command, results)
        return results


def _collect_score(pending: Pending) -> np.ndarray:
    return np.concatenate([np.asarray(array) for array in pending.kept])[: len(pending.command.tokens) // 4]
