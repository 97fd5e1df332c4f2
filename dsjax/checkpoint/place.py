"""Place parameters on a mesh from the host. Each distinct shard is made once for all devices that hold it."""

import math
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsjax.model.parameters import ParameterInfo
from dsjax.model.window import Region
from sharding.host_memory import memory_of
from sharding.rules import Rules

Fill = Callable[[np.ndarray, str, Region], None]
"""``fill(out, path, region)`` sets ``out`` to ``parameter[region]``; ``out`` has the storage dtype."""
Advance = Callable[[int], None]
"""Called with the number of bytes just placed."""

# XLA's CPU client uses a NumPy buffer without a copy if it is aligned to this many bytes.
_ALIGNMENT = 64
_MAPPED_BYTES = 1 << 20
"""Arrays of at least this size are mapped separately, so that their memory returns to the system despite `keep_freed_memory`."""


def place(
    parameters: Mapping[str, ParameterInfo], mesh: Mesh, rules: Rules, fill: Fill, advance: Advance = lambda _: None
) -> dict[str, jax.Array]:
    """Make every parameter as an array sharded over ``mesh`` by ``rules``; only local devices' shards are made.

    A shard is filled layer by layer. On the CPU platform, all devices with the same shard share one host buffer; on other platforms,
    the host buffer is freed once the shard is on its devices.

    Raises:
        MeshError: the mesh does not divide a dimension; raised before anything is filled.
    """
    shardings = {path: rules.sharding(mesh, info.logical_axes, info.shape) for path, info in parameters.items()}
    placed = {}
    for path, info in parameters.items():
        shards = []
        for region, devices in local_shards(info, shardings[path]).items():
            buffer = aligned_empty([stop - start for start, stop in region], info.storage_dtype)
            _fill_by_layer(buffer, path, info, region, fill, advance)
            buffer.flags.writeable = False
            memories = [memory_of(device, shardings[path]) for device in devices]
            shards += [jax.device_put(buffer, memory, may_alias=True) for memory in memories]
            if devices[0].platform != "cpu":
                jax.block_until_ready(shards[-len(devices) :])
        placed[path] = jax.make_array_from_single_device_arrays(info.shape, shardings[path], shards)
    return placed


def local_shards(info: ParameterInfo, sharding: NamedSharding) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Return this host's distinct shards, each as (start, stop) per dimension, with the devices that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(info.shape).items():
        region = tuple(part.indices(size)[:2] for part, size in zip(index, info.shape, strict=True))
        holders.setdefault(region, []).append(device)
    return holders


def local_bytes(parameters: Mapping[str, ParameterInfo], mesh: Mesh, rules: Rules) -> int:
    """Return the bytes of this host's distinct shards, the total that ``place`` reports to ``advance``."""
    total = 0
    for info in parameters.values():
        shards = local_shards(info, rules.sharding(mesh, info.logical_axes, info.shape))
        total += sum(math.prod(stop - start for start, stop in region) for region in shards) * info.dtype.itemsize
    return total


def _fill_by_layer(
    buffer: np.ndarray,
    path: str,
    info: ParameterInfo,
    region: Sequence[tuple[int, int]],
    fill: Fill,
    advance: Advance,
) -> None:
    """Fill a shard one layer at a time, so that memory used for reading can be freed in between."""
    whole = tuple(slice(start, stop) for start, stop in region)
    if info.logical_axes[0] != "layers":
        fill(buffer, path, whole)
        advance(buffer.nbytes)
        return
    for layer in range(len(buffer)):
        first = region[0][0] + layer
        fill(buffer[layer : layer + 1], path, (slice(first, first + 1), *whole[1:]))
        advance(buffer[layer].nbytes)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array that JAX's CPU devices can use without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _MAPPED_BYTES and sys.platform.startswith("linux"):
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, dtype, math.prod(shape)).reshape(shape)
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
