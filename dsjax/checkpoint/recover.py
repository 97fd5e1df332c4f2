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

    A shard that is already in place stays. Other shards are made layer by layer, and each layer of the old shards is freed as soon as the
    new layer is complete. On accelerators, an array is a stack of layers and is freed as a whole: if a device has no room for the old and
    the new array, the old one moves to host memory first. Parameters that shrink come first. Peak memory is therefore the larger of
    before and after the change, plus one layer of one parameter.

    Afterwards ``held`` has the new shards; after an exception, the old and new shards as far as they are complete.

    Raises:
        MeshError: the mesh does not divide a dimension; raised before anything is filled. Errors of ``fill`` and ``advance`` propagate.
    """
    shardings = {path: rules.sharding(mesh, info.logical_axes, info.shape) for path, info in parameters.items()}

    def grows(path: str) -> bool:
        before = max((shard.values.size for shard in held.shards(path)), default=0)
        return math.prod(shardings[path].shard_shape(parameters[path].shape)) > before

    maker = _ShardMaker(held, fill, advance)
    arrays = {}
    for path in sorted(parameters, key=grows):
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
    """A shard to make for a set of devices."""

    info: ParameterInfo
    sharding: NamedSharding
    region: Box
    extent: Extent
    devices: list[jax.Device]
    shard: HeldShard | None = None  # the result

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
            alike = [shard for shard in old if target.extent.is_like(shard.extent) and shard.is_there.all()]
            if alike:
                self._keep(path, target, max(alike, key=lambda shard: len(shard.arrays.keys() & set(target.devices))))
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
        """Make shards in host memory, which the devices share, and free the old memory layer by layer."""
        new = [target for target in targets if target.shard is None]
        for target in new:
            values = aligned_empty(target.shape, target.info.storage_dtype)
            target.shard = HeldShard(target.extent, values, {}, np.zeros(target.extent.num_layers, bool))
            self.held.add(path, target.shard)
        for layer in range(targets[0].extent.num_layers):
            for target in new:
                for index, piece in self._pieces(path, target, layer):
                    if piece is None:
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
        """Make shards directly on their devices; the host may have no room for them."""
        new = [target for target in targets if target.shard is None]
        self._make_room(path, new, [target.shard for target in targets])
        for target in new:
            device = target.devices[0]
            dtype = target.info.storage_dtype
            values = _zeros(target.shape, dtype, device)
            for layer in range(target.extent.num_layers):
                for index, piece in self._pieces(path, target, layer, device):
                    if piece is None:
                        piece = np.empty([part.stop - part.start for part in index], dtype)
                        self._read(piece, path, target, index)
                    starts = tuple(np.int32(part.start) for part in index)
                    values = _write(values, jax.device_put(piece, device), starts)
                values = jax.block_until_ready(values)
                self.advance(target.layer_bytes)
            arrays = {device: target.put(values, device) for device in target.devices}
            jax.block_until_ready(list(arrays.values()))
            there = np.ones(target.extent.num_layers, bool)
            target.shard = HeldShard(target.extent, arrays[device], arrays, there)
            self.held.add(path, target.shard)

    def _make_room(self, path: str, new: Sequence[_Target], keeping: Sequence[HeldShard | None]) -> None:
        """Move old shards to host memory from devices without room for the new shards plus one layer."""
        needed: dict[jax.Device, int] = {}
        for target in new:
            for device in target.devices:
                needed[device] = needed.get(device, 0) + target.layer_bytes * (target.extent.num_layers + 1)
        free = {device: self.held.free_bytes(device) for device in needed}
        short = {device for device, nbytes in needed.items() if free[device] is not None and free[device] < nbytes}
        for shard in self.held.shards(path):
            if shard not in keeping and not short.isdisjoint(shard.arrays):
                shard.move_to_host()

    def _pieces(
        self, path: str, target: _Target, layer: int, device: jax.Device | None = None
    ) -> Iterator[tuple[Index, np.ndarray | Array | None]]:
        """Yield the pieces of a layer: the position in the new shard, and the values, or None if this process does not hold them.

        device: the device whose shards are used first. Missing values of neighbouring slots form one piece, which is read faster.
        """
        extent = target.extent
        missing = []
        for slot, expert in enumerate(extent.experts_in(layer)):
            pieces, left = self.held.look_up(path, layer, expert, extent.box, device)
            for piece in pieces:
                values = piece.shard.read(layer, piece.slot, piece.box)
                self.held.counts.moved += values.nbytes
                yield extent.index(layer, slot, piece.box), values
            missing += [(box, slot) for box in left]
        runs: list[tuple[Box, int, int]] = []
        for box, slot in sorted(missing):
            last, first, slots = runs[-1] if runs else (None, 0, 0)
            if last == box and first + slots == slot:
                runs[-1] = (box, first, slots + 1)
            else:
                runs.append((box, slot, 1))
        for box, first, slots in runs:
            yield extent.index(layer, first, box, slots), None

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
