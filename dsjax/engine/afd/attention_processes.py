"""``AttentionProcesses``: the processes that share the mesh of an attention side, which wait for each other at each layer.

Each has the rows of its own devices computed by the experts, and gets its own answers. Where a process with experts dies, some may have
their answers and others not. Who has them must not go on into a collective of the mesh: that has a time limit, after which the generation
breaks. So all go on when all have them. Waiting takes no collective, and has no limit while the others live.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping

from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.secure_channel import SecureChannel, connect
from dsjax.hosts.secure_listener import SecureListener

_SERVICE = "attention"
_LOOK_SECONDS = 0.2
_OPENING = struct.Struct("<QQ")
"""The generation and the process of who connects."""
_WORD = struct.Struct("<QQ")
"""Which of all waits it is, and a number."""


class AttentionProcesses:
    """The other processes of a generation, each over a connection of its own.

    All make it at the same place, and then ``tell`` and ``wait`` in the same order.

    Args:
        group: in the generation that is being made.

    Attributes:
        leads: whether this process is the one that speaks for all.

    Raises:
        GroupError: another process is gone, or could not be reached.
    """

    def __init__(self, group: HostGroup):
        self._group, self._generation = group, group.generation
        self._own, self.leads = group.options.process_id, group.is_leader
        self._channels: dict[int, SecureChannel] = {}
        self._come = threading.Condition()
        self._number, self._closed = 0, False
        listener = self._listen()
        try:
            ports = group.agreement.ask("attention processes", listener.port)
            ids = [member.process_id for member in group.present]
            group.agreement.run("attention connections", lambda: self._connect(dict(zip(ids, ports, strict=True))))
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def tell(self, number: int) -> None:
        """Say that this process has its answers, and a number.

        Raises:
            RuntimeError: another process is gone, or its step has failed.
        """
        for process, channel in self._channels.items():
            try:
                channel.send(_WORD.pack(self._number, number))
            except OSError as error:
                raise self._gone(process) from error

    def wait(self, number: int) -> int:
        """Wait until all others have told, and give the greatest number, ``number`` among them.

        Raises:
            RuntimeError: as of ``tell``.
        """
        for process, channel in self._channels.items():
            try:
                place, theirs = _WORD.unpack(channel.receive(_WORD.size))
            except (OSError, EOFError, struct.error) as error:
                raise self._gone(process) from error
            if place != self._number:
                raise RuntimeError(
                    f"process {process} of the attention side waits at its layer {place}, and this process at {self._number}"
                )
            number = max(number, theirs)
        self._number += 1
        return number

    def close(self) -> None:
        """End the connections, also under a thread that waits; who waits for this process elsewhere hears of it."""
        self._closed = True
        for channel in list(self._channels.values()):
            channel.close()

    def _gone(self, process: int) -> RuntimeError:
        return RuntimeError(
            f"process {process} of the attention side was waited for at a layer, and has gone or could not compute it"
        )

    def _listen(self) -> SecureListener:
        address = self._group.options.address
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.bind((address, 0))
            return SecureListener(listener, self._group.credentials, {_SERVICE: self._enter}, "dsjax-attention")
        except BaseException:
            listener.close()
            raise

    def _enter(self, channel: SecureChannel) -> None:
        """Let in a process with a higher id, in a thread of the listener."""
        channel.settimeout(self._group.options.heartbeat_timeout)
        try:
            generation, process = _OPENING.unpack(channel.receive(_OPENING.size))
        except struct.error as error:
            raise ConnectionError(f"{channel.peer} does not begin as a process with attention does: {error}") from error
        if generation != self._generation:
            raise ConnectionError(f"{channel.peer} is of generation {generation}, expected {self._generation}")
        higher = {member.process_id for member in self._group.present if member.process_id > self._own}
        if process not in higher or process in self._channels:
            raise ConnectionError(
                f"{channel.peer} connects as process {process}, which is not expected, or has come already"
            )
        self._keep(process, channel)

    def _connect(self, ports: Mapping[int, int]) -> None:
        """Connect to the processes with lower ids, and wait for the others."""
        members = {member.process_id: member for member in self._group.present}
        for process, port in ports.items():
            if process < self._own:
                try:
                    channel = connect((members[process].address, port), _SERVICE, self._group.credentials)
                    channel.send(_OPENING.pack(self._generation, self._own))
                except (OSError, EOFError) as error:
                    raise GroupError(f"{members[process].name} cannot be reached at port {port}: {error}") from error
                self._keep(process, channel)
        end = time.monotonic() + self._group.options.start_timeout
        with self._come:
            while len(self._channels) < len(ports) - 1:
                self._group.check()
                if time.monotonic() > end:
                    missing = sorted(set(ports) - set(self._channels) - {self._own})
                    raise GroupError(f"processes {missing} of the attention side do not connect to {self._own}")
                self._come.wait(_LOOK_SECONDS)

    def _keep(self, process: int, channel: SecureChannel) -> None:
        channel.settimeout(None)
        channel.keep_alive(self._group.options.heartbeat_timeout, unacknowledged=True)
        with self._come:
            self._channels[process] = channel
            self._come.notify_all()
        if self._closed:
            channel.close()
