"""``SlotWriter``: moves experts between physical slots of one process's expert devices, one at a time and without a collective.

A layer changes in two steps, as on one mesh (``docs/balancing.md``): ``stage`` copies experts from local slots or from the checkpoint to
their next devices; ``place`` writes them into their slots, and reads experts that were not staged from the checkpoint.

A ``row`` is an index into the placement ``physical_to_logical [MoE layers, slots]``, a ``layer`` an index into the arrays of a stack.
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

NO_EXPERT = -1
"""In place of a logical expert: the slot has no complete expert."""


class StackLayer(NamedTuple):
    """A layer's stack, and its index in the stack."""

    stack: str
    layer: int


def stack_layers(runs: Sequence[LayerRun], infos: Mapping[str, ParameterInfo]) -> list[StackLayer]:
    """Return the layer of each placement row: the model's in order, then the MTP module's. infos: of the experts' parameters."""
    layers = {
        number: StackLayer(kind.stack, layer)
        for kind, numbers in stacks(runs).items()
        for layer, number in enumerate(numbers)
    }
    mtp_layers = max((info.shape[0] for path, info in infos.items() if path.startswith(MODULES + EXPERTS)), default=0)
    return [layers[number] for number in moe_layers(runs)] + [StackLayer(MODULES, i) for i in range(mtp_layers)]


class SlotWriter:
    """Writes experts into the slots of an ``ExpertSide``, replacing its parameters.

    runs: the model's layers. placement: logical experts by row and slot; ``NO_EXPERT`` marks a slot whose write failed. own_slots: the
    slots on the side's devices. lock: held to read or write slots; callers of ``place`` and ``place_all`` acquire it themselves.
    """

    def __init__(self, side: ExpertSide, runs: Sequence[LayerRun], placement: np.ndarray, read: ReadExpert):
        self.side = side
        self.placement = np.array(placement, np.int32)
        self.own_slots = side.slots
        self.stack_layers = stack_layers(runs, side.infos)
        self.lock = threading.RLock()
        self._devices = list(side.mesh.devices.flat)
        self._read = read
        self._read_lock = threading.Lock()  # because ``stage`` reads without ``lock``
        self._staged: dict[tuple[int, int], tuple[int, Expert]] = {}  # (row, slot) → logical expert and its parameters
        self._slots_per_device = len(self.own_slots) // side.local.ep_size
        self._take = jax.jit(_take)
        self._write = jax.jit(_write, donate_argnums=0)

    def take(self, row: int, slot: int) -> Expert:
        """Return a copy of the expert in a slot of these devices."""
        stack, layer = self.stack_layers[row]
        device, index = self._locate(slot)
        return {
            path: self._take(self._shard(path, device), np.int32(layer), np.int32(index)) for path in self.paths(stack)
        }

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy experts of a layer to their next devices. moves: pairs (source slot, target slot) of all processes."""
        incoming = [(source, target) for source, target in moves if target in self.own_slots]
        with self.lock:  # experts and values must be of the same placement
            experts = {source: int(self.placement[row, source]) for source, _ in incoming}
            values = {source: self.take(row, source) for source in experts if source in self.own_slots}
        values |= {source: self._read_expert(row, experts[source]) for source in experts.keys() - values.keys()}
        staged = {}
        for source, target in incoming:
            device, _ = self._locate(target)
            value = jax.block_until_ready(jax.device_put(values[source], self._devices[device]))
            staged[row, target] = experts[source], value
        with self.lock:
            if any(other != row for other, _ in self._staged):
                self._staged.clear()  # from an abandoned change
            self._staged |= staged

    def place(self, row: int, experts: np.ndarray) -> None:
        """Write these logical experts into a layer's slots. Raise `ValueError` if ``experts`` is for another number of slots."""
        if experts.shape != self.placement[row].shape:
            raise ValueError(f"experts for {experts.shape} slots, expected {self.placement[row].shape}")
        changed = [slot for slot in np.flatnonzero(self.placement[row] != experts).tolist() if slot in self.own_slots]
        values = {slot: self._staged_or_read(row, slot, int(experts[slot])) for slot in changed}
        self._staged.clear()
        try:
            self._put(row, values)
        except BaseException:
            self.placement[row, changed] = NO_EXPERT  # possibly half written
            raise
        self.placement[row] = experts

    def _put(self, row: int, values: Mapping[int, Expert]) -> None:
        """Write experts into their slots. values: by slot."""
        stack, layer = self.stack_layers[row]
        for path in self.paths(stack) if values else ():
            shards = [self._shard(path, device) for device in range(self.side.local.ep_size)]
            for slot, expert in values.items():
                device, index = self._locate(slot)
                value = jax.device_put(expert[path], self._devices[device])
                shards[device] = self._write(shards[device], value, np.int32(layer), np.int32(index))
            array = self.side.params[path]
            self.side.params[path] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    def rehearse(self) -> None:
        """Write one expert per device and stack to its own slot, to compile the programs and make XLA own the arrays."""
        for row, (_, layer) in enumerate(self.stack_layers):
            if layer == 0:
                self._put(row, {slot: self.take(row, slot) for slot in self.own_slots[:: self._slots_per_device]})

    def place_all(self, placement: np.ndarray) -> int:
        """Write these logical experts into the slots of all layers. Return how many were read from the checkpoint."""
        num_changed = int((self.placement != placement)[:, self.own_slots].sum())
        self._staged.clear()
        for row, experts in enumerate(placement):
            if (self.placement[row] != experts).any():
                self.place(row, experts)
        return num_changed

    def paths(self, stack: str) -> list[str]:
        """Return the sorted parameter paths of a stack's experts."""
        return sorted(path for path in self.side.infos if path.startswith(stack + EXPERTS))

    def _staged_or_read(self, row: int, slot: int, expert: int) -> Expert:
        staged_expert, value = self._staged.get((row, slot), (NO_EXPERT, {}))
        return value if staged_expert == expert else self._read_expert(row, expert)

    def _read_expert(self, row: int, expert: int) -> Expert:
        stack, layer = self.stack_layers[row]
        with self._read_lock:
            return {path: self._read(path, layer, expert) for path in self.paths(stack)}

    def _locate(self, slot: int) -> tuple[int, int]:
        """Return the index of a slot's device, and of the slot on that device."""
        return divmod(slot - self.own_slots.start, self._slots_per_device)

    def _shard(self, path: str, device: int) -> Array:
        shards = self.side.params[path].addressable_shards
        return next(shard.data for shard in shards if shard.device == self._devices[device])


def _take(shard: Array, layer: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(shard, layer, keepdims=False), index, keepdims=False)


def _write(shard: Array, value: Array, layer: Array, index: Array) -> Array:
    return lax.dynamic_update_slice(shard, value[None, None], (layer, index, *(0,) * (shard.ndim - 2)))
