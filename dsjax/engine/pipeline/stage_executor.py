"""``StageExecutor``: one pipeline stage's part of every command of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import Command, Score, Step
from dsjax.engine.contract.executor import RankResults
from dsjax.engine.device.access import Pending, Running
from dsjax.engine.device.buckets import Launch
from dsjax.engine.device.launch_results import read_step
from dsjax.engine.device.launch_rows import RowRules
from dsjax.engine.device.lowered_programs import commit_key
from dsjax.engine.device.mesh_executor import MeshExecutor, StepOutcomes
from dsjax.engine.device.slots import LaunchShape


class PendingStages:
    """A command on its way through the stages of one process.

    Attributes:
        parts: the command's part at each stage that has begun; None where a stage has nothing to do.
        num_stages_done: number of stages that have finished the command.
        hidden: hidden states of the last finished stage, one array per launch, on the devices of the next stage.
        results: the command's results; from another process in the form of `ProcessLinks.receive_results`.
        num_stages_committed: number of stages to which the results are committed.
        number: number under which the process with the last stage publishes the results; None: the command has no results.
    """

    def __init__(self, command: Command):
        self.command = command
        self.parts: list[Pending | None] = []
        self.num_stages_done = self.num_stages_committed = 0
        self.hidden: list[Array] = []
        self.results: Any = None
        self.number: int | None = None


class LastStageOutput(NamedTuple):
    """The last stage's output of one launch, on the host: outcome and drafts, as in ``LaunchOutcome``."""

    outcome: np.ndarray
    drafts: np.ndarray | None


class _ForwardedLaunch(NamedTuple):
    """A launch of a stage before the last, whose results are not committed yet. positions: packed, on the devices."""

    shape: LaunchShape
    positions: Array
    reports: Any


class StageExecutor(MeshExecutor):
    """One stage's part of every command.

    A launch takes its hidden states from ``incoming`` and appends its own to ``outgoing``, both in the order of the commands.
    Call ``commit_results`` with a step's results at every stage but the last, before the next step of the same requests.

    incoming: hidden states of the previous stage, on this stage's devices; any object with `popleft`. outgoing: this stage's hidden states.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self.incoming: deque[Array] = deque()
        self.outgoing: deque[Array] = deque()
        super().__init__(*arguments, **options)

    def commit_results(
        self, pending: Pending, results: Sequence[RankResults], outputs: Sequence[LastStageOutput]
    ) -> None:
        """Commit a step's results to this stage's state, in the order of the steps. For every stage but the last."""
        self._slots.commit(pending.command, results)
        step: StepOutcomes = pending.kept
        for launch, output in zip(step.outcomes, outputs, strict=True):
            if self._recorder is not None:
                self._recorder.add(launch.reports, launch.shape.groups, step.placements)
            sent = [self.send(array) for array in output if array is not None]
            num_drafts = 0 if output.drafts is None else output.drafts.shape[-1]
            program = self.programs.get(*commit_key(launch.shape, num_drafts))
            self.state = program(self.state, launch.positions, *sent)
            if self.max_in_flight == 1:
                jax.block_until_ready(self.state.slots)

    def drop_interrupted(self) -> None:
        """Drop the remains of an interrupted launch. All other launches must be done, and their hidden states taken."""
        self._queue.clear()
        self.outgoing.clear()

    def read_results(self, pending: Pending) -> list[RankResults]:
        """Wait for a step's results at the last stage; any thread may call this."""
        return read_step(pending.command, pending.kept.outcomes)

    def outputs(self, pending: Pending) -> list[LastStageOutput]:
        """Return the last stage's outputs of a collected step, one per launch, for the other stages to ``commit_results``."""
        return [
            LastStageOutput(np.asarray(launch.outcome), None if launch.drafts is None else np.asarray(launch.drafts))
            for launch in pending.kept.outcomes
        ]

    def _incoming_hidden(self) -> tuple[Array, ...]:
        return () if self.model.is_first_stage else (self.incoming.popleft(),)

    def _rules(self, command: Step, launch: Launch, shape: LaunchShape) -> RowRules:
        """Give no sampling inputs to a stage before the last, which does not sample."""
        if not self.model.is_last_stage:
            return RowRules(None, False, [], None, {})
        return super()._rules(command, launch, shape)

    def _run(self, pending: Pending, launch: Launch, shape: LaunchShape, packed: Array, rules: RowRules) -> Running:
        if self.model.is_last_stage:
            yield from super()._run(pending, launch, shape, packed, rules)
            return
        program = self.programs.get("step", shape, False, self._reports(pending))
        self.state, positions, hidden, reports = program(self.params, self.state, packed, *self._incoming_hidden())
        self.outgoing.append(hidden)
        pending.kept.outcomes.append(_ForwardedLaunch(shape, positions, reports if pending.kept.recording else {}))
        yield hidden

    def _score(self, pending: Pending, command: Score) -> Running:
        running = super()._score(pending, command)
        if self.model.is_last_stage:
            return running

        def run() -> Running:
            for hidden in running:
                self.outgoing.append(pending.kept.pop())
                yield hidden

        return run()
