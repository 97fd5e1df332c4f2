"""How many cores this process may use: the machine's, those that it is bound to, or its container's quota, whichever is least."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_cores(proc: Path = _PROC, cgroup: Path = _CGROUP) -> float:
    """Cores' worth of time that this process gets, which a quota may make a fraction.

    A container with `--cpus 2` sees all cores of its machine. With a thread for each, it uses its quota up in a part of each period and
    stands still for the rest. The quota is that of the process's control group or of one above it, whichever is least, in version 2
    (`cpu.max`) and version 1 (`cpu.cfs_quota_us`).
    """
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(proc, cgroup)])


def most_threads() -> int:
    """Threads that can compute at the same time within `available_cores`; at least 1."""
    return max(1, int(available_cores()))


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    for folder in _groups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or no quota: "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            if quota > 0:  # −1: no quota
                yield quota / int((folder / "cpu.cfs_period_us").read_text())


def _groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Folders of this process's control groups for processor time, and of all above them.

    In a container the path may be that of the host, of which nothing is there; the container's own group is then the root.
    """
    yield from (cgroup, cgroup / "cpu", cgroup / "cpu,cpuacct")
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (cgroup / controllers, cgroup / "cpu") if controllers else (cgroup,)
        here = PurePosixPath(path.lstrip("/"))
        yield from (mount / group for group in (here, *here.parents) for mount in mounts)
