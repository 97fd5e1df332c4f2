"""JAX traces of the running server, and the share of a trace's device time spent in collectives."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dsjax.serve.errors import ApiError

_EXCHANGE = re.compile(
    r"(ragged[-_])?all[-_](to[-_]all|gather|reduce)|reduce[-_]scatter|collective[-_](permute|broadcast)|p(sum|max|min|permute|broadcast)"
)
"""Names of collectives in XLA and in JAX. An operation that comes from a JAX primitive keeps the primitive's name."""

_AROUND_OTHERS = re.compile(r"(while|call|conditional|async)\b")
"""Operations that contain others; only the time of the inner operations is counted."""


class DeviceTime(NamedTuple):
    """Seconds spent in operations, summed over devices. Operations that overlap on a device both count."""

    exchanges: float
    all: float

    @property
    def exchange_share(self) -> float | None:
        """Share of the time spent in collectives, 0 to 1; None if there are no operations."""
        return self.exchanges / self.all if self.all else None


def device_time(folder: Path) -> DeviceTime:
    """Return the time of operations and of collectives in the newest trace under a folder.

    A collective's time on a device includes waiting for the last device. For an asynchronous collective, only its start and done
    operations count, during which the device waits, not the part that overlaps other work.
    """
    import jax

    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return DeviceTime(exchanges=0.0, all=0.0)
    planes = jax.profiler.ProfileData.from_file(str(newest)).planes
    events = (event for plane in planes for line in plane.lines for event in line.events)
    return sum_of((dict(event.stats).get("hlo_op"), event.duration_ns * 1e-9) for event in events)


def sum_of(operations: Iterable[tuple[str | None, float]]) -> DeviceTime:
    """Sum operations, given as (name in the compiled program, seconds). Skip operations without a name, which ran on the host."""
    exchanges = everything = 0.0
    for name, seconds in operations:
        if name is None or _AROUND_OTHERS.match(name):
            continue
        everything += seconds
        if _EXCHANGE.match(name):
            exchanges += seconds
    return DeviceTime(exchanges, everything)


class Profiler:
    """Writes JAX traces, one at a time, to a directory that requests cannot choose. Called in the engine's thread."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._running = False

    def start(self) -> str:
        """Start a trace.

        Raises:
            ApiError: no directory was configured, or a trace is running.
        """
        if self._directory is None:
            reason = "this server does not profile; it was started without --profile-dir"
            raise ApiError(400, reason, code="no_profile_dir")
        if self._running:
            raise ApiError(400, "a profile is running; stop it first", code="profile_running")
        import jax

        jax.profiler.start_trace(self._directory)
        self._running = True
        return "profiling"

    def stop(self) -> Path:
        """End the trace, write it and return its folder.

        Raises:
            ApiError: no trace is running.
        """
        if not self._running:
            raise ApiError(400, "no profile is running; start one first", code="no_profile")
        import jax

        self._running = False
        jax.profiler.stop_trace()
        return Path(self._directory)
