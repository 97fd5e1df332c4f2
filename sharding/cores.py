"""Number of cores this process may use: the minimum of the machine's cores, its CPU affinity, and its container's quota."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_cores(proc: Path = _PROC, cgroup: Path = _CGROUP) -> float:
    """Return the CPU time available to this process, in cores. A quota can make this a fraction.

    A container with `--cpus 2` sees all cores of the machine. With one thread per core, it exhausts its quota early in each period and is
    throttled for the rest. The quota is the minimum over the process's cgroup and its ancestors, in version 2 (`cpu.max`) and version 1
    (`cpu.cfs_quota_us`).
    """
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(proc, cgroup)])


def most_threads() -> int:
    """Return the number of threads that can run at the same time within `available_cores`, at least 1."""
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
    """Return the folders of this process's CPU cgroups and of their ancestors.

    In a container, the path may be the host's and not exist. The container's own cgroup is then the root.
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
