"""This process's XLA runtime: the compilation cache, memory, and out-of-memory errors."""

import ctypes
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from dsjax.errors import UserError
from dsjax.owned_folder import why_distrusted
from sharding.jax_internals import backend_is_running, keep_programs_of_every_process

LEAST_COMPILE_SECONDS = 0.2
"""Programs that compile faster are not cached."""

# glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def cache_folder() -> Path | None:
    """Return the folder of compiled programs: ``JAX_COMPILATION_CACHE_DIR``, or ``dsjax/compiled`` in the user's cache folder.

    It need not exist. None: ``HOME`` is not set and the system does not know this user.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax" / "compiled"
    except RuntimeError:
        return None


def enable_compile_cache() -> Path | None:
    """Keep compiled programs in JAX's persistent cache for the next start, in every process of a mesh.

    Return the folder as ``cache_folder`` does; None if programs are not kept. A folder that cannot be written is only read.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = cache_folder()
    if folder is None:
        return _without_cache("there is no home folder; set HOME, XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR")
    given = jax.config.jax_compilation_cache_dir
    if given and "://" in given:
        return folder
    if (error := why_unwritable(folder)) is None:
        if reason := why_distrusted(folder):
            _warn(f"the cache of compiled programs is not safe: they run in this process, and {reason}")
    elif not _has_entries(folder):
        return _without_cache(f"cannot write {folder} ({error}); set JAX_COMPILATION_CACHE_DIR to a folder that can be")
    else:
        _warn(
            f"compiled programs are read from {folder}, and new ones are not kept, since it cannot be written ({error})"
        )
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if not given:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    if error is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        return folder
    try:
        keep_programs_of_every_process()
    except (ImportError, AttributeError) as failure:
        _warn(f"this version of JAX keeps compiled programs of process 0 alone ({failure})")
    return folder


def _without_cache(reason: str) -> None:
    _warn(f"compiled programs will not be kept: {reason}")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=1 << 20)  # print the message without a line of this file


def why_unwritable(folder: Path) -> str | None:
    """Make a folder if it is missing, and write a block to it. Return why that fails, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compile programs even if the cache has them, for callers that read what the compiler writes beside its result."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def size_memory_pool(share: float) -> None:
    """Set the share of each GPU's memory that JAX takes as its pool. No-op if JAX has started.

    Overrides ``XLA_CLIENT_MEM_FRACTION`` and its older name, because the engine, the dry run and the planner rely on the option.
    """
    if backend_is_running():
        return
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX refuses both names at once
    os.environ["XLA_CLIENT_MEM_FRACTION"] = repr(share)


_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS): "
)
"""Prefix of an XLA error's text. Errors about wrong arguments do not have it."""


class OutOfDeviceMemoryError(UserError):
    """A device has too little memory."""


@contextmanager
def explained_out_of_memory(doing: str, advice: str) -> Iterator[None]:
    """Call `explain_out_of_memory` with an error of the block."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        explain_out_of_memory(error, doing, advice)
        raise


def explain_out_of_memory(error: Exception, doing: str, advice: str) -> None:
    """Explain XLA's out-of-memory error by raising one that says what failed while ``doing`` something, with advice.

    Raises:
        OutOfDeviceMemoryError: in place of XLA's error. For any other error the function returns.
        JaxRuntimeError: in place of a `ValueError`, which JAX's fast call path raises if a program fails while it is started. On CPU, a
            program may run in the calling thread, so a collective with a lost peer fails there.
    """
    text = str(error)
    is_status = type(error) is ValueError and _STATUS.match(text)
    if is_status and "RESOURCE_EXHAUSTED" not in text:
        raise jax.errors.JaxRuntimeError(text) from error
    if "RESOURCE_EXHAUSTED" not in text or (isinstance(error, ValueError) and not is_status):
        return
    wanted = re.search(r"allocate (?:size )?([\d,.]+ ?[KMGT]?i?B|\d+ bytes|\d+)", text)
    stats = jax.local_devices()[0].memory_stats() or {}
    state = (
        f"; of {stats['bytes_limit'] / 1e9:,.1f} GB of the pool {stats['bytes_in_use'] / 1e9:,.1f} GB were in use"
        if {"bytes_limit", "bytes_in_use"} <= stats.keys()
        else ""
    )
    size = f" for {wanted.group(1)}" if wanted else ""
    raise OutOfDeviceMemoryError(f"a device has no memory left{size} while {doing}{state}; {advice}") from error


def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the kernel. Return whether that is possible (glibc on Linux).

    By default glibc unmaps each freed allocation of more than 128 KiB. XLA's CPU backend allocates its temporaries for every execution,
    so each step would fault in every page again: half of the time of a large product (docs/measurements).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    never_trim = 2**31 - 1
    return all(mallopt(option, value) for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, never_trim)))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process can still take: those free on the machine, or its container's limit if less; None off Linux.

    The container's current use is not subtracted from its limit, because most of it may be page cache, which can be dropped.
    """
    bounds: list[int] = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        bounds += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup 2 and 1
        try:
            bounds.append(int((cgroup / name).read_text()))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return min(bounds, default=None)


def device_memory() -> Iterator[tuple[str, int, int]]:
    """Yield (device, bytes in use, bytes available to this process) for each device of this process.

    Emulated devices are one device, `host`, whose bytes in use are the process's resident bytes.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        available = available_bytes()
        if available is not None:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            yield "host", resident, resident + available
        return
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            yield str(device.id), stats["bytes_in_use"], stats["bytes_limit"]
