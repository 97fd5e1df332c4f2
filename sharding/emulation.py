"""Emulation of a mesh on the host: XLA creates the requested number of CPU devices when JAX starts its backend."""

import os
import re
import sys

from sharding.cores import most_threads
from sharding.jax_internals import backend_is_running

MOST_DEVICES = 4096
"""Upper limit of emulated devices: the backend starts in 1.4 s with 1,024 devices, 5 s with 4,096, and 33 s with 10,000."""
_ADDRESS_SPACE_OF_A_DEVICE = 18 << 20
_THREADS_OF_A_DEVICE = 2

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def emulate_devices(count: int) -> None:
    """Make sure that JAX's CPU backend will have at least ``count`` devices, without starting it.

    Call it before anything calls ``jax.devices()``. Has no effect on accelerators, on a backend that runs, and if ``count`` exceeds
    ``most_devices()``, because XLA would abort the process or be silent for minutes. ``MeshSpec.build`` raises if there are too few.

    ``PJRT_NPROC`` sets the size of the thread pool that runs the devices' programs. Each device of a collective occupies a thread while it
    waits for the others, so a pool smaller than the mesh deadlocks; twice the number of devices is safe.
    """
    if count < 1:
        raise ValueError(f"found {count} devices to emulate, expected at least 1")
    if count > most_devices()[0]:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    counts = re.findall(rf"{_COUNT_FLAG}=(\d+)", flags)
    by_flag = int(counts[-1]) if counts else 1  # XLA uses the last occurrence
    if by_flag < count:
        rest = re.sub(rf"{_COUNT_FLAG}=\d+", "", flags)
        os.environ["XLA_FLAGS"] = f"{rest} {_COUNT_FLAG}={count}".strip()
    threads = max(2 * count, most_threads())
    if int(os.environ.get("PJRT_NPROC", "0")) < threads:
        os.environ["PJRT_NPROC"] = str(threads)
    if "jax" in sys.modules and not backend_is_running():
        # JAX is imported but its backend has not started: JAX's own option takes precedence over the XLA flag.
        config = sys.modules["jax"].config
        by_option = config.jax_num_cpu_devices  # −1: not set
        if max(by_option, by_flag if by_option < 0 else 0) < count:
            config.update("jax_num_cpu_devices", count)


def most_devices() -> tuple[int, str]:
    """Return how many CPU devices this process can emulate, and a phrase for an error message that names the limit."""
    bounds = [(MOST_DEVICES, "more take minutes to start")]
    try:
        import resource
    except ImportError:  # not a POSIX system: no such limits
        return bounds[0]
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if threads != resource.RLIM_INFINITY:
        bounds.append((threads // _THREADS_OF_A_DEVICE, f"this user may have {threads:,} threads (ulimit -u)"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        limit = f"this process may have {space / 1e9:.1f} GB of address space (ulimit -v)"
        bounds.append((max(1, (space - (2 << 30)) // _ADDRESS_SPACE_OF_A_DEVICE), limit))
    return min(bounds)
