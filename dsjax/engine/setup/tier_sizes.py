"""The tiers below the cache, from the options: how many pages each has room for, and the disk's folder."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp

from dsjax.checkpoint.fingerprint import fingerprint
from dsjax.engine.device import cache as device_cache
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.offloaded_pages import Shapes
from dsjax.engine.tiers.page_files import PageFiles, bytes_on_disk, lock_folder
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from dsjax.model.step import ModelStep


def page_bytes(step: ModelStep) -> int:
    """Count the bytes of a page outside the devices: all layers, all shards, and which slots the MTP module has filled."""
    shards = step.spec.tp_size if step.attention.layout == "decompressed" else 1
    return device_cache.bytes_per_page(step) * shards + step.page_size * step.has_module


def below(args: EngineArgs, step: ModelStep) -> dict[str, int]:
    """The fields of ``ExecutorLimits`` that say what lies below the devices.

    Raises:
        UserError: a tier has no room for a page.
    """
    disk = _disk_pages(args, step)
    return {
        "host_pages_per_rank": _host_pages(args, step),
        "disk_pages": disk,
        "disk_page_bytes": bytes_on_disk(page_bytes(step)) if disk else 0,
    }


def lock_disk(args: EngineArgs, group: HostGroup | None) -> IO[bytes] | None:
    """The lock of the folder for pages; None where none is wanted. To be taken before anything expensive is done.

    Raises:
        UserError: the folder cannot be used, or several processes would have to share it.
    """
    if args.disk_cache is None:
        return None
    if group is not None:
        raise UserError(
            "--disk-cache does not work on a mesh of several processes yet; leave it out, or use --host-cache-bytes"
        )
    return lock_folder(args.disk_cache)


def open_disk(args: EngineArgs, step: ModelStep, directory: Path, lock: IO[bytes], shapes: Shapes) -> DiskPages:
    """The folder's pages of this model. directory: of its checkpoint; shapes: of a page's arrays."""
    return DiskPages(PageFiles(args.disk_cache, page_space(args, step, directory), shapes), args.disk_cache_bytes, lock)


def page_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    """What a page's values depend on, beside its tokens and shapes. directory: of the checkpoint."""
    return {
        "fingerprint": fingerprint(directory),
        "dtype": str(step.dtype),
        "kv_dtype": str(jnp.dtype(step.cache_dtype)),
        "weights": args.weights,
        "activation_scheme": str(step.scheme),
        "dispatch_wire": args.dispatch_wire,
        "layout": step.attention.layout,
        "page_size": step.page_size,
        "module_layer": step.has_module,
    }


def _disk_pages(args: EngineArgs, step: ModelStep) -> int:
    """Pages for which ``--disk-cache-bytes`` has room."""
    if args.disk_cache is None:
        return 0
    each = bytes_on_disk(page_bytes(step))
    if args.disk_cache_bytes < each:
        raise UserError(
            f"--disk-cache-bytes is {args.disk_cache_bytes:,}, which is less than one page takes; give at least {each:,}"
        )
    return args.disk_cache_bytes // each


def _host_pages(args: EngineArgs, step: ModelStep) -> int:
    """Pages of each DP rank for which ``--host-cache-bytes`` has room."""
    if not args.host_cache_bytes:
        return 0
    if not args.enable_prefix_caching:
        raise UserError(
            "--host-cache-bytes keeps pages of the prefix cache, which --no-enable-prefix-caching turns off"
        )
    each = page_bytes(step)
    pages = args.host_cache_bytes // step.spec.dp_size // each
    if pages < 1:
        raise UserError(
            f"--host-cache-bytes is {args.host_cache_bytes:,}, which is less than a page for each of {step.spec.dp_size} DP ranks; "
            f"a page takes {each:,} bytes: give at least {each * step.spec.dp_size:,}"
        )
    return pages
