"""``ExpertMoves``: the executor's part that reads experts' loads, and has experts moved where these have devices of their own.

Loads are counted on the attention side, where tokens are routed; of a move it gets nothing but the tables that say where experts are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from dsjax.engine.contract.commands import PlaceExperts, StageExperts
from dsjax.engine.device.access import DeviceAccess, Pending, Running
from dsjax.engine.device.expert_programs import put_tables
from dsjax.engine.experts.expert_part import ExpertPart
from sharding.layer_placement import copy_tables

_log = logging.getLogger(__name__)


class MovableExperts(Protocol):
    """An experts' side whose experts can be moved. row: of the placement."""

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Bring experts to the devices that will have them: pairs (slot that has it, slot that gets it)."""

    def place(self, row: int, experts: np.ndarray) -> None:
        """Have the slots of a layer hold these logical experts, on all devices."""


class ExpertMoves(ExpertPart):
    """Reads the loads of one executor, and has experts moved.

    Args:
        experts: that a device sends and receives in one ``StageExperts``, at most. movable: the experts; None: those of the backend that
            the programs have now.
    """

    def __init__(self, device: DeviceAccess, experts: int, movable: MovableExperts | None = None):
        super().__init__(device, experts)
        self._given = movable
        shardings = jax.tree.map(lambda array: array.sharding, (device.state.copies, device.state.loads))
        self._put_tables = jax.jit(put_tables, donate_argnums=(0, 1), out_shardings=(*shardings, None))

    @property
    def _movable(self) -> MovableExperts:
        return self._given or self._device.programs.experts

    def _stage(self, pending: Pending, command: StageExperts) -> Running:
        """Have a layer's experts brought to where they are staged."""
        moves = [tuple(pair) for pair in np.frombuffer(command.moves, "<i4").reshape(-1, 2).tolist()]

        def run() -> Running:
            try:
                self._movable.stage(command.layer, moves)
            except (RuntimeError, ValueError) as error:
                pending.error = f"{type(error).__name__}: {error}"
                _log.exception("Experts of MoE layer %d could not be moved; they stay where they are.", command.layer)
            yield from ()

        return run()

    def _place(self, _: Pending, command: PlaceExperts) -> Running:
        """Have a layer's experts written to their slots, and put its tables in force."""
        row = np.frombuffer(command.physical_to_logical, "<i4")
        tables = copy_tables(row, self._device.placements.n_logical)
        sent = self._device.send_everywhere((tables, np.int32(command.layer)))

        def run() -> Running:
            device = self._device
            self._movable.place(command.layer, row)
            copies, loads, retired = self._put_tables(device.state.copies, device.state.loads, *sent)
            device.state = dataclasses.replace(device.state, copies=copies, loads=loads)
            yield from self._put_in_force(command.layer, row, retired, retired)

        return run()
