"""``ExpertPart``: executor plugin that reads expert loads and requests moves of experts.

Loads are counted where tokens are routed. With attention–FFN disaggregation, the expert devices move the experts, and the attention side
receives only the placement tables. ``ExpertExchange`` moves experts on the devices of the executor's mesh.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Int

from dsjax.config import ModelConfig
from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.engine.device.expert_programs import expert_bytes, put_tables
from dsjax.engine.experts.eplb import Exchanged, ExpertMover, ExpertSlots, LoadWindow
from dsjax.model.parameter_counts import parameter_counts
from sharding.layer_placement import LayerPlacements
from sharding.placement import copy_tables

_log = logging.getLogger(__name__)


class MovableExperts(Protocol):
    """An expert backend whose experts can be moved. row: row of the placement."""

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Send experts to their new devices. moves: pairs (source slot, destination slot)."""

    def place(self, row: int, experts: np.ndarray) -> None:
        """Assign these logical experts to the slots of a layer, on all devices."""


class ExpertPart(DevicePart):
    """Reads the loads of one executor, and requests moves of experts. A command's layer is a row of the placement.

    experts: maximum that a device sends and receives in one ``StageExperts``. movable: the backend of disaggregated experts; None: the
    current backend of the programs. hosts: see ``ExpertSlots``. rehearsed_rows: the rows for which ``rehearse`` runs empty moves.
    """

    hosts: int = 1
    rehearsed_rows: Sequence[int] = (0,)

    def __init__(self, device: DeviceAccess, experts: int, movable: MovableExperts | None = None):
        self._device, self._per_exchange, self._movable = device, experts, movable
        shardings = jax.tree.map(lambda array: array.sharding, (device.state.copies, device.state.loads))
        self._put_tables = jax.jit(put_tables, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        self._retired: list[tuple[int, np.ndarray, Array]] = []  # a row, its old placement, its counts until then
        self._seconds: tuple[float, float] | None = None  # of staging and of placing nothing

    def _stage(self, pending: Pending, command: StageExperts) -> Running:
        """Ask the backend to stage a layer's experts on their new devices."""
        moves = [tuple(pair) for pair in np.frombuffer(command.moves, "<i4").reshape(-1, 2).tolist()]
        try:
            (self._movable or self._device.programs.experts).stage(command.layer, moves)
        except (RuntimeError, ValueError) as error:
            pending.error = describe_error(error)
            _log.exception("Experts of MoE layer %d could not be moved; they stay where they are.", command.layer)
        yield from ()  # no program to wait for

    def _place(self, _: Pending, command: PlaceExperts) -> Running:
        """Ask the backend to write a layer's experts to their slots, and activate its tables. Sends the inputs before ``run`` begins."""
        placement = np.frombuffer(command.physical_to_logical, "<i4")
        tables = copy_tables(placement, self._device.placements.n_logical)
        inputs = self._device.send_everywhere((tables, np.int32(command.layer)))

        def run() -> Running:
            device = self._device
            (self._movable or device.programs.experts).place(command.layer, placement)
            copies, loads, retired = self._put_tables(device.state.copies, device.state.loads, *inputs)
            device.state = dataclasses.replace(device.state, copies=copies, loads=loads)
            yield from self._activate(command.layer, placement, retired, done=retired)

        return run()

    def physical_load(self, counts: Int[np.ndarray, "L S X"]) -> Int[np.ndarray, "L P"]:
        """Return the tokens of each physical expert, summed over the devices' counts."""
        return counts.sum(axis=1)

    def register(self, table: CommandTable) -> None:
        """Add the commands that read loads and move experts."""
        table.add(ReadLoads, Handler(self._read_loads, lambda pending: self._sum_loads(*pending.kept)))
        table.add(StageExperts, Handler(self._stage, _exchange_result))
        table.add(PlaceExperts, Handler(self._place, _exchange_result))

    def extension(self, kind: type) -> Any:
        """Return this part as the balancer's `ExpertMover`."""
        return self if kind is ExpertMover else None

    @property
    def slots(self) -> ExpertSlots:
        """Current placement of the experts."""
        placements, step = self._device.placements, self._device.model
        return ExpertSlots(
            physical_to_logical=placements.physical_to_logical,
            n_logical=placements.n_logical,
            ranks=step.expert_ranks,
            hosts=self.hosts,
            groups=step.config.n_group,
            expert_share=expert_share(step.config),
            expert_bytes=expert_bytes(step),
            per_exchange=self._per_exchange,
            seconds=self._seconds,
        )

    def rehearse(self, run: Callable[[Command], Any]) -> None:
        """Run an empty move twice and keep the second duration; the first run also copies arrays created from host memory."""
        for row in self.rehearsed_rows:
            placement = self._device.placements.physical_to_logical[row].astype("<i4").tobytes()
            stage, place = StageExperts(row, b""), PlaceExperts(row, b"", placement)
            for _ in range(2):
                began = time.monotonic()
                run(stage)
                staged_at = time.monotonic()
                run(place)
                self._seconds = staged_at - began, time.monotonic() - staged_at
        if self._device.programs.shared:
            run(ReadLoads())  # compiles the gather of the loads
        self._retired = []

    def _activate(self, row: int, placement: np.ndarray, retired: Array, *, done: Array) -> Running:
        """Use a row's new placement. retired: its counts under the old one. done: output of the program that changed the devices."""
        device = self._device
        old_placement = device.placements.physical_to_logical[row]
        device.placements = device.placements.with_layer(row, placement)
        yield done
        retired = device.programs.gather(retired)
        self._retired.append((row, old_placement, retired))
        yield retired

    def _read_loads(self, pending: Pending, _: ReadLoads) -> Running:
        """Start reading the loads from the devices, without waiting for them."""
        device = self._device
        counts, loads = device.programs.get("read loads")(device.state.loads)
        device.state = dataclasses.replace(device.state, loads=loads)
        placements, retired, self._retired = device.placements, self._retired, []
        yield counts
        counts = device.programs.gather(counts)
        pending.kept = placements, device.model.expert_ranks, counts, retired
        yield counts

    def _sum_loads(self, placements: LayerPlacements, ranks: int, counts: Array, retired: list) -> LoadWindow:
        """Sum the counts by logical expert and by rank, each under the placement in force when it was counted."""
        physical = self.physical_load(np.asarray(counts).astype(np.int64))
        logical = placements.logical_load(physical)
        for row, placement, row_counts in retired:
            load = self.physical_load(np.asarray(row_counts).astype(np.int64)[None])[0]
            logical[row] += np.bincount(placement, load, minlength=logical.shape[1]).astype(np.int64)
            physical[row] += load
        return LoadWindow(logical, physical.reshape(len(physical), ranks, -1).sum(axis=2))


def expert_share(config: ModelConfig) -> float:
    """Return the routed experts' share of the activated parameters, without the embedding (a look-up takes no time)."""
    counts = parameter_counts(config)
    used = config.num_moe_layers * config.num_experts_per_tok * counts["expert"]
    return used / (counts["active"] - counts["embedding"])


def describe_error(error: Exception) -> str:
    """Return the text of an error for ``Exchanged.error``."""
    return f"{type(error).__name__}: {error}"


def _exchange_result(pending: Pending) -> Exchanged:
    return Exchanged(pending.ended - pending.started, pending.error)
