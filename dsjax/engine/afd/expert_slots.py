"""``SlotWriter``: moves experts between the physical slots of the expert devices of one process, one at a time and without a collective.

A layer changes in two steps, as on one mesh (``docs/balancing.md``): ``stage`` copies experts to their next devices, from slots here or
from the checkpoint; ``place`` writes them into their slots, and reads from the checkpoint what was not staged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dsjax.engine.afd.expert_side import ExpertSide
from dsjax.engine.device.expert_programs import MODULES
from dsjax.model.expert_dispatch import EXPERTS
from dsjax.model.parameters import ParameterInfo

Expert = dict[str, Array | np.ndarray]
"""The parameters of one expert by their paths, without the axes of layers and experts."""
ReadExpert = Callable[[str, int, int], np.ndarray]
"""``(path, layer in its stack, logical expert)``: from the checkpoint; see ``ExpertReader``."""

NOBODY = -1
"""In the place of a logical expert: the slot has no whole one."""


class StackRow(NamedTuple):
    """The layer of a row of the placement: its stack, and its number there."""

    stack: str
    layer: int


def stack_rows(infos: Mapping[str, ParameterInfo]) -> list[StackRow]:
    """Layers of a placement's rows: the model's, then the MTP module's. infos: of the experts' parameters."""
    layers = {path.split(EXPERTS)[0]: info.shape[0] for path, info in infos.items()}
    behind = sorted(layers, key=lambda stack: stack == MODULES)
    return [StackRow(stack, layer) for stack in behind for layer in range(layers[stack])]


class SlotWriter:
    """The slots of an ``ExpertSide``, whose parameters it changes.

    rows: ``physical_to_logical``; ``NOBODY`` where writing has failed. lock: for reading and writing, by callers of ``place`` and ``adopt``
    too.
    """

    def __init__(self, side: ExpertSide, rows: np.ndarray, read: ReadExpert):
        self.side, self.rows, self._read = side, np.array(rows, np.int32), read
        self.lock = threading.RLock()
        self._reading = threading.Lock()  # as ``stage`` reads without the other one
        self.stack_rows = stack_rows(side.infos)
        self._staged: dict[tuple[int, int], tuple[int, Expert]] = {}  # by row and slot: an expert, and its parameters
        self.own = side.slots
        self._per_device = len(self.own) // side.local.ep_size
        self._take = jax.jit(_take)
        self._write = jax.jit(_write, donate_argnums=0)

    def take(self, row: int, slot: int) -> Expert:
        """Copy the expert out of a slot that these devices hold."""
        stack, layer = self.stack_rows[row]
        device, place = divmod(slot - self.own.start, self._per_device)
        return {
            path: self._take(self._shard(path, device), np.int32(layer), np.int32(place)) for path in self.paths(stack)
        }

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Bring experts of a layer to their next devices: pairs (slot that has it, slot that gets it), of all processes."""
        wanted = [(source, target) for source, target in moves if target in self.own]
        with self.lock:  # which experts these are must be the same for all that follows
            labels = {source: int(self.rows[row, source]) for source, _ in wanted}
            values = {source: self.take(row, source) for source in labels if source in self.own}
        values |= {source: self._from_checkpoint(row, labels[source]) for source in labels.keys() - values.keys()}
        copied = {}
        for source, target in wanted:
            device = self._device((target - self.own.start) // self._per_device)
            copied[row, target] = labels[source], jax.block_until_ready(jax.device_put(values[source], device))
        with self.lock:
            if any(other != row for other, _ in self._staged):
                self._staged.clear()  # of a change that was given up
            self._staged |= copied

    def place(self, row: int, experts: np.ndarray) -> None:
        """Have the slots of a layer hold these logical experts; a `ValueError` where they are of another number of slots."""
        if experts.shape != self.rows[row].shape:
            raise ValueError(f"experts for {experts.shape} slots, expected {self.rows[row].shape}")
        stack, layer = self.stack_rows[row]
        mine = [slot for slot in np.flatnonzero(self.rows[row] != experts).tolist() if slot in self.own]
        values = {slot: self._value(row, slot, int(experts[slot])) for slot in mine}
        self._staged.clear()
        try:
            self._put(stack, layer, values)
        except BaseException:
            self.rows[row, mine] = NOBODY  # half written, perhaps
            raise
        self.rows[row] = experts

    def _put(self, stack: str, layer: int, values: Mapping[int, Expert]) -> None:
        """Write experts into their slots."""
        for path in self.paths(stack) if values else ():
            shards = [self._shard(path, device) for device in range(self.side.local.ep_size)]
            for slot, expert in values.items():
                device, place = divmod(slot - self.own.start, self._per_device)
                value = jax.device_put(expert[path], self._device(device))
                shards[device] = self._write(shards[device], value, np.int32(layer), np.int32(place))
            whole = self.side.params[path]
            self.side.params[path] = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)

    def rehearse(self) -> None:
        """Write an expert of each device and stack to its own slot, which compiles the programs and makes the arrays XLA's own."""
        for row, (stack, layer) in enumerate(self.stack_rows):
            if layer == 0:
                slots = range(self.own.start, self.own.stop, self._per_device)
                self._put(stack, layer, {slot: self.take(row, slot) for slot in slots})

    def adopt(self, rows: np.ndarray) -> int:
        """Have all layers hold these logical experts; how many were read from the checkpoint."""
        changed = int((self.rows != rows)[:, self.own].sum())
        self._staged.clear()
        for row, experts in enumerate(rows):
            if (self.rows[row] != experts).any():
                self.place(row, experts)
        return changed

    def paths(self, stack: str) -> list[str]:
        """Paths of a stack's experts, in order."""
        return sorted(path for path in self.side.infos if path.startswith(stack + EXPERTS))

    def _value(self, row: int, slot: int, expert: int) -> Expert:
        staged, value = self._staged.get((row, slot), (NOBODY, {}))
        return value if staged == expert else self._from_checkpoint(row, expert)

    def _from_checkpoint(self, row: int, expert: int) -> Expert:
        stack, layer = self.stack_rows[row]
        with self._reading:
            return {path: self._read(path, layer, expert) for path in self.paths(stack)}

    def _device(self, number: int) -> jax.Device:
        return self.side.mesh.devices.flat[number]

    def _shard(self, path: str, device: int) -> Array:
        wanted = self._device(device)
        return next(shard.data for shard in self.side.params[path].addressable_shards if shard.device == wanted)


def _take(shard: Array, layer: Array, place: Array) -> Array:
    return lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(shard, layer, keepdims=False), place, keepdims=False)


def _write(shard: Array, value: Array, layer: Array, place: Array) -> Array:
    return lax.dynamic_update_slice(shard, value[None, None], (layer, place, *(0,) * (shard.ndim - 2)))
