"""`StagesOfProcess`: the executor of this process's stages when other processes have the other stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsjax.engine.contract.commands import Command, Score, Step
from dsjax.engine.contract.executor import ExecutorCounts, ExpertCounts
from dsjax.engine.pipeline.pipeline_executor import PipelineExecutor, joined_counts
from dsjax.engine.pipeline.process_links import ProcessLinks
from dsjax.engine.pipeline.stage_executor import PendingStages, StageExecutor
from sharding.arrays import put


class StagesOfProcess(PipelineExecutor):
    """Runs every command on this process's stages. Hidden states come from the previous process and go to the next one.

    All processes carry out the same commands in launch order. They enter a step's results once process 0 has collected
    them (`LaunchMessage.collected`), and before the next step of the same requests.
    """

    def __init__(self, stages: Sequence[StageExecutor], links: ProcessLinks):
        super().__init__(stages)
        self._links = links
        self._result_numbers = itertools.count()  # counts the commands that have results from the last stage
        self._expert_counts: ExpertCounts | None = None
        first = self.stages[0]
        if not first.model.is_first_stage:
            first.incoming = links.incoming(lambda hidden: put(hidden, first.programs.rows))

    def launch(self, command: Command) -> PendingStages:
        """Run a command on this process's stages, or enqueue it."""
        self._check_not_broken()
        pending = PendingStages(command)
        with self._breaking_on(BaseException):
            if isinstance(command, Step | Score):
                pending.number = next(self._result_numbers)
            self._run(pending)
            last = self.stages[-1]
            if not self._links.is_last:
                while last.outgoing:
                    self._links.send_hidden(last.outgoing.popleft())
            elif isinstance(command, Step | Score):
                self._links.send_results(lambda: self._read_results(pending))
        return pending

    def wait(self, pending: PendingStages) -> None:
        """Wait until a command is done at this process's stages, and in process 0 until its results are here."""
        super().wait(pending)
        if self._links.is_leader:
            self._receive_results(pending)

    def collect(self, pending: PendingStages) -> Any:
        """Wait for a command and return the last stage's results; pass a step's results to this process's stages."""
        if self._links.is_last:
            return super().collect(pending)
        self.wait(pending)
        self._receive_results(pending)
        if not isinstance(pending.command, Step):
            return pending.results
        results, outputs = pending.results
        self._commit_results(len(self.stages), pending, results, outputs)
        return results

    def _receive_results(self, pending: PendingStages) -> None:
        """Wait for a command's results from another process's last stage, in the order of commands.

        Results are numbered, so results lost to an interrupt before they were stored are received again.
        """
        if pending.results is None and not self._links.is_last and pending.number is not None:
            pending.results = self._links.receive_results(pending.number)

    def counts(self) -> ExecutorCounts:
        """Return this process's counts of the last step and since the start, with the experts' load as last read."""
        return super().counts()._replace(experts=self._expert_counts)

    def set_recording(self, on: bool) -> None:
        """Switch the recording of the experts' load on or off at this process's stages, from the next step on."""
        super().set_recording(on)
        self._expert_counts = None

    def expert_counts(self) -> ExpertCounts | None:
        """Return the recorded counts: of all stages in process 0, of its own stages in others. All processes read at the same point."""
        if not self.recording:
            return None
        self._expert_counts = joined_counts(self._links.gather_counts(super().expert_counts))
        return self._expert_counts

    def shutdown(self, held: Any = None) -> None:
        """Close the connections, and release this process's stages."""
        self._links.close()
        super().shutdown(held)

    def _read_results(self, pending: PendingStages) -> Any:
        """Return the last stage's results of a command. Any thread may call this."""
        last, part = self.stages[-1], pending.parts[-1]
        if isinstance(pending.command, Score):
            logits = np.concatenate([np.asarray(array) for array in part.kept])
            return logits[: len(pending.command.tokens) // 4]
        return last.read_results(part), last.outputs(part)
