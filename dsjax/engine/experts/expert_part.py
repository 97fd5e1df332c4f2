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
from sharding.layer_placement import copy_tables

_log = logging.getLogger(__name__)


class MovableExperts(Protocol):
    """An expert backend whose experts can be moved. row: row of the placement."""

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Send experts to their new devices. moves: pairs (source slot, destination slot)."""

    def place(self, row: int, experts: np.ndarray) -> None:
        """Assign these logical experts to the slots of a layer, on all devices."""


class ExpertPart(DevicePart):
    """Reads the loads of one executor, and requests moves of experts.

    experts: maximum that a device sends and receives in one ``StageExperts``. movable: the backend of disaggregated experts; None: the
    current backend of the programs.

    hosts: see ``ExpertSlots``. rehearsed: placement rows of the layers for which ``rehearse`` runs empty moves.
    """

    hosts: int = 1
    rehearsed: Sequence[int] = (0,)

    def __init__(self, device: DeviceAccess, experts: int, movable: MovableExperts | None = None):
        self._device, self._per_exchange, self._movable = device, experts, movable
        shardings = jax.tree.map(lambda array: array.sharding, (device.state.copies, device.state.loads))
        self._put_tables = jax.jit(put_tables, donate_argnums=(0, 1), out_shardings=(*shardings, None))
        self._retired: list[tuple[int, np.ndarray, Array]] = []  # layer, its old placement, its counts until then
        self._seconds: tuple[float, float] | None = None

    def _stage(self, pending: Pending, command: StageExperts) -> Running:
        """Ask the backend to stage a layer's experts on their new devices."""
        moves = [tuple(pair) for pair in np.frombuffer(command.moves, "<i4").reshape(-1, 2).tolist()]
        try:
            (self._movable or self._device.programs.experts).stage(command.layer, moves)
        except (RuntimeError, ValueError) as error:
            pending.error = f"{type(error).__name__}: {error}"
            _log.exception("Experts of MoE layer %d could not be moved; they stay where they are.", command.layer)
        yield from ()

    def _place(self, _: Pending, command: PlaceExperts) -> Running:
        """Ask the backend to write a layer's experts to their slots, and activate its tables."""
        row = np.frombuffer(command.physical_to_logical, "<i4")
        tables = copy_tables(row, self._device.placements.n_logical)
        sent = self._device.send_everywhere((tables, np.int32(command.layer)))

        def run() -> Running:
            device = self._device
            (self._movable or device.programs.experts).place(command.layer, row)
            copies, loads, retired = self._put_tables(device.state.copies, device.state.loads, *sent)
            device.state = dataclasses.replace(device.state, copies=copies, loads=loads)
            yield from self._put_in_force(command.layer, row, retired, retired)

        return run()

    def physical(self, counts: Int[np.ndarray, "L S X"]) -> Int[np.ndarray, "L P"]:
        """Return the tokens of each physical expert, summed over the devices' counts."""
        return counts.sum(axis=1)

    def register(self, table: CommandTable) -> None:
        """Add the commands that read loads and move experts."""
        table.add(ReadLoads, Handler(self._read, lambda pending: self._window(*pending.kept)))
        table.add(StageExperts, Handler(self._stage, _exchanged))
        table.add(PlaceExperts, Handler(self._place, _exchanged))

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
        for row in self.rehearsed:
            placement = self._device.placements.physical_to_logical[row].astype("<i4").tobytes()
            for _ in range(2):
                seconds = []
                for command in (StageExperts(row, b""), PlaceExperts(row, b"", placement)):
                    began = time.monotonic()
                    run(command)
                    seconds.append(time.monotonic() - began)
                self._seconds = seconds[0], seconds[1]
        if self._device.programs.shared:
            run(ReadLoads())  # compiles the gather of the loads
        self._retired = []

    def _put_in_force(self, row: int, placement: np.ndarray, done: Array, retired: Array) -> Running:
        """Record a layer's new placement, and keep the old row's counts. done: output of the program that changed the devices."""
        device = self._device
        before = device.placements.physical_to_logical[row]
        device.placements = device.placements.with_layer(row, placement)
        yield done
        retired = device.programs.gather(retired)
        self._retired.append((row, before, retired))
        yield retired

    def _read(self, pending: Pending, _: ReadLoads) -> Running:
        """Start reading the loads from the devices, without waiting for them."""
        device = self._device
        counts, loads = device.programs.get("read loads")(device.state.loads)
        device.state = dataclasses.replace(device.state, loads=loads)
        placements, retired, self._retired = device.placements, self._retired, []
        yield counts
        counts = device.programs.gather(counts)
        pending.kept = placements, device.model.expert_ranks, counts, retired
        yield counts

    def _window(self, placements: Any, ranks: int, counts: Array, retired: list) -> LoadWindow:
        """Sum the counts by logical expert and by rank, each under the placement in force when it was counted."""
        physical = self.physical(np.asarray(counts).astype(np.int64))
        logical = placements.logical_load(physical)
        for layer, row, array in retired:
            more = self.physical(np.asarray(array).astype(np.int64)[None])[0]
            logical[layer] += np.bincount(row, more, minlength=logical.shape[1]).astype(np.int64)
            physical[layer] += more
        return LoadWindow(logical, physical.reshape(len(physical), ranks, -1).sum(axis=2))


def expert_share(config: ModelConfig) -> float:
    """Return the routed experts' share of the activated parameters, without the embedding (a look-up takes no time)."""
    counts = parameter_counts(config)
    used = config.num_moe_layers * config.num_experts_per_tok * counts["expert"]
    return used / (counts["active"] - counts["embedding"])


def _exchanged(pending: Pending) -> Exchanged:
    return Exchanged(pending.ended - pending.started, pending.error)
