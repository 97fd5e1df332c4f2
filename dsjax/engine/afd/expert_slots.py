"""``SlotWriter``: moves experts between physical slots of one process's expert devices, one at a time and without a collective.

A layer changes in two steps, as on one mesh (``docs/balancing.md``): ``stage`` copies experts from local slots or from the checkpoint to
their next devices; ``place`` writes them into their slots, and reads experts that were not staged from the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dsjax.config.layers import LayerRun, moe_layers, stacks
from dsjax.engine.afd.expert_side import ExpertSide
from dsjax.engine.device.expert_programs import MODULES
from dsjax.model.expert_dispatch import EXPERTS
from dsjax.model.parameters import ParameterInfo

Expert = dict[str, Array | np.ndarray]
"""Parameters of one expert by path, without the layer and expert axes."""
ReadExpert = Callable[[str, int, int], np.ndarray]
"""``(path, layer in its stack, logical expert)`` → parameter from the checkpoint; see ``ExpertReader``."""

NOBODY = -1
"""In place of a logical expert: the slot has no complete expert."""


class StackRow(NamedTuple):
    """Layer of a placement row: its stack, and its index in the stack."""

    stack: str
    layer: int


def stack_rows(runs: Sequence[LayerRun], infos: Mapping[str, ParameterInfo]) -> list[StackRow]:
    """Return the layers of a placement's rows: the model's in order, then the MTP module's. infos: of the experts' parameters."""
    rows = {
        number: StackRow(kind.stack, layer)
        for kind, numbers in stacks(runs).items()
        for layer, number in enumerate(numbers)
    }
    modules = max((info.shape[0] for path, info in infos.items() if path.startswith(MODULES + EXPERTS)), default=0)
    return [rows[number] for number in moe_layers(runs)] + [StackRow(MODULES, layer) for layer in range(modules)]


class SlotWriter:
    """Writes experts into the slots of an ``ExpertSide``, replacing its parameters.

    runs: the model's layers. rows: ``physical_to_logical``; ``NOBODY`` after a failed write. lock: for reading and writing; callers of
    ``place`` and ``adopt`` also acquire it.
    """

    def __init__(self, side: ExpertSide, runs: Sequence[LayerRun], rows: np.ndarray, read: ReadExpert):
        self.side, self.rows, self._read = side, np.array(rows, np.int32), read
        self.lock = threading.RLock()
        self._reading = threading.Lock()  # because ``stage`` reads without ``lock``
        self.stack_rows = stack_rows(runs, side.infos)
        self._staged: dict[tuple[int, int], tuple[int, Expert]] = {}  # (row, slot) → an expert and its parameters
        self.own = side.slots
        self._per_device = len(self.own) // side.local.ep_size
        self._take = jax.jit(_take)
        self._write = jax.jit(_write, donate_argnums=0)

    def take(self, row: int, slot: int) -> Expert:
        """Return a copy of the expert in a slot of these devices."""
        stack, layer = self.stack_rows[row]
        device, place = divmod(slot - self.own.start, self._per_device)
        return {
            path: self._take(self._shard(path, device), np.int32(layer), np.int32(place)) for path in self.paths(stack)
        }

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy experts of a layer to their next devices. moves: pairs (source slot, target slot) of all processes."""
        wanted = [(source, target) for source, target in moves if target in self.own]
        with self.lock:  # labels and values must be of the same placement
            labels = {source: int(self.rows[row, source]) for source, _ in wanted}
            values = {source: self.take(row, source) for source in labels if source in self.own}
        values |= {source: self._from_checkpoint(row, labels[source]) for source in labels.keys() - values.keys()}
        copied = {}
        for source, target in wanted:
            device = self._device((target - self.own.start) // self._per_device)
            copied[row, target] = labels[source], jax.block_until_ready(jax.device_put(values[source], device))
        with self.lock:
            if any(other != row for other, _ in self._staged):
                self._staged.clear()  # from an abandoned change
            self._staged |= copied

    def place(self, row: int, experts: np.ndarray) -> None:
        """Write these logical experts into a layer's slots. Raise `ValueError` if ``experts`` is for another number of slots."""
        if experts.shape != self.rows[row].shape:
            raise ValueError(f"experts for {experts.shape} slots, expected {self.rows[row].shape}")
        stack, layer = self.stack_rows[row]
        mine = [slot for slot in np.flatnonzero(self.rows[row] != experts).tolist() if slot in self.own]
        values = {slot: self._value(row, slot, int(experts[slot])) for slot in mine}
        self._staged.clear()
        try:
            self._put(stack, layer, values)
        except BaseException:
            self.rows[row, mine] = NOBODY  # possibly half written
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
        """Write one expert per device and stack to its own slot, to compile the programs and make XLA own the arrays."""
        for row, (stack, layer) in enumerate(self.stack_rows):
            if layer == 0:
                slots = range(self.own.start, self.own.stop, self._per_device)
                self._put(stack, layer, {slot: self.take(row, slot) for slot in slots})

    def adopt(self, rows: np.ndarray) -> int:
        """Write these logical experts into the slots of all layers. Return how many were read from the checkpoint."""
        changed = int((self.rows != rows)[:, self.own].sum())
        self._staged.clear()
        for row, experts in enumerate(rows):
            if (self.rows[row] != experts).any():
                self.place(row, experts)
        return changed

    def paths(self, stack: str) -> list[str]:
        """Return the sorted parameter paths of a stack's experts."""
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
