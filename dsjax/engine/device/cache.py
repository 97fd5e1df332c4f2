"""The paged KV cache (MLA latent) on the devices: its size and its arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import UserError
from dsjax.model.cache_groups import KEPT_WINDOWS, Table
from dsjax.model.parameters import storage_dtype
from dsjax.model.step import ModelStep

HOST_CACHE_BYTES = 2 << 30
"""Default limit for the caches of all emulated devices together; on the CPU platform they share the host's memory."""


def bytes_per_page(step: ModelStep, table: Table = "context") -> int:
    """Return the bytes of one page of one kind, over all layers, on one device; 0 if no layer has such pages."""
    return sum(group.device_page_bytes(step.spec.tp_size) for group in step.cache_groups if group.table == table)


def with_kept_windows(step: ModelStep, pages: int, held: int) -> int:
    """Return the number of window pages of a DP rank with ``pages`` context pages: ``held`` for requests, plus those kept for reuse."""
    # Kept windows take the share ``KEPT_WINDOWS`` of the bytes of context pages and kept windows together.
    window = bytes_per_page(step, "window")  # bytes of a window page
    return held + int(KEPT_WINDOWS / (1 - KEPT_WINDOWS) * pages * bytes_per_page(step) / window) if window else 0


def pages_that_fit(step: ModelStep, wanted: int, pool: Pool | None = None, held_windows: int = 0) -> int:
    """Return the number of context pages of a DP rank: ``wanted``, or as many as fit in memory next to the window pages if fewer fit.

    pool: memory of an accelerator; None on the CPU platform. held_windows: ``held`` of ``with_kept_windows``.

    Raises:
        UserError: not even two pages fit (page 0 is never used).
    """
    stages = step.stage.count if step.stage else 1
    room = HOST_CACHE_BYTES // (step.spec.num_devices * stages) if pool is None else pool.room
    each, held_bytes = bytes_per_page(step), held_windows * bytes_per_page(step, "window")
    share = 1 - KEPT_WINDOWS if held_bytes else 1  # of the context pages
    pages = min(wanted, int((room - held_bytes) * share / each) if each else wanted if room >= held_bytes else 0)
    if pages < 2:
        pool_text = "" if pool is None else f" ({pool})"
        raise UserError(
            f"the cache has room for {max(pages, 0)} pages of {each} bytes a device, expected at least 2{pool_text}; "
            "use a mesh of more devices, FP8 weights (--weights fp8), an FP8 cache (--kv-cache-dtype fp8), "
            + ("" if pool is None else "a higher --gpu-memory-utilization, a smaller --max-num-batched-tokens, ")
            + "or a smaller --page-size"
        )
    return pages


@dataclass(frozen=True)
class Pool:
    """JAX's memory pool on an accelerator, in bytes."""

    size: int  # size of the pool
    used: int  # weights and any other allocations
    temporaries: int  # the largest need of any program

    @classmethod
    def of(cls, step: ModelStep, temporaries: int) -> Pool | None:
        """Return the pool of this process's first device; None if the device has no memory statistics, as on CPU."""
        device = next(d for d in step.mesh.devices.flat if d.process_index == jax.process_index())
        stats = None if device.platform == "cpu" else device.memory_stats()
        return stats and cls(stats["bytes_limit"], stats["bytes_in_use"], temporaries)

    @property
    def room(self) -> int:
        """Bytes for the cache."""
        return max(0, self.size - self.used - self.temporaries)

    def __str__(self) -> str:
        return (
            f"of a pool of {self.size / 1e9:,.2f} GB, weights take {self.used / 1e9:,.2f} GB and a step's temporaries "
            f"{self.temporaries / 1e9:,.2f} GB"
        )


def describe(step: ModelStep, pages: int, windows: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, storage dtypes and shardings of the cache's arrays ``[layers, dp × pages, entries, …]``, sharded over DP ranks.

    pages, windows: number of context and of window pages per rank.
    """
    described, platform = {}, step.mesh.devices.flat[0].platform
    for group in step.cache_groups:
        num_pages = windows if group.table == "window" else pages
        leading = (len(group.layers), step.spec.dp_size * num_pages, group.entries)
        spec = P(None, step.spec.batch_axes, None, step.spec.head_axes if group.by_head else None)
        sharding = NamedSharding(step.mesh, spec)
        described |= {
            name: jax.ShapeDtypeStruct((*leading, *entry_shape), storage_dtype(dtype, platform), sharding=sharding)
            for name, (entry_shape, dtype) in group.arrays.items()
        }
    return described
