"""Control messages that processes exchange to form a group, and messages for users about missing or mismatched processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from dsjax.hosts.options import HostOptions


class JoinRequest(msgspec.Struct, frozen=True):
    """Request to join, and the process's identity."""

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str  # of its endpoint
    machine: str  # equal for processes that share a loopback interface
    port: int = 0  # of its endpoint

    @classmethod
    def of(cls, options: HostOptions, port: int = 0) -> JoinRequest:
        """Return the join request of this process."""
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
        """Name for log and error messages."""
        return f"process {self.process_id} ({self.host}, pid {self.pid})"

    @property
    def identity(self) -> str:
        """Identifies one start of a process: a restart keeps the id, and in a container perhaps the pid, but gets another port."""
        return f"{self.process_id}/{self.pid}/{self.port}"


class Prepared(msgspec.Struct, frozen=True):
    """Result of a process's local checks: the values that must be equal in all processes, or the reason why it cannot start."""

    alike: dict[str, Any] = {}  # by the names that messages use
    error: str | None = None


class JoinResponse(msgspec.Struct, frozen=True):
    """The group that a process has joined."""

    members: list[JoinRequest]
    service: str  # `HOST:PORT` of JAX's coordination service
    log: str  # `HOST:PORT` of process 0's broadcast log
    epoch: int = 0  # first mesh epoch that this process may be in; 0 while the group forms
    live_ids: list[int] = []  # processes of a group that had already formed
    wanted: str = ""  # the mesh that was requested last; empty: the initial one


class Announcement(msgspec.Struct, frozen=True):
    """Announcement of a new mesh epoch or, with `ended`, of the group's end."""

    number: int  # of the mesh epoch
    process_ids: list[int] = []  # processes with devices in the mesh; others wait for the next epoch
    device_ids: list[int] = []  # of the mesh, row by row
    options: dict[str, Any] = {}  # engine options that differ from the process's initial ones, such as `mesh`
    wanted: str = ""  # the requested mesh; the one in `options` is smaller while processes are missing
    reason: str = ""  # human-readable
    broken: int | None = None  # the previous mesh epoch, if it has failed: its collectives can never finish
    members: list[JoinRequest] = []  # all processes of the group; one that rejoined has a new port
    live_ids: list[int] = []  # processes that can join the next epoch
    left_out: dict[int, tuple[int, str]] = {}  # live processes that are excluded, by id: pid and reason
    ended: bool = False


def _machine() -> str:
    """Return the kernel's boot id and the network namespace, which together identify a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def waiting_message(options: HostOptions, requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str:
    """Return process 0's progress message: processes that have not connected yet, or have not finished their checks."""
    absent = [i for i in range(options.num_processes) if i not in requests]
    if not absent:
        slow = ", ".join(requests[i].name for i in sorted(requests) if i not in prepared)
        return f"All {options.num_processes} processes have come. Waiting until these have checked their options and model: {slow}"
    present = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"Waiting at {options.coordinator_text} for process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of "
        f"{options.num_processes}; here: {present}"
    )


def timeout_message(options: HostOptions, requests: Mapping[int, JoinRequest]) -> str:
    """Return the error that names the processes that did not connect in time."""
    absent = [str(i) for i in range(options.num_processes) if i not in requests]
    present = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"process{'es' if len(absent) > 1 else ''} {', '.join(absent)} of {options.num_processes} did not come to "
        f"{options.coordinator_text} within {options.start_timeout} s (--start-timeout); here: {present}. Start all with the same "
        "command and --process-id 0, 1, …"
    )


def first_mismatch(requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str | None:
    """Describe the first value in which any process differs from process 0; None if all are equal."""
    mismatches = (mismatch(requests[i], prepared[i], prepared[0]) for i in sorted(prepared))
    return next(filter(None, mismatches), None)


def mismatch(request: JoinRequest, prepared: Prepared, leader: Prepared) -> str | None:
    """Describe the first value in which a process differs from process 0 (`leader`); None if all are equal."""
    expected, values = leader.alike, prepared.alike
    for name in expected | values:  # in process 0's order
        if expected.get(name) != values.get(name):
            return (
                f"{request.name} has {name} {_shown(values.get(name))}, process 0 has {_shown(expected.get(name))}; "
                "start all processes alike"
            )
    return None


def id_error(request: JoinRequest, num_processes: int) -> str | None:
    """Return why a process's id or group size does not fit a group of `num_processes`; None if both do."""
    if request.num_processes != num_processes:
        return f"{request.name} has --num-processes {request.num_processes}, process 0 has {num_processes}; give all the same"
    if not 0 < request.process_id < num_processes:
        return f"{request.name} came, but ids go from 0 to {num_processes - 1}"
    return None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def loopback_error(requests: Mapping[int, JoinRequest]) -> str | None:
    """Return an error if a process listens on a loopback address and others are on another machine; else None."""
    if len({request.machine for request in requests.values()}) == 1:
        return None
    for _, request in sorted(requests.items()):
        if request.address.startswith("127.") or request.address == "::1":
            return (
                f"{request.name} listens at {request.address}, which other hosts cannot reach; give its own --host-address, "
                "or a --coordinator-address that is not the loopback interface's"
            )
    return None
