"""The host's memory: how much of it there is, and how the C allocator treats the large temporaries of XLA's CPU programs."""

import ctypes
import sys
from pathlib import Path

# glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the kernel after each program; whether it took effect.

    By default glibc maps each allocation of more than 128 KiB anew and unmaps it when freed. XLA's CPU backend allocates
    its temporaries for every execution, so each step would fault in every page again: half of the time of a large product
    on the machine where this was measured (docs/measurements). Linux with glibc only; elsewhere nothing happens.
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
