"""``ExpertsOfStages``: the routed experts of all stages, as the balancer sees and moves them: those of one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from dsjax.config import ModelConfig
from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts
from dsjax.engine.contract.executor import Kind
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.experts.expert_part import expert_share
from dsjax.engine.pipeline.stage_executor import PendingStages, StageExecutor

OF_EXPERTS = ReadLoads | StageExperts | PlaceExperts
"""Commands of which each stage carries out what concerns its own layers."""


class ExpertsOfStages:
    """Says what each stage does of a command that reads loads or moves experts, and puts together what came of it.

    The balancer's placement has the layers with experts of all stages, one behind the other. A layer's experts move between the devices of
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
        """Where the experts of all stages are now, and what it takes to move them where that takes longest."""
        each = [mover.slots for mover in self._movers if mover is not None]
        seconds = [one.seconds for one in each]
        return dataclasses.replace(
            each[0],
            physical_to_logical=np.concatenate([one.physical_to_logical for one in each]),
            expert_share=expert_share(self._config),
            seconds=None if None in seconds else tuple(max(of_one) for of_one in zip(*seconds, strict=True)),
        )

    def part(self, number: int, command: Command) -> Command | None:
        """What a stage of this process carries out of a command, whose layers are numbered as the stage's own then; None: nothing."""
        rows = self._rows[number]
        if isinstance(command, ReadLoads):
            return command if rows else None
        if isinstance(command, StageExperts | PlaceExperts):
            return msgspec.structs.replace(command, layer=command.layer - rows.start) if command.layer in rows else None
        return command

    def collect(self, pending: PendingStages) -> LoadWindow | Exchanged | None:
        """What came of a command of ``OF_EXPERTS`` at all stages."""
        own = [(stage, part) for stage, part in zip(self._stages, pending.parts, strict=True) if part is not None]
        found = [stage.collect(part) for stage, part in own]
        if found and isinstance(found[0], LoadWindow):
            return LoadWindow(*(np.concatenate(each) for each in zip(*found, strict=True)))
        return next(iter(found), None)  # the exchange at the one stage that has the layer
