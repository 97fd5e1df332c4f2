"""`Processes`: the processes of a benchmark, one or a group over several hosts; `Results`: the measurements of their run.

JAX is imported when the group forms.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsjax.hosts import GroupOptions, HostOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsjax.hosts.group import HostGroup
    from sharding import MeshSpec

Agree = Callable[[str, Any], list[Any]]
"""`agree(name, value)`: an all-gather of a value over the processes, in the order of their ids."""


def alone(what: str, value: Any) -> list[Any]:
    """Return the value alone: `Agree` of one process."""
    return [value]


@dataclass
class Results:
    """The timed rows, and the skipped cases, each with its reason."""

    rows: list[Any] = field(default_factory=list)
    skipped: list[tuple[Any, str]] = field(default_factory=list)
    interrupted: bool = False  # Ctrl-C ended the run
    failure: Exception | None = None  # the error of another process, or of the connection to it, that ended the run

    @property
    def partial(self) -> bool:
        """Whether the run ended before its last case."""
        return self.interrupted or self.failure is not None

    @contextlib.contextmanager
    def collecting(self, agree: Agree) -> Iterator[None]:
        """Keep the results so far when Ctrl-C, or in a group the loss of another process, ends the block."""
        import jax

        from dsjax.hosts.rendezvous import GroupError

        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        except (GroupError, jax.errors.JaxRuntimeError) as error:
            if agree is alone:
                raise
            self.failure = error


def as_flags(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass of options by their flags, as a group's messages name them."""
    return {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(options).items()}


class Processes:
    """The processes of a benchmark. group: None for a single process.

    leads: whether this process (process 0, or the only one) prints and writes. agree: an `Agree`, which all processes call with the same
    names in the same order; it raises `GroupError` if another process has left or failed.
    """

    def __init__(self, group: HostGroup | None = None):
        self._group = group
        self.leads = group is None or group.is_leader
        self.agree: Agree = alone if group is None else group.agreement.all_gather

    @property
    def members(self) -> list[dict[str, Any]]:
        """Id and host name of each process of a group, for JSON."""
        members = self._group.members if self._group else []
        return [{"process_id": member.process_id, "host": member.host} for member in members]

    def check_shares(self, spec: MeshSpec, mesh: Mesh) -> None:
        """Check that each process has a device of the mesh.

        Raises:
            UserError: a process has none.
        """
        if self._group is not None:
            from dsjax.engine.setup.stages import check_shares

            check_shares(spec, {device.process_index for device in mesh.devices.flat}, self._group)

    def report(self, results: Results, write: Callable[[], None]) -> None:
        """Print and write in process 0 while the others wait. Its errors are raised in all processes.

        Raises:
            GroupError, KeyboardInterrupt: the run of a group ended early. Process 0 has written the results until then.
        """
        if self._group is None:
            write()
        elif results.partial:  # the others wait for this process or are gone: end the group
            if self.leads:
                write()
            raise results.failure or KeyboardInterrupt
        else:
            self._group.agreement.run("report", write if self.leads else lambda: None)


@contextlib.contextmanager
def measuring_together(
    options: GroupOptions, num_devices: int, alike: Callable[[], Mapping[str, Any]]
) -> Iterator[Processes]:
    """Form the group that the options name, and leave it after the block. Emulates CPU devices, so JAX must not have started.

    num_devices: devices of the mesh. alike: called before JAX starts; returns, by the names that messages use, values that must be equal in
    all processes, besides versions.

    Raises:
        UserError, GroupError: the options are wrong, or the group does not form; while measuring, one of its processes left or failed.
    """
    from sharding.emulation import emulate_devices

    hosts = HostOptions.find(options)
    emulate_devices(-(-num_devices // (hosts.num_processes if hosts else 1)))
    if hosts is None:
        yield Processes()
        return
    import jax

    from dsjax.engine.elastic.joining import versions
    from dsjax.hosts.group import HostGroup
    from dsjax.hosts.rendezvous import GroupError

    group = HostGroup.start(hosts, lambda: versions() | dict(alike()))
    reason = None
    try:
        yield Processes(group)
    except (GroupError, jax.errors.JaxRuntimeError) as error:
        explained = _explained(group, error)
        reason = str(explained)
        if explained is error:
            raise
        raise explained from error
    except BaseException as error:
        reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        raise
    finally:
        group.leave(reason)


def _explained(group: HostGroup, error: Exception) -> Exception:
    """Return why a joint operation failed: a process is gone, or process 0 has ended the group; else the error itself."""
    from dsjax.hosts.rendezvous import GroupError

    if group.is_leader:
        return error if isinstance(error, GroupError) else group.find_loss() or error
    last = group.next_announcement(group.options.heartbeat_timeout + 2.0)
    if last is None:
        return error
    return GroupError(f"{group.members[0].name} has ended" + (f": {last.reason}" if last.reason else ""))
