"""`device_memory`: what a device's memory holds and could hold, for the metrics."""

import os
from collections.abc import Iterator
from pathlib import Path

from dsjax.engine.device.process import available_bytes


def device_memory() -> Iterator[tuple[str, int, int]]:
    """(device, bytes in use, bytes that it has for this process) of each device of this process.

    Emulated devices share the host's memory: they are one device, `host`, whose bytes in use are the process's resident ones.
    """
    import jax

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
