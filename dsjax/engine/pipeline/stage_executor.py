"""``StageExecutor``: carries out an engine's commands for the layers of one stage."""

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
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.device.programs import entering
from dsjax.engine.device.slots import LaunchShape


class PendingStages:
    """A command on its way through the stages of one process.

    Attributes:
        parts: its part at each stage that has begun; None where that stage has nothing to do. passed: how many stages it has gone through.
        hidden: hidden states that the last of those stages gave, by launch, on the devices of the next one.
        results: what came of it; from another process as `ProcessLinks.hear` gives it. told: stages that know it.
        number: under which the process with the last stage publishes what came of it; None: it publishes nothing.
    """

    def __init__(self, command: Command):
        self.command = command
        self.parts: list[Pending | None] = []
        self.passed = self.told = 0
        self.hidden: list[Array] = []
        self.results: Any = None
        self.number: int | None = None


class Made(NamedTuple):
    """What the last stage made of a launch, on the host: its outcome, and the drafts behind it, as ``LaunchOutcome`` has them."""

    outcome: np.ndarray
    drafts: np.ndarray | None


class _PassedOn(NamedTuple):
    """A launch that has gone through the layers of a stage before the last. positions: packed, on the devices."""

    shape: LaunchShape
    positions: Array
    reports: Any


class StageExecutor(MeshExecutor):
    """One stage's part of every command.

    The hidden states of its launches are in ``leaving`` when it has computed them, and those of the stage before must be in ``arriving``
    first, in the order of the commands. A stage before the last is told with ``enter`` what came of a step, before the next step with one
    of its requests.

    arriving, leaving: hidden states of launches, on this stage's devices. From another process, `arriving` is whatever has a `popleft`.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self.arriving: deque[Array] = deque()
        self.leaving: deque[Array] = deque()
        super().__init__(*arguments, **options)

    def enter(self, pending: Pending, results: Sequence[RankResults], made: Sequence[Made]) -> None:
        """Enter what came of a step that was launched here: in its order among steps. Of a stage before the last."""
        self._slots.commit(pending.command, results)
        outcomes, [placements], _ = pending.kept
        for passed, one in zip(outcomes, made, strict=True):
            if self._recorder is not None:
                self._recorder.add(passed.reports, passed.shape.groups, placements)
            sent = [self.send(array) for array in one if array is not None]
            program = self.programs.get(*entering(passed.shape, 0 if one.drafts is None else one.drafts.shape[-1]))
            self.state = program(self.state, passed.positions, *sent)
            if self.max_in_flight == 1:
                jax.block_until_ready(self.state.start)

    def forget(self) -> None:
        """Drop what a launch that was interrupted has left behind. All others must have been waited for, and their hidden states taken."""
        self._queue.clear()
        self.leaving.clear()

    def read(self, pending: Pending) -> list[RankResults]:
        """The results of a step of the last stage, in whichever thread; waits for them."""
        return read_step(pending.command, pending.kept.outcomes)

    def made(self, pending: Pending) -> list[Made]:
        """What the last stage made of a collected step's launches, for the others to ``enter``."""
        return [
            Made(np.asarray(one.outcome), None if one.drafts is None else np.asarray(one.drafts))
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
