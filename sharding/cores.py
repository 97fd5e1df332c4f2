"""Number of cores this process may use: the minimum of the machine's cores, its CPU affinity, and its container's quota."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_cores(proc: Path = _PROC, cgroup: Path = _CGROUP) -> float:
    """Return the CPU time available to this process, in cores. A quota can make this a fraction.

    A container with `--cpus 2` sees all cores of the machine; with a thread on each, it is throttled for most of each period. The quota is
    the minimum over the process's cgroup and its ancestors, in version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`).
    """
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(proc, cgroup)])


def most_threads() -> int:
    """Return the number of threads that can run at the same time within `available_cores`, at least 1."""
    return max(1, int(available_cores()))


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """Yield the quota, in cores, of each cgroup that has one."""
    for group in _groups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no quota
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota = int((group / "cpu.cfs_quota_us").read_text())
            if quota > 0:  # −1: no quota
                yield quota / int((group / "cpu.cfs_period_us").read_text())


def _groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Return the folders of this process's CPU cgroups and of their ancestors.

    `/proc/self/cgroup` in a container may name a path of the host, which does not exist here. `cgroup` is then the container's own cgroup.
    """
    yield from (cgroup, cgroup / "cpu", cgroup / "cpu,cpuacct")
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]  # v2 "0::/path", v1 "4:cpu,cpuacct:/path"
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (cgroup / controllers, cgroup / "cpu") if controllers else (cgroup,)
        own_path = PurePosixPath(path.lstrip("/"))
        yield from (mount / group for group in (own_path, *own_path.parents) for mount in mounts)
