"""``ExpertMoves``: the executor's part that reads experts' loads, and has experts moved where these have devices of their own.

Loads are counted where tokens are routed, on the attention side. Experts move on the other side alone; of a change the attention side gets
nothing but the tables that say where experts are now.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.experts.expert_exchange import expert_share
from sharding.layer_placement import LayerPlacements, copy_tables

_log = logging.getLogger(__name__)


class MovableExperts(Protocol):
    """An experts' side whose experts can be moved. row: of the placement."""

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Bring experts to the devices that will have them: pairs (slot that has it, slot that gets it)."""

    def place(self, row: int, experts: np.ndarray) -> None:
        """Have the slots of a layer hold these logical experts, on all devices."""


class ExpertMoves(DevicePart):
    """Reads the loads of one executor, and has experts moved.

    Args:
        experts: that a device sends and receives in one ``StageExperts``, at most. movable: the experts; None: those of the backend that
            the programs have now.
    """

    def __init__(self, device: DeviceAccess, experts: int, movable: MovableExperts | None = None):
        self._device, self._given, self._per_exchange = device, movable, experts
        self._retired: list[tuple[int, np.ndarray, Array]] = []  # layer, its old placement, what it had counted
        self._seconds: tuple[float, float] | None = None
        shardings = jax.tree.map(lambda array: array.sharding, (device.state.copies, device.state.loads))
        self._put_tables = jax.jit(_put_tables, donate_argnums=(0, 1), out_shardings=(*shardings, None))

    @property
    def _movable(self) -> MovableExperts:
        return self._given or self._device.programs.experts

    @property
    def _ranks(self) -> int:
        return self._device.model.apart.spec.ep_size

    def register(self, table: CommandTable) -> None:
        """Add the commands that read loads and move experts."""
        table.add(ReadLoads, Handler(self._read, lambda pending: _window(*pending.kept)))
        table.add(StageExperts, Handler(self._stage, _exchanged))
        table.add(PlaceExperts, Handler(self._place, _exchanged))

    def extension(self, kind: type) -> Any:
        """Offer the balancer where experts are."""
        return self if kind is ExpertMover else None

    @property
    def slots(self) -> ExpertSlots:
        """Where experts are now."""
        placements, config = self._device.placements, self._device.model.config
        return ExpertSlots(
            physical_to_logical=placements.physical_to_logical,
            n_logical=placements.n_logical,
            ranks=self._ranks,
            hosts=1,  # rows go from the attention side to each device, and none is nearer than another
            groups=config.n_group,
            expert_share=expert_share(config),
            expert_bytes=self._device.model.apart.expert_bytes,
            per_exchange=self._per_exchange,
            seconds=self._seconds,
        )

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
            before = device.placements.physical_to_logical[command.layer]
            self._movable.place(command.layer, row)
            copies, loads, retired = self._put_tables(device.state.copies, device.state.loads, *sent)
            device.state = dataclasses.replace(device.state, copies=copies, loads=loads)
            device.placements = device.placements.with_layer(command.layer, row)
            yield retired
            retired = device.programs.gather(retired)
            self._retired.append((command.layer, before, retired))
            yield retired

        return run()

    def _read(self, pending: Pending, _: ReadLoads) -> Running:
        """Take the loads off the devices, without waiting for them."""
        device = self._device
        counts, loads = device.programs.read_loads()(device.state.loads)
        device.state = dataclasses.replace(device.state, loads=loads)
        placements, retired, self._retired = device.placements, self._retired, []
        yield counts
        counts = device.programs.gather(counts)
        pending.kept = placements, self._ranks, counts, retired
        yield counts

    def rehearse(self, run: Callable[[Command], Any]) -> None:
        """Have nothing moved, twice, and keep how long the second time took."""
        row = self._device.placements.physical_to_logical[0].astype("<i4").tobytes()
        for _ in range(2):
            seconds = []
            for command in (StageExperts(0, b""), PlaceExperts(0, b"", row)):
                began = time.monotonic()
                run(command)
                seconds.append(time.monotonic() - began)
            self._seconds = seconds[0], seconds[1]
        if self._device.programs.shared:
            run(ReadLoads())  # compiles what gathers the loads
        self._retired = []


def _put_tables(copies: Any, loads: Array, tables: Any, row: Array) -> tuple[Any, Array, Array]:
    """Put a layer's tables in force, and give what its row had counted, which begins anew."""
    copies = jax.tree.map(lambda whole, own: lax.dynamic_update_index_in_dim(whole, own, row, 0), copies, tables)
    retired = lax.dynamic_index_in_dim(loads, row, keepdims=False)
    return copies, lax.dynamic_update_index_in_dim(loads, jnp.zeros_like(retired), row, 0), retired


def _window(placements: LayerPlacements, ranks: int, counts: Array, retired: list) -> LoadWindow:
    """Sum what was counted by logical expert and by device; each count under the placement that it was made with."""
    physical = np.asarray(counts).astype(np.int64).sum(axis=1)
    logical = placements.logical_load(physical)
    for layer, row, array in retired:
        more = np.asarray(array).astype(np.int64).sum(axis=0)
        logical[layer] += np.bincount(row, more, minlength=logical.shape[1]).astype(np.int64)
        physical[layer] += more
    return LoadWindow(logical, physical.reshape(len(physical), ranks, -1).sum(axis=2))


def _exchanged(pending: Pending) -> Exchanged:
    return Exchanged(pending.ended - pending.started, pending.error)
