"""How this process runs XLA's programs: where compiled ones are kept, how much memory there is, and what happens to what they free."""

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

LEAST_COMPILE_SECONDS = 0.2
"""Programs that compile faster than this are not worth a file."""

# glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def cache_folder() -> Path:
    """Where compiled programs and kernels are kept, as ``JAX_COMPILATION_CACHE_DIR`` or the user's cache folder says; it need not
    exist."""
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax" / "compiled"


def enable_compile_cache() -> Path | None:
    """Keep compiled programs on disk, in JAX's persistent cache, so that the next start finds them.

    Gives the directory, or None where it cannot be written.

    ``JAX_COMPILATION_CACHE_DIR`` decides where, if set; otherwise ``dsjax/compiled`` in the user's cache folder. The
    programs themselves do not depend on it.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs will not be kept: cannot write {folder} ({error.strerror})", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    return folder


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compile even what the cache holds, for whoever reads what the compiler writes beside its result."""
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


def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the kernel after each program.

    Gives whether that took effect: it is glibc's to do, on Linux; elsewhere nothing happens.

    By default glibc maps each allocation of more than 128 KiB anew and unmaps it when freed. XLA's CPU backend allocates
    its temporaries for every execution, so each step would fault in every page again: half of the time of a large product
    on the machine where this was measured (docs/measurements).
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
    """Bytes that this process can still take: what the machine has left, or its container's limit where that is less.

    Linux only; None elsewhere. What a container uses is not taken off its limit: most of that may be files' pages, which go
    when room is needed.
    """
    found: list[int] = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroup 2 and 1
        try:
            found.append(int((cgroup / name).read_text()))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return min(found, default=None)
