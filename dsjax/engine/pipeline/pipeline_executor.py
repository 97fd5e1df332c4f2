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

EXPERT_COMMANDS = ReadLoads | StageExperts | PlaceExperts
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
        offerings: interfaces that parts of the stages' executors offer together.

    model: the step of the last stage, which makes the tokens. limits: the same for all stages.
    """

    def __init__(
        self,
        stages: Sequence[StageExecutor],
        experts: ExpertsOfStages | None = None,
        offerings: Sequence[Offering] = (),
    ):
        self.stages, self._experts = list(stages), experts
        self.model, self.limits = stages[-1].model, stages[-1].limits
        self._offerings = [*offerings] if experts is None else [experts, *offerings]
        self._emulated = self.model.mesh.devices.flat[0].platform == "cpu"
        self.max_in_flight = 1 if self._emulated else self.model.stage.count
        self._queue: deque[PendingStages] = deque()
        self._failure: str | None = None

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
        return next((offered for part in self._offerings if (offered := part.extension(kind)) is not None), None)

    def launch(self, command: Command) -> PendingStages:
        """Enqueue a command on all stages; on emulated devices queue it.

        Raises:
            RuntimeError: an earlier command did not reach all stages.
        """
        self._check_not_broken()
        pending = PendingStages(command)
        if self._emulated:
            self._queue.append(pending)
            self._advance()
        else:
            with self._breaking_on(BaseException):
                self._run(pending)
        return pending

    def wait(self, pending: PendingStages) -> None:
        """Wait until a command is done on all stages, and carry out the queued commands after it that have no waiter."""
        while pending.num_stages_done < len(self.stages):
            self._check_not_broken()
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
            if isinstance(pending.command, EXPERT_COMMANDS):
                pending.results = self._experts.collect(pending)
            else:
                pending.results = last.collect(part)
        if isinstance(pending.command, Step):
            self._commit_results(len(self.stages) - 1, pending, pending.results, last.outputs(part))
        return pending.results

    def _advance(self) -> None:
        """Carry out queued commands up to the first one with a waiter."""
        while self._queue and self._failure is None:
            head = self._queue[0]
            if head.num_stages_done < len(self.stages) and any(stage.awaits(head.command) for stage in self.stages):
                return
            self._finish_first()

    def _finish_first(self) -> None:
        """Carry out the first command of the queue."""
        with self._breaking_on(Exception):
            self._run(self._queue[0])
        self._queue.popleft()

    def _run(self, pending: PendingStages) -> None:
        """Run a command on the remaining stages. An interrupt can come between any two lines, and the next call continues there."""
        while pending.num_stages_done < len(self.stages):
            number = pending.num_stages_done
            stage = self.stages[number]
            is_last = number + 1 == len(self.stages)
            if len(pending.parts) == number:
                self._launch_part(number, pending)
            if self._emulated and pending.parts[number] is not None:
                stage.wait(pending.parts[number])
            if not is_last:
                rows = self.stages[number + 1].programs.rows
                hidden = [jax.device_put(array, rows) for array in stage.outgoing]
                pending.hidden = jax.block_until_ready(hidden) if self._emulated else hidden
            pending.num_stages_done = number + 1
            if not is_last:
                stage.outgoing.clear()

    def _launch_part(self, number: int, pending: PendingStages) -> None:
        """Launch a stage's part of a command, with the hidden states of the previous stage."""
        stage, command = self.stages[number], pending.command
        if number:
            stage.incoming = deque(pending.hidden)
        if self._emulated:
            stage.drop_interrupted()
        part = command if self._experts is None else self._experts.part(number, command)
        pending.parts.append(None if part is None else stage.launch(part))
        pending.hidden = []

    def _commit_results(
        self, number: int, pending: PendingStages, results: Sequence[RankResults], outputs: Sequence[LastStageOutput]
    ) -> None:
        """Commit a step's results to the first `number` stages, to each once."""
        while pending.num_stages_committed < number:
            stage, part = self.stages[pending.num_stages_committed], pending.parts[pending.num_stages_committed]
            stage.commit_results(part, results, outputs)
            pending.num_stages_committed += 1

    @contextlib.contextmanager
    def _breaking_on(self, kind: type[BaseException]) -> Iterator[None]:
        """Refuse further commands after an exception of this kind."""
        try:
            yield
        except kind as error:
            self._failure = self._failure or f"{type(error).__name__} {error}".rstrip()
            raise

    def _check_not_broken(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"a command did not reach all stages ({self._failure}), so that they have gone apart; nothing is computed here any more: "
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
        counts = [stage.counts() for stage in self.stages]
        late_compilations = sum(count.compilations_after_warm_up for count in counts)
        experts = joined_counts([count.experts for count in counts])
        return ExecutorCounts(counts[-1].num_padding_tokens, late_compilations, experts)

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
        return joined_counts([stage.expert_counts() for stage in self.stages])

    def shutdown(self, held: Any = None) -> None:
        """Release all stages. held: unused, because no later executor takes anything over."""
        for stage in self.stages:
            stage.shutdown()


def joined_counts(stages: Sequence[ExpertCounts | None]) -> ExpertCounts | None:
    """Join the counts of several stages along layers and devices; None if no stage has any."""
    counts = [stage for stage in stages if stage is not None]
    if not counts:
        return None
    dispatch_bytes = sum(stage.dispatch_bytes for stage in counts)
    padding_bytes = sum(stage.padding_share * stage.dispatch_bytes for stage in counts)
    return ExpertCounts(
        tokens_per_expert=np.concatenate([stage.tokens_per_expert for stage in counts]),
        rows_sent=np.concatenate([stage.rows_sent for stage in counts]),
        logical_load=np.concatenate([stage.logical_load for stage in counts]),
        physical_to_logical=np.concatenate([stage.physical_to_logical for stage in counts]),
        rounds=sum(stage.rounds for stage in counts),
        dispatch_bytes=dispatch_bytes,
        padding_share=padding_bytes / dispatch_bytes if dispatch_bytes else 0.0,
    )


class ExpertsOfStages:
    """Splits commands that read loads or move experts among the stages of this process, and joins the results.

    The balancer's placement has the MoE layers of all stages, one stage after the other. A layer's experts move between the devices of
    its stage, by the `ExpertExchange` of that stage's executor. config: of the whole model.
    """

    def __init__(self, stages: Sequence[StageExecutor], config: ModelConfig):
        self._stages, self._config = list(stages), config
        self._movers = [stage.extension(ExpertMover) for stage in stages]
        self._rows = [_placement_rows(stage, mover, config) for stage, mover in zip(stages, self._movers, strict=True)]

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Offer the experts of all stages to the balancer."""
        return self if kind is ExpertMover else None

    @property
    def slots(self) -> ExpertSlots:
        """The placement of experts on all stages, and the seconds that moves take on the slowest stage."""
        by_stage = [mover.slots for mover in self._movers if mover is not None]
        seconds = [slots.seconds for slots in by_stage]
        return dataclasses.replace(
            by_stage[0],
            physical_to_logical=np.concatenate([slots.physical_to_logical for slots in by_stage]),
            expert_share=expert_share(self._config),
            seconds=None if None in seconds else tuple(map(max, zip(*seconds, strict=True))),
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
        """Join the results of one of the ``EXPERT_COMMANDS`` from all stages."""
        parts = zip(self._stages, pending.parts, strict=True)
        results = [stage.collect(part) for stage, part in parts if part is not None]
        if results and isinstance(results[0], LoadWindow):
            return LoadWindow(*map(np.concatenate, zip(*results, strict=True)))
        return results[0] if results else None  # the exchange at the one stage that has the layer


def _placement_rows(stage: StageExecutor, mover: ExpertMover | None, config: ModelConfig) -> range:
    """Return the rows of the model's expert placement that are a stage's MoE layers."""
    first = stage.model.stage.first_row(config)
    return range(first, first + (0 if mover is None else len(mover.slots.physical_to_logical)))
