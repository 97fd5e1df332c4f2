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
from dsjax.engine.device.launch_rows import RowRules, read_step
from dsjax.engine.device.lowered_programs import entering
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.device.slots import LaunchShape


class PendingStages:
    """A command on its way through the stages of one process.

    Attributes:
        parts: the command's part at each stage that has begun; None where a stage has nothing to do.
        passed: number of stages that have finished the command.
        hidden: hidden states of the last finished stage, one array per launch, on the devices of the next stage.
        results: the command's results; from another process in the form of `ProcessLinks.hear`.
        told: number of stages that have entered the results.
        number: number under which the process with the last stage publishes the results; None: the command has no results.
    """

    def __init__(self, command: Command):
        self.command = command
        self.parts: list[Pending | None] = []
        self.passed = self.told = 0
        self.hidden: list[Array] = []
        self.results: Any = None
        self.number: int | None = None


class LastStageOutput(NamedTuple):
    """The last stage's output of one launch, on the host: outcome and drafts, as in ``LaunchOutcome``."""

    outcome: np.ndarray
    drafts: np.ndarray | None


class _PassedOn(NamedTuple):
    """A launch whose hidden states an earlier stage has passed on. positions: packed, on the devices."""

    shape: LaunchShape
    positions: Array
    reports: Any


class StageExecutor(MeshExecutor):
    """One stage's part of every command.

    A launch takes its hidden states from ``arriving`` and appends its own to ``leaving``, both in the order of the commands.
    Call ``enter`` with a step's results at every stage but the last, before the next step of the same requests.

    arriving: hidden states of the previous stage, on this stage's devices; any object with `popleft`. leaving: this stage's hidden states.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self.arriving: deque[Array] = deque()
        self.leaving: deque[Array] = deque()
        super().__init__(*arguments, **options)

    def enter(self, pending: Pending, results: Sequence[RankResults], outputs: Sequence[LastStageOutput]) -> None:
        """Enter a step's results into this stage's state, in the order of the steps. For every stage but the last."""
        self._slots.commit(pending.command, results)
        launches, [placements], _ = pending.kept
        for launch, output in zip(launches, outputs, strict=True):
            if self._recorder is not None:
                self._recorder.add(launch.reports, launch.shape.groups, placements)
            sent = [self.send(array) for array in output if array is not None]
            program = self.programs.get(
                *entering(launch.shape, 0 if output.drafts is None else output.drafts.shape[-1])
            )
            self.state = program(self.state, launch.positions, *sent)
            if self.max_in_flight == 1:
                jax.block_until_ready(self.state.start)

    def forget(self) -> None:
        """Drop the remains of an interrupted launch. All other launches must be done, and their hidden states taken."""
        self._queue.clear()
        self.leaving.clear()

    def read(self, pending: Pending) -> list[RankResults]:
        """Wait for a step's results at the last stage; any thread may call this."""
        return read_step(pending.command, pending.kept.outcomes)

    def outputs(self, pending: Pending) -> list[LastStageOutput]:
        """Return the last stage's outputs of a collected step, one per launch, for the other stages to ``enter``."""
        return [
            LastStageOutput(np.asarray(one.outcome), None if one.drafts is None else np.asarray(one.drafts))
            for one in pending.kept.outcomes
        ]

    def _arrived(self) -> tuple[Array, ...]:
        return () if self.model.begins else (self.arriving.popleft(),)

    def _rules(self, command: Step, launch: Launch, shape: LaunchShape) -> RowRules:
        """Give no sampling inputs to a stage before the last, which does not sample."""
        return super()._rules(command, launch, shape) if self.model.ends else RowRules(None, False, [], None, {})

    def _run(self, pending: Pending, launch: Launch, shape: LaunchShape, packed: Array, rules: RowRules) -> Running:
        if self.model.ends:
            yield from super()._run(pending, launch, shape, packed, rules)
            return
        program = self.programs.get("step", shape, False)
        self.state, at, hidden, reports = program(self.params, self.state, packed, *self._arrived())
        self.leaving.append(hidden)
        pending.kept.outcomes.append(_PassedOn(shape, at, reports if pending.kept.recording else {}))
        yield hidden

    def _score(self, pending: Pending, command: Score) -> Running:
        running = super()._score(pending, command)
        if self.model.ends:
            return running

        def run() -> Running:
            for hidden in running:
                self.leaving.append(pending.kept.pop())
                yield hidden

        return run()
