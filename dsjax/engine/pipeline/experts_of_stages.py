"""``ExpertsOfStages``: the routed experts of all stages, as the balancer sees and moves them: those of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts
from dsjax.engine.contract.executor import Kind
from dsjax.engine.device.access import Pending
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.experts.expert_part import expert_share
from dsjax.engine.pipeline.pending_stages import PendingStages
from dsjax.engine.pipeline.process_links import Found, ProcessLinks, parts_of, plain
from dsjax.engine.pipeline.stage_executor import StageExecutor

OF_EXPERTS = ReadLoads | StageExperts | PlaceExperts
"""Commands of which each stage carries out what concerns its own layers."""


class ExpertsOfStages:
    """Says what each stage does of a command that reads loads or moves experts, and puts together what came of it.

    The balancer's placement has the layers with experts of all stages, one behind the other. A layer's experts move between the devices
    of its stage, by the `ExpertExchange` of that stage's executor: between two steps there, as on a mesh without stages.

    Args:
        stages: of this process. config: of the whole model.
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
        """Where the experts of all stages are now, and what it takes to move them where that takes longest."""
        return self._together([mover.slots for mover in self._movers if mover is not None])

    def part(self, number: int, command: Command) -> Command | None:
        """What a stage of this process carries out of a command, whose layers are numbered as the stage's own then; None: nothing."""
        rows = self._rows[number]
        if isinstance(command, ReadLoads):
            return command if rows else None
        if isinstance(command, StageExperts | PlaceExperts):
            return msgspec.structs.replace(command, layer=command.layer - rows.start) if command.layer in rows else None
        return command

    def launched(self, pending: PendingStages) -> None:
        """Take notice of a command of ``OF_EXPERTS`` that has begun at the stages here."""

    def collect(self, pending: PendingStages) -> LoadWindow | Exchanged:
        """What came of a command of ``OF_EXPERTS`` at all stages."""
        return self._collect_here(pending)

    def _collect_here(self, pending: PendingStages) -> LoadWindow | Exchanged | None:
        return _joined([stage.collect(part) for stage, part in self._own(pending)])

    def _own(self, pending: PendingStages) -> list[tuple[StageExecutor, Pending]]:
        """The stages here that have a part of a command, each with its part."""
        return [(stage, part) for stage, part in zip(self._stages, pending.parts, strict=True) if part is not None]

    def _together(self, each: Sequence[ExpertSlots]) -> ExpertSlots:
        seconds = [one.seconds for one in each]
        return dataclasses.replace(
            each[0],
            physical_to_logical=np.concatenate([one.physical_to_logical for one in each]),
            expert_share=expert_share(self._config),
            seconds=None if None in seconds else tuple(max(of_one) for of_one in zip(*seconds, strict=True)),
        )


class ExpertsOfProcesses(ExpertsOfStages):
    """Moves the experts of all stages, of which other processes have some.

    Process 0, which has the balancer, hears from all others what came of each command.

    Where experts are everywhere follows from what was placed: it is told at the start, and once more when programs are warm.

    Args:
        links: to the other processes, each of which makes one of these and is told the same commands.
    """

    def __init__(self, stages: Sequence[StageExecutor], config: ModelConfig, links: ProcessLinks):
        super().__init__(stages, config)
        self._links = links
        self._whole: ExpertSlots | None = None
        self.meet()

    @property
    def slots(self) -> ExpertSlots:
        """Where the experts of all processes are; to be asked in process 0."""
        while self._whole is None:
            self._links.hear_found()
        return self._whole

    def meet(self) -> None:
        """Have process 0 know where the experts here are, and what it takes to move them. All processes do so at the same place."""
        own = [mover.slots for mover in self._movers if mover is not None]
        told = plain(self._together(own) if own else None)
        if self._links.leads:
            self._links.expect(lambda: told, self._enter_slots)
        else:
            self._links.tell(lambda: told)

    def launched(self, pending: PendingStages) -> None:
        """Tell process 0 what comes of a command here, or remember that the others will."""
        if self._links.leads:
            self._links.expect(lambda: plain(self._collect_here(pending)), lambda found: self._enter(pending, found))
            return
        own = self._own(pending)
        self._links.tell(lambda: plain(_joined([stage.found(part) for stage, part in own])))

    def collect(self, pending: PendingStages) -> LoadWindow | Exchanged:
        """What came of a command at the stages of all processes; in process 0. Waits for them."""
        while pending.results is None:
            self._links.hear_found()
        return pending.results

    def _enter_slots(self, found: Sequence[Found]) -> None:
        self._whole = self._together(parts_of(ExpertSlots, found))

    def _enter(self, pending: PendingStages, found: Sequence[Found]) -> None:
        command = pending.command
        result = _joined(parts_of(LoadWindow if isinstance(command, ReadLoads) else Exchanged, found))
        if isinstance(command, PlaceExperts) and result.error is None:
            placed = self._whole.physical_to_logical.copy()
            placed[command.layer] = np.frombuffer(command.physical_to_logical, "<i4")
            self._whole = dataclasses.replace(self._whole, physical_to_logical=placed)
        pending.results = result


def _joined(parts: Sequence[LoadWindow | Exchanged]) -> LoadWindow | Exchanged | None:
    """The loads of all layers, or the exchange at the one stage that has the layer; None: nothing of it is here."""
    if parts and isinstance(parts[0], LoadWindow):
        return LoadWindow(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    return next(iter(parts), None)
