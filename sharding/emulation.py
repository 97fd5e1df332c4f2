"""Emulating a mesh on the host: CPU devices that XLA makes on request, before JAX starts its backend."""

import os
import re
import sys

from sharding.cores import most_threads
from sharding.jax_internals import backend_is_running

MOST_DEVICES = 4096
"""More are never emulated: the backend's start takes 1.4 s with 1,024 devices, 5 s with 4,096, and 33 s with 10,000."""
_ADDRESS_SPACE_OF_A_DEVICE = 18 << 20
_THREADS_OF_A_DEVICE = 2

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def emulate_devices(count: int) -> None:
    """Make sure that at least ``count`` CPU devices will exist, without starting JAX.

    Has no effect on accelerators: the flags concern XLA's CPU platform only. Call it before anything touches
    ``jax.devices()``; where the backend runs already, the devices that exist are all there will be, and
    ``MeshSpec.build`` says so if they are too few.

    ``PJRT_NPROC`` sizes the thread pool that runs the devices' programs. Each device of a collective occupies a
    thread while it waits for the others, so a pool smaller than the mesh deadlocks; twice the devices was safe. Beyond that it has
    as many as this process may use cores, where XLA alone would take all of the machine's.

    More devices than ``most_devices()`` are not emulated at all: XLA would abort the process, or be silent for minutes.
    ``MeshSpec.build`` then says so.
    """
    if count < 1:
        raise ValueError(f"found {count} devices to emulate, expected at least 1")
    if count > most_devices()[0]:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    counts = re.findall(rf"{_COUNT_FLAG}=(\d+)", flags)
    present = int(counts[-1]) if counts else 1  # XLA takes the last of several
    if present < count:
        rest = re.sub(rf"{_COUNT_FLAG}=\d+", "", flags)
        os.environ["XLA_FLAGS"] = f"{rest} {_COUNT_FLAG}={count}".strip()
    threads = max(2 * count, most_threads())
    if int(os.environ.get("PJRT_NPROC", "0")) < threads:
        os.environ["PJRT_NPROC"] = str(threads)
    if "jax" in sys.modules and not backend_is_running():
        # JAX was imported but has not started: its own option still decides, over the flag.
        config = sys.modules["jax"].config
        asked = config.jax_num_cpu_devices  # −1: not set
        if max(asked, present if asked < 0 else 0) < count:
            config.update("jax_num_cpu_devices", count)


def most_devices() -> tuple[int, str]:
    """How many CPU devices this process can emulate, and what bounds them, as a phrase."""
    bounds = [(MOST_DEVICES, "more take minutes to start")]
    try:
        import resource
    except ImportError:  # no POSIX system, and no such bounds
        return bounds[0]
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if threads != resource.RLIM_INFINITY:
        bounds.append((threads // _THREADS_OF_A_DEVICE, f"this user may have {threads:,} threads (ulimit -u)"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        limit = f"this process may have {space / 1e9:.1f} GB of address space (ulimit -v)"
        bounds.append((max(1, (space - (2 << 30)) // _ADDRESS_SPACE_OF_A_DEVICE), limit))
    return min(bounds)
