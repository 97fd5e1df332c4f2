"""What this machine is: its processor's name and its memory, without JAX."""

import os
import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """The processor as the kernel names it, and how many cores this machine has of it."""
    name = platform.processor() or platform.machine()
    try:
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        name = match.group(1).strip() if match else name
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
