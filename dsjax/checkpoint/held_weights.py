"""``HeldWeights``: parameters that lie on this process's devices while the mesh changes, found by what they are and not by where they lie.

A part of a parameter is known by its path, its layer, its logical expert and a box of the other dimensions. Slots do not count: the same
expert lies in another slot of another mesh. docs/many-hosts.md has the design.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import aligned_empty
from dsjax.model.parameters import ParameterInfo
from dsjax.model.step import ModelStep
from sharding.host_memory import on_device
from sharding.layer_placement import LayerPlacements

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""

NO_EXPERT = -1
"""The expert of a parameter that belongs to none."""

_READER_SECONDS = 10.0
"""How long memory of a device is kept for somebody who still reads it."""


@dataclass(frozen=True)
class Part:
    """A part of a parameter, of one layer and one expert.

    Attributes:
        layer: in its stack; 0 where the parameter has no stack. expert: the logical one, or ``NO_EXPERT``. box: of the dimensions that are
            neither the layers' nor the experts'.
    """

    layer: int
    expert: int
    box: Box


@dataclass(frozen=True)
class Extent:
    """Which parts of a parameter a shard has room for, and where: plain values, which can be sent to another process.

    Attributes:
        first_layer, layers: of the stack. experts: ``[layers, slots]``, the logical expert of each slot; None where it has none.
        is_stacked: whether the first dimension is the layers'. box: of the other dimensions.
    """

    first_layer: int
    layers: int
    is_stacked: bool
    experts: np.ndarray | None
    box: Box

    @classmethod
    def of(cls, info: ParameterInfo, region: Box, rows: np.ndarray | None) -> Extent:
        """The extent of a region of a parameter. rows: the logical expert of each of its slots, layer by layer."""
        stacked = info.logical_axes[0] == "layers"
        first, last = region[0] if stacked else (0, 1)
        rest = region[1:] if stacked else region
        experts = None
        if rows is not None:
            start, stop = rest[0]
            experts, rest = np.ascontiguousarray(rows[first:last, start:stop], np.int32), rest[1:]
        return cls(first, last - first, stacked, experts, tuple(rest))

    def parts(self, layer: int) -> Iterator[tuple[int, Part]]:
        """All parts of a layer with their slots; without experts there is one, in slot 0."""
        if self.experts is None:
            yield 0, Part(layer, NO_EXPERT, self.box)
            return
        for slot, expert in enumerate(self.experts[layer - self.first_layer].tolist()):
            yield slot, Part(layer, expert, self.box)

    def slot_of(self, layer: int, expert: int) -> int | None:
        """The slot of an expert in a layer; None where it has none."""
        if not self.first_layer <= layer < self.first_layer + self.layers:
            return None
        if self.experts is None or expert == NO_EXPERT:
            return 0 if (self.experts is None) == (expert == NO_EXPERT) else None
        slots = np.flatnonzero(self.experts[layer - self.first_layer] == expert)
        return int(slots[0]) if len(slots) else None

    def index(self, layer: int, slot: int, box: Box) -> tuple[slice, ...]:
        """Where a part lies in the shard's values. No dimension goes away."""
        lead = []
        if self.is_stacked:
            lead.append(slice(layer - self.first_layer, layer - self.first_layer + 1))
        if self.experts is not None:
            lead.append(slice(slot, slot + 1))
        rest = [slice(start - own[0], stop - own[0]) for (start, stop), own in zip(box, self.box, strict=True)]
        return (*lead, *rest)

    def piece_shape(self, box: Box) -> tuple[int, ...]:
        """The shape of what ``index`` gives."""
        lead = int(self.is_stacked) + (self.experts is not None)
        return (*[1] * lead, *(stop - start for start, stop in box))

    def is_like(self, other: Extent) -> bool:
        """Whether the other one has the same parts at the same places."""
        same = (self.first_layer, self.layers, self.box) == (other.first_layer, other.layers, other.box)
        if not same or (self.experts is None) != (other.experts is None):
            return False
        return self.experts is None or np.array_equal(self.experts, other.experts)

    @property
    def values_a_layer(self) -> int:
        """Values of a shard in each of its layers."""
        return box_size(self.box) * (1 if self.experts is None else self.experts.shape[1])

    def plain(self) -> list[Any]:
        """As MessagePack can have it."""
        experts = None if self.experts is None else [self.experts.shape[1], self.experts.astype("<i4").tobytes()]
        return [self.first_layer, self.layers, self.is_stacked, experts, [list(part) for part in self.box]]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> Extent:
        """The inverse of ``plain``.

        Raises:
            ValueError, TypeError: it is none.
        """
        first, layers, stacked, experts, box = values
        rows = None if experts is None else np.frombuffer(experts[1], "<i4").reshape(layers, experts[0])
        return cls(int(first), int(layers), bool(stacked), rows, tuple((int(start), int(stop)) for start, stop in box))


@dataclass(eq=False)
class HeldShard:
    """A shard of a parameter on this process's devices, whole or in part.

    Attributes:
        values: a NumPy array of the memory that the CPU's devices share, or an array on one device. arrays: by device, those that were or
            will be given to JAX. is_there: for each of its layers whether it is in ``values``.
        readers: how many threads read it; nothing of it is given back then.
    """

    extent: Extent
    values: np.ndarray | Array
    arrays: dict[jax.Device, Array] = field(default_factory=dict)
    is_there: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    readers: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that are there."""
        return int(self.values.nbytes * self.is_there.mean()) if self.values.size else 0

    def has(self, layer: int) -> bool:
        """Whether a layer is there."""
        place = layer - self.extent.first_layer
        return 0 <= place < self.extent.layers and bool(self.is_there[place])

    def read(self, layer: int, slot: int, box: Box) -> np.ndarray | Array:
        """A part's values: a view of host memory, or a new array on the device."""
        index = self.extent.index(layer, slot, box)
        if isinstance(self.values, np.ndarray):
            return self.values[index]
        starts = tuple(np.int32(part.start) for part in index)
        return _cut(self.values, starts, tuple(part.stop - part.start for part in index))

    def give_back(self, layer: int) -> None:
        """Free a layer's memory where that can be done: host memory, whole pages."""
        self.is_there[layer - self.extent.first_layer] = False
        if not isinstance(self.values, np.ndarray):
            return
        for values in {id(one): one for one in self._buffers()}.values():
            part = values[layer - self.extent.first_layer] if self.extent.is_stacked else values
            if part.flags.c_contiguous:
                _give_back_pages(part.ctypes.data, part.nbytes)

    def _buffers(self) -> Iterator[np.ndarray]:
        """The memory of each device; most share one."""
        yield self.values
        for array in self.arrays.values():
            if array.unsafe_buffer_pointer() != self.values.ctypes.data:
                yield np.asarray(array)


@dataclass
class WeightBytes:
    """Where the parameters of a generation have come from, in bytes of distinct shards of this process.

    Attributes:
        kept: lay where they are needed. moved: copied from another shard of this process. received: from another process. read: made from
            the checkpoint. file: bytes of the checkpoint's tensors that were read for that.
    """

    kept: int = 0
    moved: int = 0
    received: int = 0
    read: int = 0
    file: int = 0

    def plain(self) -> list[int]:
        """As MessagePack can have it."""
        return [self.kept, self.moved, self.received, self.read, self.file]

    @classmethod
    def total(cls, values: Iterable[Sequence[int]]) -> WeightBytes:
        """The sum over processes, each as ``plain`` gives it."""
        return cls(*(sum(column) for column in zip(*values, strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.kept:,} bytes of weights kept in place, {self.moved:,} moved between devices, {self.received:,} received from "
            f"other processes, {self.read:,} read from the checkpoint"
        )


class HeldWeights:
    """What lies on this process's devices of a checkpoint's parameters between two executors, and while the second one's are made.

    It may be asked by several threads. ``keep`` takes an executor's parameters over; ``clear`` forgets all.

    Args:
        on_host: whether shards are host memory, as the devices of the CPU platform have it; None: as the devices are.

    Attributes:
        identity: of which checkpoint, and in which form: parameters of another identity are of no use.
        name: of the engine, which is the same on all its meshes: processes that hold its other weights know it by this name.
    """

    def __init__(self, on_host: bool | None = None):
        self.identity: str | None = None
        self.name = secrets.token_bytes(8)
        self.counts = WeightBytes()
        self._on_host = on_host
        self._shards: dict[str, list[HeldShard]] = {}
        self._lock = threading.RLock()
        self._read = threading.Condition(self._lock)

    def keep(
        self,
        step: ModelStep,
        params: Mapping[str, Array],
        placements: LayerPlacements | None,
        infos: Mapping[str, ParameterInfo] | None = None,
    ) -> None:
        """Take parameters over, all that the devices still have of them. Nobody else may use them from now on.

        placements: where experts are now. infos: of the parameters; None: those of the step's table.
        """
        rows = None if placements is None else step.stored(placements).physical_to_logical
        names = TensorNames(step.config, step.table.infos if infos is None else infos, rows)
        for path, info in names.parameters.items():
            array = params.get(path)
            if array is None or not _is_whole(array):
                continue
            shards: dict[Box, HeldShard] = {}
            for piece in array.addressable_shards:
                region = as_box(piece.index, info.shape)
                if region not in shards:
                    extent = Extent.of(info, region, names.experts_of(path))
                    shards[region] = HeldShard(extent, self._values_of(piece.data), {}, np.ones(extent.layers, bool))
                shards[region].arrays[piece.device] = piece.data
            with self._lock:
                self._shards.setdefault(path, []).extend(shards.values())

    def clear(self) -> None:
        """Forget all: who uses the parameters now has them for itself."""
        with self._lock:
            self._shards = {}

    def is_on_host(self, device: jax.Device) -> bool:
        """Whether shards of a device are host memory."""
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
        """Bytes on a device."""
        held = (shard.arrays.get(device) for shards in self._shards.values() for shard in shards)
        return sum(array.nbytes for array in held if array is not None and on_device(array.sharding))

    def free_bytes(self, device: jax.Device) -> int | None:
        """Bytes of a device that nothing takes up; None where it does not say."""
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats["bytes_in_use"]

    def shards(self, path: str) -> list[HeldShard]:
        """The shards of a parameter."""
        with self._lock:
            return list(self._shards.get(path, ()))

    def add(self, path: str, shard: HeldShard) -> None:
        """Hold one more shard, which may be empty yet."""
        with self._lock:
            self._shards.setdefault(path, []).append(shard)

    def remove(self, path: str, shard: HeldShard) -> None:
        """Hold a shard no longer."""
        with self._lock:
            self._shards[path] = [one for one in self._shards.get(path, ()) if one is not shard]

    def move_to_host(self, path: str, shard: HeldShard) -> None:
        """Hold a shard in host memory from now on, and free it on its devices, which have one layer of it twice meanwhile."""
        extent, values = shard.extent, aligned_empty(shard.values.shape, np.dtype(shard.values.dtype))
        for layer in range(extent.layers) if extent.is_stacked else [...]:
            values[layer] = np.asarray(shard.values[layer])
        moved = HeldShard(extent, values, {}, shard.is_there.copy())
        with self._read:
            self._shards[path] = [moved if one is shard else one for one in self._shards.get(path, ())]
            self._read.wait_for(lambda: not shard.readers, _READER_SECONDS)

    def give_back(self, path: str, layer: int, keeping: Sequence[HeldShard]) -> None:
        """Free a layer of all shards but some, and of what nothing of is left the rest. What somebody reads stays."""
        with self._lock:
            kept = {_address(shard.values) for shard in keeping}
            for shard in self._shards.get(path, ()):
                if shard in keeping or _address(shard.values) in kept or not shard.has(layer) or shard.readers:
                    continue
                shard.give_back(layer)
            self._shards[path] = [
                shard for shard in self._shards.get(path, ()) if shard in keeping or shard.is_there.any()
            ]

    def look_up(self, path: str, part: Part, first: jax.Device | None = None) -> tuple[list[Piece], list[Box]]:
        """Where a part is, piece by piece, and the boxes of it that are nowhere here. first: the device to look at first."""
        shards = [shard for shard in self.shards(path) if shard.has(part.layer)]
        if first is not None:
            shards.sort(key=lambda shard: first not in shard.arrays)
        places, left = cover(part, ((shard, shard.extent) for shard in shards))
        return [Piece(shard, slot, box) for shard, slot, box in places], left

    @contextmanager
    def reading(self, path: str, part: Part) -> Iterator[list[Piece] | None]:
        """A whole part's pieces, none of which is given back meanwhile; None where something of it is not here."""
        with self._lock:
            pieces, left = self.look_up(path, part)
            for piece in pieces:
                piece.shard.readers += 1
        try:
            yield None if left else pieces
        finally:
            with self._lock:
                for piece in pieces:
                    piece.shard.readers -= 1
                self._read.notify_all()

    def inventory(self) -> dict[str, Any]:
        """What is here, in plain values. A shard of which some layers are missing is told of run by run of layers."""
        told: dict[str, list[Any]] = {}
        with self._lock:
            for path, shards in self._shards.items():
                for shard in shards:
                    extent = shard.extent
                    for start, stop in _runs(shard.is_there):
                        rows = None if extent.experts is None else extent.experts[start:stop]
                        run = Extent(extent.first_layer + start, stop - start, extent.is_stacked, rows, extent.box)
                        told.setdefault(path, []).append([str(shard.values.dtype), run.plain()])
        return {"identity": self.identity, "shards": told}

    def _values_of(self, array: Array) -> np.ndarray | Array:
        return np.asarray(array) if self.is_on_host(array.device) else array


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a part, in a shard."""

    shard: HeldShard
    slot: int
    box: Box


def assemble(part: Part, pieces: Sequence[Piece]) -> np.ndarray:
    """Put a part together in one run of host memory."""
    if len(pieces) == 1:
        return np.ascontiguousarray(pieces[0].shard.read(part.layer, pieces[0].slot, part.box))
    extent = pieces[0].shard.extent
    whole = np.empty(extent.piece_shape(part.box), pieces[0].shard.values.dtype)
    for piece in pieces:
        whole[inside(piece.box, part.box, whole.ndim)] = piece.shard.read(part.layer, piece.slot, piece.box)
    return whole


def inside(box: Box, whole: Box, ndim: int) -> tuple[slice, ...]:
    """Where a box lies in the values of another one around it, which may have dimensions of size 1 before its own."""
    rest = [slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, whole, strict=True)]
    return (*[slice(None)] * (ndim - len(rest)), *rest)


def read_inventory(plain: Any) -> dict[str, list[tuple[str, Extent]]]:
    """Read what ``HeldWeights.inventory`` gave in another process: by path, (dtype, extent).

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    return {
        path: [(dtype, Extent.from_plain(values)) for dtype, values in shards]
        for path, shards in plain["shards"].items()
    }


def cover(part: Part, shards: Iterable[tuple[Any, Extent]]) -> tuple[list[tuple[Any, int, Box]], list[Box]]:
    """Find a part in shards, the first ones first: (shard, slot, box of the part), and the boxes that no shard has."""
    places, left = [], [part.box]
    for shard, extent in shards:
        if not left:
            break
        slot = extent.slot_of(part.layer, part.expert)
        if slot is None:
            continue
        still_left = []
        for box in left:
            common = intersection(box, extent.box)
            if common is None:
                still_left.append(box)
                continue
            places.append((shard, slot, common))
            still_left += difference(box, common)
        left = still_left
    return places, left


def intersection(box: Box, other: Box) -> Box | None:
    """What two boxes share; None: nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def difference(box: Box, inner: Box) -> list[Box]:
    """A box without another that lies in it, as boxes that do not overlap."""
    boxes, rest = [], list(box)
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                boxes.append((*rest[:axis], part, *rest[axis + 1 :]))
        rest[axis] = (first, last)
    return boxes


def box_size(box: Box) -> int:
    """Values in a box."""
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def as_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Slices of an array of this shape as a box."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@partial(jax.jit, static_argnums=2)
def _cut(values: Array, starts: tuple[np.int32, ...], sizes: tuple[int, ...]) -> Array:
    return lax.dynamic_slice(values, starts, sizes)


def _is_whole(array: Array) -> bool:
    """Whether an array is still there: it was not given to a program that failed, nor made by one."""
    if array.is_deleted():
        return False
    with suppress(RuntimeError):
        array.block_until_ready()
        return True
    return False


def _address(values: np.ndarray | Array) -> int:
    """What is equal for values in the same memory."""
    return values.ctypes.data if isinstance(values, np.ndarray) else id(values)


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of what is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _give_back_pages(address: int, nbytes: int) -> None:
    """Let the kernel have the whole pages of some memory that nobody reads any more; they read as zeros then. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), 4
        )  # MADV_DONTNEED
