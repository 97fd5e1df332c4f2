"""How this process's C allocator treats the large temporaries of XLA's CPU programs."""

import ctypes
import sys

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
