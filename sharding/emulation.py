"""Emulating a mesh on the host: CPU devices that XLA makes on request, before JAX starts its backend."""

import os
import re
import sys

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def emulate_devices(count: int) -> None:
    """Make sure that at least ``count`` CPU devices will exist, without starting JAX.

    Has no effect on accelerators: the flags concern XLA's CPU platform only. Call it before anything touches
    ``jax.devices()``; where the backend runs already, the devices that exist are all there will be, and
    ``MeshSpec.build`` says so if they are too few.

    ``PJRT_NPROC`` sizes the thread pool that runs the devices' programs. Each device of a collective occupies a
    thread while it waits for the others, so a pool smaller than the mesh deadlocks; twice the devices was safe.
    """
    if count < 1:
        raise ValueError(f"found {count} devices to emulate, expected at least 1")
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.findall(rf"{_COUNT_FLAG}=(\d+)", flags)
    present = int(found[-1]) if found else 1  # XLA takes the last of several
    if present < count:
        rest = re.sub(rf"{_COUNT_FLAG}=\d+", "", flags)
        os.environ["XLA_FLAGS"] = f"{rest} {_COUNT_FLAG}={count}".strip()
    threads = max(2 * count, os.cpu_count() or 1)
    if int(os.environ.get("PJRT_NPROC", "0")) < threads:
        os.environ["PJRT_NPROC"] = str(threads)
    if "jax" in sys.modules and not backend_is_running():
        # JAX was imported but has not started: its own option still decides, over the flag.
        config = sys.modules["jax"].config
        asked = config.jax_num_cpu_devices  # −1: not set
        if max(asked, present if asked < 0 else 0) < count:
            config.update("jax_num_cpu_devices", count)


def backend_is_running() -> bool:
    """Whether JAX has started a backend in this process, after which the number of devices is fixed."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge and bridge.backends_are_initialized())
