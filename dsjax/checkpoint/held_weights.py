"""``HeldWeights``: parameters that stay on this process's devices while the mesh changes.

A part of a parameter is identified by path, layer, logical expert and a box of the other dimensions, not by slot: an expert may have
different slots in different meshes. docs/many-hosts.md describes the design.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dsjax.checkpoint.extent import Box, Extent, as_box, difference, intersection
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import aligned_empty
from dsjax.model.parameters import ParameterInfo
from dsjax.model.step import ModelStep
from sharding.host_memory import on_device
from sharding.layer_placement import LayerPlacements


@dataclass(eq=False)
class HeldShard:
    """A complete or partial shard of a parameter on this process's devices."""

    extent: Extent
    # a NumPy array of host memory, shared by the CPU platform's devices, or an array on one device
    values: np.ndarray | Array
    arrays: dict[jax.Device, Array]  # JAX's arrays of this shard, by device
    is_there: np.ndarray  # ``[layers]``, whether ``values`` currently holds each layer

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that are held."""
        return int(self.values.nbytes * self.is_there.mean())

    @property
    def address(self) -> int:
        """Identifies the memory of ``values``; equal for shards that share it."""
        return self.values.ctypes.data if isinstance(self.values, np.ndarray) else id(self.values)

    def read(self, layer: int, slot: int, box: Box) -> np.ndarray | Array:
        """Return a part's values: a view of host memory, or a new array on the device."""
        index = self.extent.index(layer, slot, box)
        if isinstance(self.values, np.ndarray):
            return self.values[index]
        starts = tuple(np.int32(part.start) for part in index)
        return _cut(self.values, starts, tuple(part.stop - part.start for part in index))

    def give_back(self, layer: int) -> None:
        """Drop a layer. In host memory, also free its whole pages."""
        self.is_there[layer] = False
        if not isinstance(self.values, np.ndarray):
            return
        for values in self._buffers():
            part = values if self.extent.layers is None else values[layer]
            if part.flags.c_contiguous:
                _give_back_pages(part.ctypes.data, part.nbytes)

    def move_to_host(self) -> None:
        """Move the values to host memory. The device needs room for a second copy of one layer during the move."""
        values = aligned_empty(self.values.shape, np.dtype(self.values.dtype))
        for layer in [...] if self.extent.layers is None else range(self.extent.layers):
            values[layer] = np.asarray(self.values[layer])
        self.values = values
        self.arrays = {}

    def _buffers(self) -> Iterator[np.ndarray]:
        """Yield the shard's buffers in host memory: ``values``, and those of the devices that have a copy of their own."""
        yield self.values
        for array in self.arrays.values():
            if array.unsafe_buffer_pointer() != self.values.ctypes.data:
                yield np.asarray(array)


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of an expert, or of a parameter without experts, that a shard holds."""

    shard: HeldShard
    slot: int
    box: Box


@dataclass
class WeightBytes:
    """Where a mesh epoch's parameters came from, in bytes: each distinct shard of this process counts once."""

    kept: int = 0  # stayed in place
    moved: int = 0  # copied from another shard of this process
    read: int = 0  # assembled from the checkpoint
    file: int = 0  # bytes of checkpoint tensors read for `read`

    @classmethod
    def total(cls, values: Iterable[Sequence[int]]) -> WeightBytes:
        """Sum each field over several processes."""
        return cls(*(sum(column) for column in zip(*values, strict=True)))

    def __str__(self) -> str:
        return f"{self.kept:,} bytes of weights kept in place, {self.moved:,} moved between devices, {self.read:,} read from the checkpoint"


class HeldWeights:
    """A checkpoint's parameters on this process's devices, held between two executors: from the release of one to the loading of the next.

    ``keep`` takes over an executor's parameters; ``clear`` drops them. ``counts``: sources of the latest mesh epoch's. Not thread-safe.

    Args:
        on_host: whether shards are in host memory, as on the CPU platform; None: decided by the device's platform.

    Attributes:
        identity: identifies the checkpoint and the form of its parameters; parameters of another identity are not reused.
        name: identifies this engine across its meshes, so that expert processes can tell attention sides apart.
    """

    def __init__(self, on_host: bool | None = None):
        self.identity: str | None = None
        self.name = secrets.token_bytes(8)
        self.counts = WeightBytes()
        self._on_host = on_host
        self._shards: dict[str, list[HeldShard]] = {}

    def keep(
        self,
        step: ModelStep,
        params: Mapping[str, Array],
        placements: LayerPlacements | None,
        infos: Mapping[str, ParameterInfo] | None = None,
    ) -> None:
        """Take ownership of all parameters that the devices still have. The caller must not use them afterwards.

        placements: of the experts, now. infos: of the parameters in ``params``; None: those of the step's table.
        """
        slot_experts = None if placements is None else step.with_shared_slots(placements).physical_to_logical
        names = TensorNames(step.config, step.table.infos if infos is None else infos, slot_experts)
        for path, info in names.parameters.items():
            array = params.get(path)
            if array is None or not _is_usable(array):
                continue
            shards: dict[Box, HeldShard] = {}
            for piece in array.addressable_shards:
                region = as_box(piece.index, info.shape)
                if region not in shards:
                    extent = Extent.of(info, region, names.experts_of(path))
                    values = np.asarray(piece.data) if self.is_on_host(piece.data.device) else piece.data
                    shards[region] = HeldShard(extent, values, {}, np.ones(extent.num_layers, bool))
                shards[region].arrays[piece.device] = piece.data
            self._shards.setdefault(path, []).extend(shards.values())

    def clear(self) -> None:
        """Drop everything."""
        self._shards = {}

    def is_on_host(self, device: jax.Device) -> bool:
        """Return whether a device's shards are in host memory."""
        return device.platform == "cpu" if self._on_host is None else self._on_host

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._shards

    @property
    def nbytes(self) -> int:
        """Bytes of the shards, each once."""
        return sum(shard.nbytes for shards in self._shards.values() for shard in shards)

    def device_bytes(self, device: jax.Device) -> int:
        """Return the bytes held on a device."""
        held = (shard.arrays.get(device) for shards in self._shards.values() for shard in shards)
        return sum(array.nbytes for array in held if array is not None and on_device(array.sharding))

    def free_bytes(self, device: jax.Device) -> int | None:
        """Return a device's free bytes; None if the device does not report them."""
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats["bytes_in_use"]

    def shards(self, path: str) -> list[HeldShard]:
        """Return the shards of a parameter."""
        return list(self._shards.get(path, ()))

    def add(self, path: str, shard: HeldShard) -> None:
        """Add a shard, which may be empty."""
        self._shards.setdefault(path, []).append(shard)

    def remove(self, path: str, shard: HeldShard) -> None:
        """Drop a shard, if it is held."""
        self._shards[path] = [one for one in self._shards.get(path, ()) if one is not shard]

    def give_back(self, path: str, layer: int, keeping: Sequence[HeldShard]) -> None:
        """Free a layer of all shards of a parameter, except those that share memory with a shard in ``keeping``."""
        kept_addresses = {shard.address for shard in keeping}
        for shard in self._shards.get(path, ()):
            if shard.is_there[layer] and shard.address not in kept_addresses:
                shard.give_back(layer)

    def look_up(
        self, path: str, layer: int, expert: int, box: Box, first: jax.Device | None = None
    ) -> tuple[list[Piece], list[Box]]:
        """Look up a box of an expert. Return the pieces held, and the boxes missing. first: device whose shards are searched first."""
        shards = [shard for shard in self._shards.get(path, ()) if shard.is_there[layer]]
        pieces = []
        missing = [box]
        for shard in sorted(shards, key=lambda shard: first not in shard.arrays):
            slot = shard.extent.slot_of(layer, expert)
            still_missing = []
            if slot is None:
                continue
            for box in missing:
                common = intersection(box, shard.extent.box)
                if common is None:
                    still_missing.append(box)
                else:
                    pieces.append(Piece(shard, slot, common))
                    still_missing += difference(box, common)
            missing = still_missing
        return pieces, missing


@partial(jax.jit, static_argnums=2)
def _cut(values: Array, starts: tuple[np.int32, ...], sizes: tuple[int, ...]) -> Array:
    return lax.dynamic_slice(values, starts, sizes)


def _is_usable(array: Array) -> bool:
    """Return whether an array is usable: not deleted, and the program that computed it succeeded."""
    if array.is_deleted():
        return False
    with suppress(RuntimeError):
        array.block_until_ready()
        return True
    return False


def _give_back_pages(address: int, nbytes: int) -> None:
    """Return the whole pages in a range of memory to the kernel; they then read as zeros. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), 4
        )  # MADV_DONTNEED
