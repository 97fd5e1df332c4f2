"""`AttentionProcesses`: the processes that share an attention side's mesh, with a barrier at each layer.

If an expert process dies, some attention processes may have its results and others not. In a mesh collective, the former would wait for
the latter until the time limit breaks the mesh epoch. So all processes wait here first, without a limit.
"""

import struct
from collections import deque
from collections.abc import Sequence

from dsjax.engine.afd.expert_link import ExpertLink
from dsjax.hosts.group import HostGroup
from dsjax.messaging import Endpoint, Link, LinkListener, PeerLostError
from dsjax.messaging.link import LinkLostError

_ARRIVAL = struct.Struct("<QQ")
"""Index of the barrier, and the value that the process sends."""


class AttentionProcesses:
    """This process of an attention side, with links to and from each other process of its mesh epoch.

    All processes create it at the same point, call `connect` before the first step, then `arrive` and `wait` for each barrier. A single
    process never waits.

    Args:
        name: the side's name; all processes use the one that process 0 gives. group: None if this process is alone.

    Attributes:
        epoch: the side's mesh epoch. count: number of its processes. index: of this process. is_leader: whether this process leads them.
    """

    def __init__(self, endpoint: Endpoint, name: bytes, group: HostGroup | None = None):
        self.endpoint, self._group = endpoint, group
        self.name, self.epoch, self.is_leader = name, 0, True
        own_id, ids = 0, [0]
        if group is not None:
            self.name = group.agreement.all_gather("attention side", name)[0]
            self.epoch, self.is_leader = group.epoch, group.is_leader
            own_id, ids = group.options.process_id, [member.process_id for member in group.present]
        self.index, self.count = ids.index(own_id), len(ids)
        # process ID → messages received and not yet awaited; a process may be a barrier ahead
        self._arrivals = {str(other): deque[tuple[int, int]]() for other in ids if other != own_id}
        self._links: dict[str, Link] = {}
        self._listener: LinkListener | None = None
        self._barrier = 0
        self._to_experts: set[ExpertLink] = set()
        self._is_abandoned = False

    def connect(self) -> None:
        """Connect to the other processes.

        Raises:
            GroupError: another process is gone or unreachable.
        """
        if not self._arrivals:
            return
        agreement = self._group.agreement
        self._listener = LinkListener(self.endpoint, list(self._arrivals))
        listeners = agreement.all_gather("attention processes", (self._listener.address, self._listener.ticket))
        agreement.run("attention connections", lambda: self._connect(listeners))
        if self._is_abandoned:
            self.abandon()

    def arrive(self, value: int) -> None:
        """Tell the other processes that this one has its results, and send a value.

        Raises:
            RuntimeError: another process is gone, or its step has failed.
        """
        for process, link in self._links.items():
            try:
                link.send(_ARRIVAL.pack(self._barrier, value))
            except PeerLostError as error:
                raise _gone(process) from error

    def wait(self, value: int) -> int:
        """Wait until all other processes have arrived; return the greatest value, including `value`. Errors as in `arrive`."""
        while missing := [process for process, arrivals in self._arrivals.items() if not arrivals]:
            try:
                message = self._listener.receive()
                self._arrivals[message.sender].append(_ARRIVAL.unpack(message.header))
            except (PeerLostError, struct.error) as error:
                raise _gone(error.name if isinstance(error, LinkLostError) else missing[0]) from error
        for process, arrivals in self._arrivals.items():
            barrier, other_value = arrivals.popleft()
            if barrier != self._barrier:
                raise RuntimeError(
                    f"process {process} of the attention side waits at its layer {barrier}, and this process at {self._barrier}"
                )
            value = max(value, other_value)
        self._barrier += 1
        return value

    def add(self, link: ExpertLink) -> None:
        """Register a link to an expert process. `abandon` and `close` also end it."""
        self._to_experts.add(link)
        if self._is_abandoned:
            link.give_up()

    def remove(self, link: ExpertLink) -> None:
        """Close a registered link."""
        self._to_experts.discard(link)
        link.close()

    def give_up(self) -> None:
        """Abandon the side if it has other processes. They and the experts then stop waiting for this process."""
        if self._arrivals:
            self.abandon()

    def abandon(self) -> None:
        """End all waiting because this mesh epoch of the attention side has failed. Thread-safe."""
        self._is_abandoned = True
        for link in self._links.values():
            link.close()
        if self._listener is not None:
            self._listener.close()  # also ends a thread's wait
        for link in list(self._to_experts):
            link.give_up()

    def close(self) -> None:
        """Close all links, which also ends the wait of other processes for this one."""
        self.abandon()
        for link in list(self._to_experts):
            self.remove(link)
        self.endpoint.release()

    def _connect(self, listeners: Sequence[tuple[str, bytes]]) -> None:
        own_id = self._group.options.process_id
        for member, listener in zip(self._group.present, listeners, strict=True):
            if member.process_id != own_id:
                self._links[str(member.process_id)] = self._group.link_to(member.process_id, listener, str(own_id))


def _gone(process: str) -> RuntimeError:
    return RuntimeError(
        f"process {process} of the attention side was waited for at a layer, and has gone or could not compute it"
    )
