"""``PipelineExecutor``: the stages of one process as one executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dsjax.engine.contract.commands import Command, Step
from dsjax.engine.contract.executor import ExecutorCounts, ExecutorLimits, ExpertCounts, Kind, Progress
from dsjax.engine.device.access import Pending
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.pipeline.stage_executor import StageExecutor
from dsjax.model.step import ModelStep


class PendingStages:
    """A command that was launched. parts: of it at each stage, as far as they have begun."""

    def __init__(self, command: Command):
        self.command = command
        self.parts: list[Pending] = []


class PipelineExecutor:
    """Has every command carried out by all stages, and takes hidden states from each to the next.

    On accelerators a command is enqueued at all stages at once, so that a step can be at one stage while the next step is at the one
    before. On emulated devices programs in flight together can deadlock: there a command begins when it is waited for, and goes from
    stage to stage.

    Args:
        stages: the first to the last.
    """

    def __init__(self, stages: Sequence[StageExecutor]):
        self.stages = list(stages)
        self._emulated = self.model.mesh.devices.flat[0].platform == "cpu"
        self.max_in_flight = 1 if self._emulated else len(self.stages)
        self._queue: deque[PendingStages] = deque()

    @property
    def model(self) -> ModelStep:
        """The step of the last stage, which makes the tokens."""
        return self.stages[-1].model

    @property
    def limits(self) -> ExecutorLimits:
        """Which shapes there is room for; the same at all stages."""
        return self.stages[-1].limits

    @property
    def buckets(self) -> Buckets:
        """The shapes of launches, the same at all stages."""
        return self.stages[-1].buckets

    @buckets.setter
    def buckets(self, buckets: Buckets) -> None:
        for stage in self.stages:
            stage.buckets = buckets

    def extension(self, kind: type[Kind]) -> Kind | None:
        """None: stages have no optional parts."""
        return None

    def launch(self, command: Command) -> PendingStages:
        """Enqueue a command at all stages, or keep it until it is waited for."""
        pending = PendingStages(command)
        if self._emulated:
            self._queue.append(pending)
        else:
            self._run(pending)
        return pending

    def wait(self, pending: PendingStages) -> None:
        """Wait until a command is done at all stages."""
        while len(pending.parts) < len(self.stages):
            self._run(self._queue[0])
            self._queue.popleft()
        for stage, part in zip(self.stages, pending.parts, strict=True):
            stage.wait(part)

    def collect(self, pending: PendingStages) -> Any:
        """Wait for a command, and give what came of it; of a step, tell all stages."""
        self.wait(pending)
        last, part = self.stages[-1], pending.parts[-1]
        results = last.collect(part)
        if isinstance(pending.command, Step):
            made = last.made(part)
            for stage, own in zip(self.stages[:-1], pending.parts[:-1], strict=True):
                stage.enter(own, results, made)
        return results

    def _run(self, pending: PendingStages) -> None:
        for number, stage in enumerate(self.stages):
            part = stage.launch(pending.command)
            if self._emulated:
                stage.wait(part)
            if number + 1 < len(self.stages):
                self._hand_on(stage, self.stages[number + 1])
            pending.parts.append(part)

    def _hand_on(self, stage: StageExecutor, following: StageExecutor) -> None:
        """Take the hidden states that have left a stage to the devices of the next one."""
        while stage.leaving:
            hidden = jax.device_put(stage.leaving.popleft(), following.programs.rows)
            following.arriving.append(jax.block_until_ready(hidden) if self._emulated else hidden)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program of every stage."""
        counts = [stage.programs.count(stage.buckets) for stage in self.stages]
        for number, stage in enumerate(self.stages):
            before = sum(counts[:number])
            report = progress and (lambda done, _, label, before=before: progress(before + done, sum(counts), label))
            stage.warm_up(report)

    def counts(self) -> ExecutorCounts:
        """What the last step did, and what happened since the start."""
        each = [stage.counts() for stage in self.stages]
        late = sum(one.compilations_after_warm_up for one in each)
        return ExecutorCounts(each[-1].num_padding_tokens, late, _together([one.experts for one in each]))

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""
        return self.stages[-1].recording

    def set_recording(self, on: bool) -> None:
        """Whether the experts' load is recorded from the next step on, at all stages."""
        for stage in self.stages:
            stage.set_recording(on)

    def expert_counts(self) -> ExpertCounts | None:
        """What all stages recorded since recording began, layers in order."""
        return _together([stage.expert_counts() for stage in self.stages])

    def shutdown(self) -> None:
        """Give back what all stages hold."""
        for stage in self.stages:
            stage.shutdown()

    def release(self, held: Any = None) -> None:
        """`shutdown`, whatever became of the last step. held: nothing is taken over."""
        for stage in self.stages:
            stage.release()


def _together(stages: Sequence[ExpertCounts | None]) -> ExpertCounts | None:
    """The counts of all stages: layers one behind the other, and so the devices."""
    counts = [one for one in stages if one is not None]
    if not counts:
        return None
    sent = sum(one.dispatch_bytes for one in counts)
    padding = sum(one.padding_share * one.dispatch_bytes for one in counts)
    by_layer = {
        name: np.concatenate([getattr(one, name) for one in counts])
        for name in ("tokens_per_expert", "rows_sent", "logical_load", "physical_to_logical")
    }
    return ExpertCounts(
        rounds=sum(one.rounds for one in counts),
        dispatch_bytes=sent,
        padding_share=padding / sent if sent else 0.0,
        **by_layer,
    )
