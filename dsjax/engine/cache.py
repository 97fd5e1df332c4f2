"""The paged latent cache on the devices: how large it can be, and its arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import UserError
from dsjax.model.forms import cache_widths
from dsjax.model.parameters import storage_dtype
from dsjax.model.step import Step

MEMORY_SHARE = 0.9
"""Of an accelerator's memory, what weights and cache together may take; the rest is for temporaries and fragmentation."""
HOST_CACHE_BYTES = 2 << 30
"""On the CPU platform all emulated devices share the host's memory: their caches together take at most this by default."""


def bytes_per_page(step: Step) -> int:
    """Bytes of one page, all layers, on one device."""
    shards = step.spec.tp_size if step.attention.layout == "decompressed" else 1
    values = sum(math.prod(shape) for shape in cache_widths(step.attention.layout, step.config).values())
    return values // shards * step.page_size * step.cache_layers * jnp.dtype(step.cache_dtype).itemsize


def pages_that_fit(step: Step, wanted: int) -> int:
    """Pages of a DP rank: ``wanted``, or what memory allows, whichever is less.

    Raises:
        UserError: not even two pages fit (page 0 is never used).
    """
    device = next(d for d in step.mesh.devices.flat if d.process_index == jax.process_index())
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None:
        room = HOST_CACHE_BYTES // step.spec.num_devices
    else:
        room = int(stats["bytes_limit"] * MEMORY_SHARE) - stats["bytes_in_use"]
    pages = min(wanted, room // bytes_per_page(step))
    if pages < 2:
        raise UserError(
            f"the cache has room for {pages} pages of {bytes_per_page(step)} bytes a device, expected at least 2; "
            "use a mesh of more devices, FP8 weights (--weights fp8), or a smaller --page-size"
        )
    return pages


def describe(step: Step, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, storage dtypes and shardings of the cache's arrays ``[layers, dp × pages, page_size, …]``, pages spread over the
    DP ranks."""
    heads = step.spec.head_axes if step.attention.layout == "decompressed" else None
    sharding = NamedSharding(step.mesh, P(None, step.spec.batch_axes, None, heads))
    stored = storage_dtype(jnp.dtype(step.cache_dtype), step.mesh.devices.flat[0].platform)
    lead = (step.cache_layers, step.spec.dp_size * pages, step.page_size)
    widths = cache_widths(step.attention.layout, step.config)
    return {name: jax.ShapeDtypeStruct((*lead, *width), stored, sharding=sharding) for name, width in widths.items()}


def token_slots(step: Step, pages: int) -> int:
    """Usable token slots of all DP ranks together."""
    return (pages - 1) * step.page_size * step.spec.dp_size
