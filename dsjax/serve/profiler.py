"""JAX traces of the running server, and what one says of the time in exchanges between devices."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dsjax.serve.errors import ApiError

_EXCHANGE = re.compile(
    r"(ragged[-_])?all[-_](to[-_]all|gather|reduce)|reduce[-_]scatter|collective[-_](permute|broadcast)|p(sum|max|min|permute|broadcast)"
)
"""XLA's names of collectives, and JAX's: an operation has that of the primitive which it was made from, where there is one."""

_AROUND_OTHERS = re.compile(r"(while|call|conditional|async)\b")
"""Operations that others run inside of: their time is counted there."""


class DeviceTime(NamedTuple):
    """Seconds of operations, summed over devices. What runs at the same time on one device counts twice."""

    exchanges: float
    all: float

    @property
    def exchange_share(self) -> float | None:
        """Exchanges' part of all; None where no operation was seen."""
        return self.exchanges / self.all if self.all else None


def device_time(folder: Path) -> DeviceTime:
    """Read from the newest trace under a folder how long devices ran operations, and how long of it collectives.

    A collective's time is from its begin to its end on a device, and so has the waiting for the last device to come; of an
    asynchronous one it is that of its start and of its done, which is where a device waits, and not what passes behind other work.
    """
    import jax

    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return DeviceTime(0.0, 0.0)
    planes = jax.profiler.ProfileData.from_file(str(newest)).planes
    events = (event for plane in planes for line in plane.lines for event in line.events)
    return sum_of((dict(event.stats).get("hlo_op"), event.duration_ns * 1e-9) for event in events)


def sum_of(operations: Iterable[tuple[str | None, float]]) -> DeviceTime:
    """Add up operations of (name in the compiled program, seconds); those without a name are the host's."""
    exchanges = everything = 0.0
    for name, seconds in operations:
        if name is None or _AROUND_OTHERS.match(name):
            continue
        everything += seconds
        if _EXCHANGE.match(name):
            exchanges += seconds
    return DeviceTime(exchanges, everything)


class Profiler:
    """JAX traces of the running server: at most one at a time, into a directory that no request can name. Called in the engine's thread."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._running = False

    def start(self) -> str:
        """Begin a trace.

        Raises:
            ApiError: no directory was configured, or a trace is running.
        """
        if self._directory is None:
            raise ApiError(
                400, "this server does not profile; it was started without --profile-dir", code="no_profile_dir"
            )
        if self._running:
            raise ApiError(400, "a profile is running; stop it first", code="profile_running")
        import jax

        jax.profiler.start_trace(self._directory)
        self._running = True
        return "profiling"

    def stop(self) -> Path:
        """End the trace and write it; gives the folder.

        Raises:
            ApiError: none is running.
        """
        if not self._running:
            raise ApiError(400, "no profile is running; start one first", code="no_profile")
        import jax

        self._running = False
        jax.profiler.stop_trace()
        return Path(self._directory)
