"""Build a new mesh's parameters from the old mesh's shards in this process, and read the rest. See docs/many-hosts.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from dsjax.checkpoint.extent import Box, Extent, Index
from dsjax.checkpoint.held_weights import HeldShard, HeldWeights
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import Advance, Fill, aligned_empty, local_shards
from dsjax.model.parameters import ParameterInfo
from sharding.host_memory import memory_of
from sharding.rules import Rules


def place_held(
    parameters: Mapping[str, ParameterInfo],
    mesh: Mesh,
    rules: Rules,
    names: TensorNames,
    held: HeldWeights,
    fill: Fill,
    advance: Advance = lambda _: None,
) -> dict[str, jax.Array]:
    """Make every parameter as ``place`` does, from the shards that this process holds; ``fill`` reads the rest.

    A shard that a device already has stays. Other shards are made layer by layer. In host memory, a layer of the old shards is freed as
    soon as it is complete in the new ones. An accelerator frees an array, a stack of layers, only as a whole: if there is no room for the
    old and the new array, the old one moves to host memory first. Parameters whose shards do not grow come first. Peak memory is therefore
    the larger of before and after the change, plus one layer of one parameter.

    Afterwards ``held`` has the new shards; after an exception, the old and the new shards, with the layers that each still or already has.

    Raises:
        MeshError: the mesh does not divide a dimension; raised before anything is filled. Errors of ``fill`` and ``advance`` propagate.
    """
    shardings = {path: rules.sharding(mesh, info.logical_axes, info.shape) for path, info in parameters.items()}

    def grows(path: str) -> bool:
        old_size = max((shard.values.size for shard in held.shards(path)), default=0)
        return math.prod(shardings[path].shard_shape(parameters[path].shape)) > old_size

    maker = _ShardMaker(held, fill, advance)
    arrays = {}
    for path in sorted(parameters, key=grows):  # False comes first
        info = parameters[path]
        targets = [
            _Target(info, shardings[path], region, Extent.of(info, region, names.experts_of(path)), devices)
            for region, devices in local_shards(info, shardings[path]).items()
        ]
        arrays[path] = maker.make(path, targets)
    return {
        path: jax.make_array_from_single_device_arrays(info.shape, shardings[path], arrays[path])
        for path, info in parameters.items()
    }


@dataclass(eq=False)
class _Target:
    """A new shard, and the devices that it is for."""

    info: ParameterInfo
    sharding: NamedSharding
    region: Box
    extent: Extent
    devices: list[jax.Device]
    shard: HeldShard | None = None  # None until it is made

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @property
    def layer_bytes(self) -> int:
        return self.extent.layer_size * self.info.storage_dtype.itemsize

    def put(self, values: np.ndarray | Array, device: jax.Device) -> Array:
        """Put the shard's values on a device, or in its host's memory if the sharding says so."""
        return jax.device_put(values, memory_of(device, self.sharding), may_alias=True)


@dataclass(frozen=True, eq=False)
class _ShardMaker:
    """Makes this process's shards, one parameter after another."""

    held: HeldWeights
    fill: Fill
    advance: Advance

    def make(self, path: str, targets: Sequence[_Target]) -> list[Array]:
        """Make the arrays of a parameter on this process's devices, and free the old ones."""
        old = self.held.shards(path)
        for target in targets:
            same = [shard for shard in old if target.extent.is_like(shard.extent) and shard.is_there.all()]
            if same:  # keep the one that most of the devices have already
                self._keep(path, target, max(same, key=lambda shard: len(shard.arrays.keys() & set(target.devices))))
        if self.held.is_on_host(targets[0].devices[0]):
            self._make_on_host(path, targets)
        else:
            self._make_on_devices(path, targets)
        for shard in old:
            self.held.remove(path, shard)
        return [target.shard.arrays[device] for target in targets for device in target.devices]

    def _keep(self, path: str, target: _Target, old: HeldShard) -> None:
        """Use a held shard for a target, without a copy if a device already has the shard or shares its memory."""
        on_host = self.held.is_on_host(target.devices[0])
        arrays = {}
        for device in target.devices:
            arrays[device] = old.arrays.get(device)
            if arrays[device] is None:
                arrays[device] = target.put(old.values, device)
                if not on_host:
                    self.held.counts.moved += old.values.nbytes
        values = old.values if on_host else arrays[target.devices[0]]
        target.shard = HeldShard(target.extent, values, arrays, old.is_there)
        self.held.add(path, target.shard)
        self.held.remove(path, old)
        self.held.counts.kept += values.nbytes
        self.advance(values.nbytes)

    def _make_on_host(self, path: str, targets: Sequence[_Target]) -> None:
        """Make shards in host memory, which the devices share, and free the old shards layer by layer."""
        new = [target for target in targets if target.shard is None]
        for target in new:
            values = aligned_empty(target.shape, target.info.storage_dtype)
            target.shard = HeldShard(target.extent, values, {}, np.zeros(target.extent.num_layers, bool))
            self.held.add(path, target.shard)
        for layer in range(targets[0].extent.num_layers):
            for target in new:
                for index, piece in self._pieces(path, target, layer):
                    if piece is None:  # not held
                        self._read(target.shard.values[index], path, target, index)
                    else:
                        target.shard.values[index] = piece
                target.shard.is_there[layer] = True
                self.advance(target.layer_bytes)
            self.held.give_back(path, layer, [target.shard for target in targets])
        for target in new:
            target.shard.values.flags.writeable = False
            target.shard.arrays = {device: target.put(target.shard.values, device) for device in target.devices}

    def _make_on_devices(self, path: str, targets: Sequence[_Target]) -> None:
        """Make each shard on its first device and copy it to the others: the host may have no room for it."""
        new = [target for target in targets if target.shard is None]
        self._make_room(path, new, [target.shard for target in targets])
        for target in new:
            first, dtype = target.devices[0], target.info.storage_dtype
            values = _zeros(target.shape, dtype, first)
            for layer in range(target.extent.num_layers):
                for index, piece in self._pieces(path, target, layer, first):
                    if piece is None:  # not held
                        piece = np.empty([part.stop - part.start for part in index], dtype)
                        self._read(piece, path, target, index)
                    starts = tuple(np.int32(part.start) for part in index)
                    values = _write(values, jax.device_put(piece, first), starts)
                values = jax.block_until_ready(values)
                self.advance(target.layer_bytes)
            arrays = {device: target.put(values, device) for device in target.devices}
            jax.block_until_ready(list(arrays.values()))
            target.shard = HeldShard(target.extent, arrays[first], arrays, np.ones(target.extent.num_layers, bool))
            self.held.add(path, target.shard)

    def _make_room(self, path: str, new: Sequence[_Target], kept: Sequence[HeldShard | None]) -> None:
        """Move old shards, except the kept ones, to host memory from devices without room for the new shards plus one layer."""
        needed: dict[jax.Device, int] = {}
        for target in new:
            for device in target.devices:
                needed[device] = needed.get(device, 0) + target.layer_bytes * (target.extent.num_layers + 1)
        free = {device: self.held.free_bytes(device) for device in needed}
        short = {device for device, nbytes in needed.items() if free[device] is not None and free[device] < nbytes}
        for shard in self.held.shards(path):
            if shard not in kept and not short.isdisjoint(shard.arrays):
                shard.move_to_host()

    def _pieces(
        self, path: str, target: _Target, layer: int, device: jax.Device | None = None
    ) -> Iterator[tuple[Index, np.ndarray | Array | None]]:
        """Yield the pieces of a layer: the position in the new shard, and the values, or None if this process does not hold them.

        device: the device whose shards are used first.
        """
        extent = target.extent
        missing: dict[Box, list[int]] = {}  # slots by box
        for slot, expert in enumerate(extent.experts_in(layer)):
            pieces, left = self.held.look_up(path, layer, expert, extent.box, device)
            for piece in pieces:
                values = piece.shard.read(layer, piece.slot, piece.box)
                self.held.counts.moved += values.nbytes
                yield extent.index(layer, slot, piece.box), values
            for box in left:
                missing.setdefault(box, []).append(slot)
        for box, slots in sorted(missing.items()):
            # A run of consecutive slots is one piece, which is read faster.
            for run in np.split(np.array(slots), np.flatnonzero(np.diff(slots) != 1) + 1):
                yield extent.index(layer, int(run[0]), box, len(run)), None

    def _read(self, out: np.ndarray, path: str, target: _Target, index: Index) -> None:
        """Read part of a shard from the checkpoint. index: position in the shard."""
        region = zip(index, target.region, strict=True)
        self.fill(out, path, tuple(slice(part.start + first, part.stop + first) for part, (first, _) in region))
        self.held.counts.read += out.nbytes


@partial(jax.jit, donate_argnums=0)
def _write(values: Array, piece: Array, starts: tuple[np.int32, ...]) -> Array:
    return lax.dynamic_update_slice(values, piece, starts)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Array:
    """Allocate zeros on the device. JAX caches the program by shape."""
    with jax.default_device(device):
        return jnp.zeros(shape, dtype)
