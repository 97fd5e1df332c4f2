"""Parameters of a new mesh from what processes hold of those of the old one; only what nobody holds is read. docs/many-hosts.md."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array

from dsjax.checkpoint.held_weights import (
    Box,
    Extent,
    HeldShard,
    HeldWeights,
    Part,
    Piece,
    inside,
    read_inventory,
)
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import Advance, Fill, aligned_empty, local_shards
from dsjax.checkpoint.wanted_weights import Asked, Peers, Wanted, is_within
from dsjax.model.parameters import ParameterInfo
from sharding.host_memory import memory_of, on_device
from sharding.rules import Rules


def place_held(
    parameters: Mapping[str, ParameterInfo],
    mesh: Mesh,
    rules: Rules,
    names: TensorNames,
    held: HeldWeights,
    peers: Peers | None,
    fill: Fill,
    advance: Advance = lambda _: None,
) -> dict[str, jax.Array]:
    """Make every parameter as ``place`` does, from what is held here, then from what other processes hold, then with ``fill``.

    A shard that has the same parts as a held one is that one. Others are put together layer by layer, and what the old shards have of a
    layer is freed when nobody needs it any more. On accelerators an array is a stack of layers, which is freed as a whole: where a device
    has no room for the new one beside the old one, the old one goes to host memory first. Parameters of which a device will have less
    come first. So nowhere is more than what lay there before or will lie there afterwards, and one layer of one parameter. ``held`` has
    the new shards as well in the end; where this raises, what there is of both.

    Raises:
        MeshError: a dimension that the mesh does not divide, before anything is filled. Others: as ``peers.check`` and ``fill`` do.
    """
    shardings = {path: rules.sharding(mesh, info.logical_axes, info.shape) for path, info in parameters.items()}
    targets = {
        path: [
            _Target(info, region, Extent.of(info, region, names.experts_of(path)), devices)
            for region, devices in local_shards(info, shardings[path]).items()
        ]
        for path, info in parameters.items()
    }
    inventory = held.inventory()
    others = _usable({} if peers is None else peers.inventories(inventory), held.identity)
    wanted = Wanted(held, peers, others)
    work = _Work(held, peers, wanted, fill, advance)
    for path, info in parameters.items():
        work.plan(path, info, targets[path])
    if peers is not None:
        peers.begin(wanted.wants)
    before = _most_values([read_inventory(inventory), *others.values()])
    after = {path: math.prod(shardings[path].shard_shape(info.shape)) for path, info in parameters.items()}
    arrays = {}
    with closing(wanted):
        # The same order in all processes: they wait for each other.
        for path in sorted(parameters, key=lambda path: after[path] > before.get(path, 0)):
            arrays[path] = work.make(path, targets[path])
    for path, sharding in shardings.items():
        if not on_device(sharding):  # put together as the others are, and then moved
            arrays[path] = [array for target in targets[path] for array in target.move(sharding)]
    return {
        path: jax.make_array_from_single_device_arrays(info.shape, shardings[path], arrays[path])
        for path, info in parameters.items()
    }


@dataclass(eq=False)
class _Target:
    """A shard to be made, for these devices. like: the held shard that is the same."""

    info: ParameterInfo
    region: Box
    extent: Extent
    devices: list[jax.Device]
    like: HeldShard | None = None
    shard: HeldShard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    def move(self, sharding: NamedSharding) -> list[Array]:
        """Bring the arrays to the memory that a sharding is of, and let the devices' own go: what is held is then there too."""
        moved = {
            device: jax.device_put(self.shard.arrays[device], memory_of(device, sharding)) for device in self.devices
        }
        jax.block_until_ready(
            list(moved.values())
        )  # the dictionary itself is no pytree: its keys, devices, have no order
        if not isinstance(self.shard.values, np.ndarray):  # else the devices share the host's memory
            self.shard.arrays, self.shard.values = moved, moved[self.devices[0]]
        return list(moved.values())

    @property
    def layer_bytes(self) -> int:
        """Bytes of one of its layers."""
        return self.extent.values_a_layer * self.info.storage_dtype.itemsize

    @property
    def layers(self) -> range:
        """Its layers, of the stack's."""
        return range(self.extent.first_layer, self.extent.first_layer + self.extent.layers)

    def region_of(self, layer: int, slot: int, box: Box) -> tuple[slice, ...]:
        """Where a part lies in the parameter."""
        index = self.extent.index(layer, slot, box)
        return tuple(
            slice(part.start + start, part.stop + start) for part, (start, _) in zip(index, self.region, strict=True)
        )


@dataclass(eq=False)
class _Work:
    """Makes the shards of one process.

    Attributes:
        room: bytes that may lie here twice: those of the largest layer of a parameter that has to be made.
    """

    held: HeldWeights
    peers: Peers | None
    wanted: Wanted
    fill: Fill
    advance: Advance
    room: int = 0

    def plan(self, path: str, info: ParameterInfo, targets: Sequence[_Target]) -> None:
        """Find the shards that there are already, and whom to ask for what is not here."""
        held = self.held.shards(path)
        for target in targets:
            alike = [shard for shard in held if target.extent.is_like(shard.extent) and shard.is_there.all()]
            target.like = max(alike, key=lambda shard: len(shard.arrays.keys() & set(target.devices)), default=None)
        asked: set[Part] = set()
        new = [target for target in targets if target.like is None]
        self.room = max(self.room, sum(target.layer_bytes for target in new))
        for target in new:
            for layer in target.layers:
                for _, part in target.extent.parts(layer):
                    if part not in asked:
                        asked.add(part)
                        self.wanted.plan(path, info, part)

    def make(self, path: str, targets: Sequence[_Target]) -> list[Array]:
        """Make the arrays of a parameter on this process's devices, and free what is left of the old ones."""
        for target in targets:
            if target.like is not None:
                self._keep(path, target)
        rest = [target for target in targets if target.like is None]
        if self.held.is_on_host(targets[0].devices[0]) if targets else True:
            self._make_on_host(path, rest, targets)
        else:
            self._make_on_devices(path, rest, targets)
        return [target.shard.arrays[device] for target in targets for device in target.devices]

    def _keep(self, path: str, target: _Target) -> None:
        """Have a held shard for a target, without a copy where devices share their memory or have it already."""
        old, values = target.like, target.like.values
        arrays = {}
        for device in target.devices:
            array = old.arrays.get(device)
            if array is None:
                array = jax.device_put(values, device, may_alias=True)
                if not self.held.is_on_host(device):
                    self.held.counts.moved += values.nbytes
            arrays[device] = array
        if not self.held.is_on_host(target.devices[0]):
            values = arrays[target.devices[0]]
        self.held.counts.kept += values.nbytes
        self.advance(values.nbytes)
        target.shard = HeldShard(target.extent, values, arrays, np.ones(target.extent.layers, bool))
        self.held.add(path, target.shard)
        self.held.remove(path, old)

    def _make_on_host(self, path: str, targets: Sequence[_Target], all_targets: Sequence[_Target]) -> None:
        for target in targets:
            values = aligned_empty(target.shape, target.info.storage_dtype)
            target.shard = HeldShard(target.extent, values, {}, np.zeros(target.extent.layers, bool))
            self.held.add(path, target.shard)
        keeping, waiting = [target.shard for target in all_targets], deque()
        for layer in self._layers(path, all_targets):
            self._check()
            now = [target for target in targets if layer in target.layers]
            nbytes = sum(target.layer_bytes for target in now)
            while waiting and nbytes + sum(size for _, size in waiting) > self.room:
                self._give_back(path, waiting.popleft()[0], keeping)
            self._make_layer(path, layer, now)
            waiting.append((layer, nbytes))
        for target in targets:
            target.shard.values.flags.writeable = False
            for device in target.devices:
                target.shard.arrays[device] = jax.device_put(target.shard.values, device, may_alias=True)
        for layer, _ in waiting:
            self._give_back(path, layer, keeping)

    def _make_layer(self, path: str, layer: int, targets: Sequence[_Target]) -> None:
        """Fill a layer of new shards in host memory. What is here is copied while other processes give what is not."""
        here: list[tuple[np.ndarray, Piece]] = []
        missing: dict[Part, np.ndarray] = {}
        there: dict[Part, tuple[_Target, int]] = {}
        copies: list[tuple[np.ndarray, Part]] = []
        for target in targets:
            for slot, part in target.extent.parts(layer):
                view = target.shard.values[target.extent.index(layer, slot, part.box)]
                if part in there:  # a second copy on this process
                    copies.append((view, part))
                    continue
                there[part] = target, slot
                pieces, left = self.held.look_up(path, part)
                here += [(view[inside(piece.box, part.box, view.ndim)], piece) for piece in pieces]
                for box in left:
                    missing[Part(layer, part.expert, box)] = view[inside(box, part.box, view.ndim)]
        asked = self.wanted.ask(path, missing)
        for view, piece in here:
            view[...] = piece.shard.read(layer, piece.slot, piece.box)
            self._count("moved", view.nbytes)
        self._read(path, self._receive(missing, asked), there)
        for view, part in copies:
            target, slot = there[part]
            view[...] = target.shard.read(layer, slot, part.box)
            self._count("moved", view.nbytes)
        for target in targets:
            target.shard.is_there[layer - target.extent.first_layer] = True

    def _read(self, path: str, parts: Sequence[Part], there: Mapping[Part, tuple[_Target, int]]) -> None:
        """Fill parts of new shards in host memory from the checkpoint."""
        runs: list[tuple[_Target, int, int, Part]] = []  # neighbouring slots are read together
        for part in parts:
            target, slot = there[next(one for one in there if is_within(part, one))]
            last = runs[-1] if runs else None
            if last and last[0] is target and last[2] == slot and last[3].box == part.box:
                runs[-1] = (target, last[1], slot + 1, part)
            else:
                runs.append((target, slot, slot + 1, part))
        for target, start, stop, part in runs:
            first = target.extent.index(part.layer, start, part.box)
            region = target.region_of(part.layer, start, part.box)
            if target.extent.experts is not None:
                axis = int(target.extent.is_stacked)
                first = (*first[:axis], slice(start, stop), *first[axis + 1 :])
                offset = target.region[axis][0]
                region = (*region[:axis], slice(start + offset, stop + offset), *region[axis + 1 :])
            view = target.shard.values[first]
            self.fill(view, path, region)
            self._count("read", view.nbytes)

    def _receive(self, missing: Mapping[Part, np.ndarray], asked: Sequence[Asked]) -> list[Part]:
        left, nbytes = self.wanted.receive(missing, asked)
        self._count("received", nbytes)
        return left

    def _make_on_devices(self, path: str, targets: Sequence[_Target], all_targets: Sequence[_Target]) -> None:
        """Put shards together on their devices, as a host holds no second copy of them."""
        self._make_room(path, targets, [target.shard for target in all_targets if target.shard is not None])
        for target in targets:
            device = target.devices[0]
            values = _zeros(target.shape, target.info.storage_dtype, device)
            for layer in target.layers:
                self._check()
                values = jax.block_until_ready(self._put_layer(path, target, values, layer))
            arrays = {device: values} | {other: jax.device_put(values, other) for other in target.devices[1:]}
            jax.block_until_ready(list(arrays.values()))
            target.shard = HeldShard(target.extent, values, arrays, np.ones(target.extent.layers, bool))
            self.held.add(path, target.shard)
        keeping = [target.shard for target in all_targets]
        for layer in self._layers(path, all_targets):
            self._give_back(path, layer, keeping)

    def _make_room(self, path: str, targets: Sequence[_Target], keeping: Sequence[HeldShard]) -> None:
        """Move old shards to host memory from devices that cannot have the new ones, and a layer to put together, beside them."""
        needed: dict[jax.Device, int] = {}
        for target in targets:
            for device in target.devices:
                needed[device] = needed.get(device, target.layer_bytes) + target.layer_bytes * target.extent.layers
        free = {device: self.held.free_bytes(device) for device in needed}
        short = {device for device, nbytes in needed.items() if free[device] is not None and free[device] < nbytes}
        for shard in self.held.shards(path):
            if shard not in keeping and not short.isdisjoint(shard.arrays):
                self.held.move_to_host(path, shard)

    def _put_layer(self, path: str, target: _Target, values: Array, layer: int) -> Array:
        extent, device = target.extent, target.devices[0]
        missing: dict[Part, np.ndarray] = {}
        places: dict[Part, list[int]] = {}
        for slot, part in extent.parts(layer):
            pieces, left = self.held.look_up(path, part, device)
            for piece in pieces:
                moved = jax.device_put(piece.shard.read(layer, piece.slot, piece.box), device)
                values = _write(values, moved, _starts(extent.index(layer, slot, piece.box)))
                self._count("moved", moved.nbytes)
            for box in left:
                lacking = Part(layer, part.expert, box)
                places.setdefault(lacking, []).append(slot)
                if lacking not in missing:
                    missing[lacking] = np.empty(extent.piece_shape(box), target.info.storage_dtype)
        for part in self._receive(missing, self.wanted.ask(path, missing)):
            whole = next(one for one in missing if is_within(part, one))
            view = missing[whole][inside(part.box, whole.box, missing[whole].ndim)]
            self.fill(view, path, target.region_of(layer, places[whole][0], part.box))
            self._count("read", view.nbytes)
        for part, buffer in missing.items():
            sent = jax.device_put(buffer, device)
            for slot in places[part]:
                values = _write(values, sent, _starts(extent.index(layer, slot, part.box)))
        return values

    def _layers(self, path: str, targets: Sequence[_Target]) -> list[int]:
        """All layers of a parameter, of the new shards and of the old ones."""
        extents = [target.extent for target in targets] + [shard.extent for shard in self.held.shards(path)]
        return sorted({extent.first_layer + layer for extent in extents for layer in range(extent.layers)})

    def _give_back(self, path: str, layer: int, keeping: Sequence[HeldShard]) -> None:
        if self.peers is not None:
            self.peers.wait_until_taken(path, layer)
        self.held.give_back(path, layer, keeping)

    def _check(self) -> None:
        if self.peers is not None:
            self.peers.check()

    def _count(self, source: str, nbytes: int) -> None:
        setattr(self.held.counts, source, getattr(self.held.counts, source) + nbytes)
        self.advance(nbytes)


def _usable(
    others: Mapping[int, dict[str, Any]], identity: str | None
) -> dict[int, dict[str, list[tuple[str, Extent]]]]:
    """The inventories of processes that hold parts of this checkpoint in this form."""
    return {
        process: read_inventory(inventory)
        for process, inventory in others.items()
        if inventory.get("identity") == identity
    }


def _most_values(inventories: Iterable[Mapping[str, Sequence[tuple[str, Extent]]]]) -> dict[str, int]:
    """Values in the largest shard that a process holds of each parameter."""
    most: dict[str, int] = {}
    for inventory in inventories:
        for path, shards in inventory.items():
            sizes = [extent.values_a_layer * extent.layers for _, extent in shards]
            most[path] = max([most.get(path, 0), *sizes])
    return most


def _starts(index: Sequence[slice]) -> tuple[np.int32, ...]:
    return tuple(np.int32(part.start) for part in index)


@partial(jax.jit, donate_argnums=0)
def _write(values: Array, piece: Array, starts: tuple[np.int32, ...]) -> Array:
    return lax.dynamic_update_slice(values, piece, starts)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))()
