"""What processes say to each other to be a group: the bodies of control messages."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from dsjax.hosts.options import HostOptions


class JoinRequest(msgspec.Struct, frozen=True):
    """A process, as it says when it comes. machine: equal for processes that share a loopback interface. port: of its endpoint."""

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str
    machine: str
    port: int = 0

    @classmethod
    def of(cls, options: HostOptions, port: int = 0) -> JoinRequest:
        """This process."""
        return cls(
            options.process_id,
            options.num_processes,
            socket.gethostname(),
            os.getpid(),
            options.address,
            _machine(),
            port,
        )

    @property
    def name(self) -> str:
        """For messages."""
        return f"process {self.process_id} ({self.host}, pid {self.pid})"

    @property
    def identity(self) -> str:
        """What tells it from another process under its id. In containers both may have the same pid, and the port is whatever was free."""
        return f"{self.process_id}/{self.pid}/{self.port}"


class Prepared(msgspec.Struct, frozen=True):
    """What must be alike in all processes, by name as messages have it; or why this process cannot start."""

    alike: dict[str, Any] = {}
    error: str | None = None


class JoinResponse(msgspec.Struct, frozen=True):
    """The group that a process is in.

    service: `HOST:PORT` of JAX's coordination service. log: of process 0's broadcast log. generation: the first one that this process may
    be in. here: where the group had formed before, the ids of those that live. wanted: the mesh that was asked for last; empty: that of
    the start.
    """

    members: list[JoinRequest]
    service: str
    log: str
    generation: int = 0
    here: list[int] = []
    wanted: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """A generation begins; or, with `ended`, there is no further one.

    Attributes:
        process_ids: who has devices in its mesh; others of the group wait for the next generation. live_ids: who can be in the next one.
        device_ids: of the mesh, row by row.
        wanted: the mesh that was asked for; the one of `options` is smaller while processes are missing.
        options: the engine's options that differ from those the process was started with; `mesh` is one of them.
        reason: for people.
        members: all processes of the group: one that came back answers at another port than before.
        left_out: processes that live and are gone on without, by id: the pid, and why.
        broken: the generation before it, where that has broken: nothing that still waits in its collectives can be done any more.
    """

    number: int
    process_ids: list[int] = []
    device_ids: list[int] = []
    options: dict[str, Any] = {}
    wanted: str = ""
    reason: str = ""
    broken: int | None = None
    members: list[JoinRequest] = []
    live_ids: list[int] = []
    left_out: dict[int, tuple[int, str]] = {}
    ended: bool = False


def _machine() -> str:
    """Name what processes share that share a loopback interface: this boot of this kernel, and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
