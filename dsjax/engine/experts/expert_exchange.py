"""``ExpertExchange``: executor plugin that moves experts: its staging buffer, its programs and the recovery from failures."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsjax.engine.contract.commands import PlaceExperts, StageExperts
from dsjax.engine.device import expert_programs
from dsjax.engine.device.access import DeviceAccess, Pending, Running
from dsjax.engine.device.expert_programs import ExpertLayers, expert_layers, pack_moves, pack_slots
from dsjax.engine.experts.expert_part import ExpertPart, describe_error
from sharding.dispatch.statistics import tokens_per_physical_expert
from sharding.layer_placement import LayerPlacements
from sharding.mesh import hosts_of_experts
from sharding.placement import copy_tables

Reload = Callable[[list[str], LayerPlacements], Mapping[str, Array]]
"""Reloads the parameters with these paths from the checkpoint, for a given expert placement."""

_log = logging.getLogger(__name__)


class _Staged(NamedTuple):
    """Slots of a placement row whose new experts are in the staging buffers."""

    row: int = -1
    slots: frozenset[int] = frozenset()


class ExpertExchange(ExpertPart):
    """Moves the experts of one executor, and updates its parameters and state.

    experts: maximum that a rank sends and receives in one ``StageExperts``. reload: used after a failure that destroyed parameters.
    """

    def __init__(self, device: DeviceAccess, experts: int, reload: Reload):
        super().__init__(device, experts)
        self._step, self._reload = device.model, reload
        self._layers, self._num_ranks = expert_layers(self._step), self._step.expert_ranks
        self.rehearsed_rows = [layers.rows[0] for layers in self._layers]
        self.hosts = hosts_of_experts(self._step.mesh.devices, self._num_ranks)
        self._slots_per_rank = device.placements.n_physical // self._num_ranks
        self._staging, self._staged = self._allocate(), _Staged()

    def physical_load(self, counts: Int[np.ndarray, "L S X"]) -> Int[np.ndarray, "L P"]:
        """Return the tokens of each physical expert, from each device's counts of its own slots."""
        return tokens_per_physical_expert(self._step.spec, counts)

    def _stage(self, pending: Pending, command: StageExperts) -> Running:
        """Send a layer's experts to the staging buffers of their new devices. Sends the inputs before ``run`` begins."""
        layers, index = self._find_layer(command.layer)
        moves = np.frombuffer(command.moves, "<i4").reshape(-1, 2).tolist()
        packed = pack_moves(moves, ranks=self._num_ranks, per_rank=self._slots_per_rank, experts=self._per_exchange)
        inputs = self._device.send_everywhere((packed, np.int32(index)))

        def run() -> Running:
            try:
                program = self._device.programs.get("stage experts", layers.stack)
                self._staging, done = program(layers.of(self._device.params), self._staging, *inputs)
                yield done
            except Exception as error:
                if self._device.programs.shared:
                    raise  # the other processes did not see the error
                pending.error = describe_error(error)
                _log.exception("Experts of MoE layer %d could not be sent; they stay where they are.", command.layer)
                self._staging, self._staged = self._allocate(), _Staged()
                return
            staged_before = self._staged.slots if self._staged.row == command.layer else frozenset()
            self._staged = _Staged(command.layer, staged_before | {slot for _, slot in moves})

        return run()

    def _place(self, pending: Pending, command: PlaceExperts) -> Running:
        """Write a layer's staged experts to their slots, and activate its tables."""
        layers, index = self._find_layer(command.layer)
        slots = np.frombuffer(command.slots, "<i4").tolist()
        placement = np.frombuffer(command.physical_to_logical, "<i4")
        mask = pack_slots(slots, ranks=self._num_ranks, per_rank=self._slots_per_rank)
        tables = copy_tables(placement, self._device.placements.n_logical)
        inputs = self._device.send_everywhere((mask, tables, np.int32(index), np.int32(command.layer)))

        def run() -> Running:
            device, staged = self._device, self._staged
            self._staged = _Staged()
            if slots and (staged.row != command.layer or not staged.slots.issuperset(slots)):
                pending.error = "the experts to place have not been staged"
                return
            try:
                program = device.programs.get("place experts", layers.stack)
                stack, copies, loads, retired, done = program(
                    layers.of(device.params), self._staging, device.state.copies, device.state.loads, *inputs
                )
            except Exception as error:
                if device.programs.shared:
                    raise  # the other processes did not see the error
                pending.error = describe_error(error)
                self._recover(layers, command.layer)
                return
            device.params |= {path: stack[name] for name, path in layers.names.items()}
            device.state = dataclasses.replace(device.state, copies=copies, loads=loads)
            yield from self._activate(command.layer, placement, retired, done=done)

        return run()

    def _recover(self, layers: ExpertLayers, row: int) -> None:
        """Restore the arrays donated to a failed program, from the checkpoint and the current placement."""
        device = self._device
        lost = [path for path in layers.names.values() if device.params[path].is_deleted()]
        _log.exception(
            "Experts of MoE layer %d could not be written; %s",
            row,
            "they are read again from the checkpoint." if lost else "they are as they were.",
        )
        if lost:
            device.params |= self._reload(lost, device.placements)
        state = device.state
        if any(array.is_deleted() for array in (*state.copies, state.loads)):
            shardings = jax.tree.map(lambda array: array.sharding, (state.copies, state.loads))
            fresh = device.placements.tables, np.zeros(state.loads.shape, np.int32)
            copies, loads = jax.device_put(fresh, shardings)
            device.state = dataclasses.replace(state, copies=copies, loads=loads)
            self._retired = []

    def _find_layer(self, row: int) -> tuple[ExpertLayers, int]:
        """Return the parameter stack of a placement row, and the layer's index in the stack."""
        layers = next(layers for layers in self._layers if row in layers.rows)
        return layers, layers.rows.index(row)

    def _allocate(self) -> dict[str, Array]:
        """Return empty staging buffers."""
        buffers = expert_programs.describe_staging(self._step)
        allocate = jax.jit(
            lambda: {name: jnp.zeros(buffer.shape, buffer.dtype) for name, buffer in buffers.items()},
            out_shardings={name: buffer.sharding for name, buffer in buffers.items()},
        )
        return jax.block_until_ready(allocate())
