"""``PipelineExecutor``: one process's pipeline stages as one executor. ``ExpertsOfStages``: the routed experts of all these stages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts, Step
from dsjax.engine.contract.executor import (
    ExecutorCounts,
    ExpertCounts,
    Kind,
    Offering,
    Progress,
    RankResults,
)
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.experts.expert_part import expert_share
from dsjax.engine.pipeline.stage_executor import LastStageOutput, PendingStages, StageExecutor

OF_EXPERTS = ReadLoads | StageExperts | PlaceExperts
"""Commands on experts, of which each stage carries out the part for its own layers."""


class PipelineExecutor:
    """Carries out every command on all stages, and passes hidden states from each stage to the next.

    On accelerators a command is enqueued on all stages at once, so that stages work on different steps. On emulated devices, where programs
    in flight together can deadlock, a command passes the stages when a caller waits for it; a command without a waiter passes them when
    all earlier commands are done. There an interrupt (Ctrl-C) pauses a command, which continues later. After an error, or an interrupt on
    accelerators, stages may have begun different commands, so the executor refuses further commands.

    Args:
        stages: from first to last.
        experts: moves experts by load (`--enable-eplb`); None: experts stay.
        joined: interfaces that parts of the stages' executors offer together.

    model: the step of the last stage, which makes the tokens. limits: the same for all stages.
    """

    def __init__(
        self, stages: Sequence[StageExecutor], experts: ExpertsOfStages | None = None, joined: Sequence[Offering] = ()
    ):
        self.stages, self._experts = list(stages), experts
        self.model, self.limits = stages[-1].model, stages[-1].limits
        self._joined = [*joined] if experts is None else [experts, *joined]
        self._emulated = self.model.mesh.devices.flat[0].platform == "cpu"
        self.max_in_flight = 1 if self._emulated else self.model.stage.count
        self._queue: deque[PendingStages] = deque()
        self._broken: str | None = None

    @property
    def buckets(self) -> Buckets:
        """The launch shapes, which are the same for all stages."""
        return self.stages[-1].buckets

    @buckets.setter
    def buckets(self, buckets: Buckets) -> None:
        for stage in self.stages:
            stage.buckets = buckets

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return the interface of this type that all stages offer together, or None. Interfaces of single stages do not count."""
        return next((offered for part in self._joined if (offered := part.extension(kind)) is not None), None)

    def launch(self, command: Command) -> PendingStages:
        """Enqueue a command on all stages; on emulated devices queue it.

        Raises:
            RuntimeError: an earlier command did not reach all stages.
        """
        self._check_whole()
        pending = PendingStages(command)
        if self._emulated:
            self._queue.append(pending)
            self._advance()
        else:
            with self._breaks_at(BaseException):
                self._run(pending)
        return pending

    def wait(self, pending: PendingStages) -> None:
        """Wait until a command is done on all stages, and carry out the queued commands after it that have no waiter."""
        while pending.passed < len(self.stages):
            self._check_whole()
            self._finish_first()
        self._advance()
        for stage, part in zip(self.stages, pending.parts, strict=True):
            if part is not None:
                stage.wait(part)

    def collect(self, pending: PendingStages) -> Any:
        """Wait for a command and return its results; pass a step's results to all stages."""
        self.wait(pending)
        last, part = self.stages[-1], pending.parts[-1]
        if pending.results is None:  # already set if an interrupt followed
            if isinstance(pending.command, OF_EXPERTS):
                pending.results = self._experts.collect(pending)
            else:
                pending.results = last.collect(part)
        if isinstance(pending.command, Step):
            self._tell(len(self.stages) - 1, pending, pending.results, last.outputs(part))
        return pending.results

    def _advance(self) -> None:
        """Carry out queued commands up to the first one with a waiter."""
        while self._queue and self._broken is None:
            head = self._queue[0]
            if head.passed < len(self.stages) and any(stage.awaits(head.command) for stage in self.stages):
                return
            self._finish_first()

    def _finish_first(self) -> None:
        """Carry out the first command of the queue."""
        with self._breaks_at(Exception):
            self._run(self._queue[0])
        self._queue.popleft()

    def _run(self, pending: PendingStages) -> None:
        """Pass a command through the stages that it has not passed. An interrupt can come between any two lines."""
        while pending.passed < len(self.stages):
            number = pending.passed
            stage = self.stages[number]
            if len(pending.parts) == number:
                if number:
                    stage.arriving = deque(pending.hidden)
                if self._emulated:
                    stage.forget()
                part = pending.command if self._experts is None else self._experts.part(number, pending.command)
                pending.parts.append(None if part is None else stage.launch(part))
                pending.hidden = []
            if self._emulated and pending.parts[number] is not None:
                stage.wait(pending.parts[number])
            if number + 1 < len(self.stages):
                rows = self.stages[number + 1].programs.rows
                hidden = [jax.device_put(array, rows) for array in stage.leaving]
                pending.hidden = jax.block_until_ready(hidden) if self._emulated else hidden
            pending.passed = number + 1
            if number + 1 < len(self.stages):
                stage.leaving.clear()

    def _tell(
        self, number: int, pending: PendingStages, results: Sequence[RankResults], outputs: Sequence[LastStageOutput]
    ) -> None:
        """Pass a step's results to the first `number` stages, to each once."""
        while pending.told < number:
            self.stages[pending.told].enter(pending.parts[pending.told], results, outputs)
            pending.told += 1

    @contextlib.contextmanager
    def _breaks_at(self, kind: type[BaseException]) -> Iterator[None]:
        """Refuse further commands after an exception of this kind."""
        try:
            yield
        except kind as error:
            self._broken = self._broken or f"{type(error).__name__} {error}".rstrip()
            raise

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"a command did not reach all stages ({self._broken}), so that they have gone apart; nothing is computed here any more: "
                "start the engine anew"
            )

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> None:
        """Compile every program of every stage."""
        counts = [len(stage.programs.labels(stage.buckets)) for stage in self.stages]
        for number, stage in enumerate(self.stages):
            before = sum(counts[:number])
            report = progress and (lambda done, _, label, before=before: progress(before + done, sum(counts), label))
            stage.warm_up(report)

    def counts(self) -> ExecutorCounts:
        """Return the counts of the last step and since the start."""
        each = [stage.counts() for stage in self.stages]
        late = sum(one.compilations_after_warm_up for one in each)
        return ExecutorCounts(each[-1].num_padding_tokens, late, counts_of_all([one.experts for one in each]))

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""
        return self.stages[-1].recording

    def set_recording(self, on: bool) -> None:
        """Switch the recording of experts' loads on or off, from the next step on, on all stages."""
        for stage in self.stages:
            stage.set_recording(on)

    def expert_counts(self) -> ExpertCounts | None:
        """Return the recorded counts of all stages, layers in order."""
        return counts_of_all([stage.expert_counts() for stage in self.stages])

    def shutdown(self, held: Any = None) -> None:
        """Release all stages. held: unused, because no later executor takes anything over."""
        for stage in self.stages:
            stage.shutdown()


def counts_of_all(stages: Sequence[ExpertCounts | None]) -> ExpertCounts | None:
    """Join the counts of several stages along layers and devices; None if no stage has any."""
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


class ExpertsOfStages:
    """Splits commands that read loads or move experts among the stages of this process, and joins the results.

    The balancer's placement has the MoE layers of all stages, one stage after the other. A layer's experts move between the devices of
    its stage, by the `ExpertExchange` of that stage's executor. config: of the whole model.
    """

    def __init__(self, stages: Sequence[StageExecutor], config: ModelConfig):
        self._stages, self._config = list(stages), config
        self._movers = [stage.extension(ExpertMover) for stage in stages]
        firsts = [stage.model.stage.first_row(config) for stage in stages]
        layers = [0 if mover is None else len(mover.slots.physical_to_logical) for mover in self._movers]
        self._rows = [range(first, first + number) for first, number in zip(firsts, layers, strict=True)]

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Offer the experts of all stages to the balancer."""
        return self if kind is ExpertMover else None

    @property
    def slots(self) -> ExpertSlots:
        """The placement of experts on all stages, and the seconds that moves take on the slowest stage."""
        each = [mover.slots for mover in self._movers if mover is not None]
        seconds = [one.seconds for one in each]
        return dataclasses.replace(
            each[0],
            physical_to_logical=np.concatenate([one.physical_to_logical for one in each]),
            expert_share=expert_share(self._config),
            seconds=None if None in seconds else tuple(max(of_one) for of_one in zip(*seconds, strict=True)),
        )

    def part(self, number: int, command: Command) -> Command | None:
        """Return a stage's part of a command, its layer numbered within that stage; None if it has no part."""
        rows = self._rows[number]
        if isinstance(command, ReadLoads):
            return command if rows else None
        if isinstance(command, StageExperts | PlaceExperts):
            return msgspec.structs.replace(command, layer=command.layer - rows.start) if command.layer in rows else None
        return command

    def collect(self, pending: PendingStages) -> LoadWindow | Exchanged | None:
        """Join the results of a command of ``OF_EXPERTS`` from all stages."""
        own = [(stage, part) for stage, part in zip(self._stages, pending.parts, strict=True) if part is not None]
        found = [stage.collect(part) for stage, part in own]
        if found and isinstance(found[0], LoadWindow):
            return LoadWindow(*(np.concatenate(each) for each in zip(*found, strict=True)))
        return next(iter(found), None)  # the exchange at the one stage that has the layer
