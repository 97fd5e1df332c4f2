"""Who may be in a group: what is wrong with a process, or with all that have come, in words for its user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsjax.hosts.options import HostOptions
from dsjax.hosts.wire import JoinRequest, Prepared


def waited_for(options: HostOptions, requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str:
    """Whom process 0 waits for, and who has come."""
    absent = [i for i in range(options.num_processes) if i not in requests]
    if not absent:
        slow = ", ".join(requests[i].name for i in sorted(requests) if i not in prepared)
        return f"All {options.num_processes} processes have come. Waiting until these have checked their options and model: {slow}"
    here = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"Waiting at {options.coordinator_text} for process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of "
        f"{options.num_processes}; here: {here}"
    )


def missing(options: HostOptions, requests: Mapping[int, JoinRequest]) -> str:
    """Who did not come in time."""
    absent = [str(i) for i in range(options.num_processes) if i not in requests]
    here = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"process{'es' if len(absent) > 1 else ''} {', '.join(absent)} of {options.num_processes} did not come to "
        f"{options.coordinator_text} within {options.start_timeout} s (--start-timeout); here: {here}. Start all with the same "
        "command and --process-id 0, 1, …"
    )


def unlike(requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str | None:
    """The first thing that is not the same everywhere."""
    differences = (unlike_first(requests[i], prepared[i], prepared[0]) for i in sorted(prepared))
    return next(filter(None, differences), None)


def unlike_first(request: JoinRequest, prepared: Prepared, first: Prepared) -> str | None:
    """The first thing that a process has otherwise than process 0; None where they are alike."""
    expected, values = first.alike, prepared.alike
    for name in sorted(expected.keys() | values.keys(), key=lambda name: (list(expected) + [name]).index(name)):
        if expected.get(name) != values.get(name):
            return (
                f"{request.name} has {name} {_shown(values.get(name))}, process 0 has {_shown(expected.get(name))}; "
                "start all processes alike"
            )
    return None


def why_no_place(request: JoinRequest, num_processes: int) -> str | None:
    """Why a group of so many processes has no place for one that was started otherwise; None: it has."""
    if request.num_processes != num_processes:
        return f"{request.name} has --num-processes {request.num_processes}, process 0 has {num_processes}; give all the same"
    if not 0 < request.process_id < num_processes:
        return f"{request.name} came, but ids go from 0 to {num_processes - 1}"
    return None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def on_loopback(requests: Mapping[int, JoinRequest]) -> str | None:
    """A process on another machine cannot reach an address that is the loopback interface's."""
    if len({request.machine for request in requests.values()}) == 1:
        return None
    for _, request in sorted(requests.items()):
        if request.address.startswith("127.") or request.address == "::1":
            return (
                f"{request.name} listens at {request.address}, which other hosts cannot reach; give its own --host-address, "
                "or a --coordinator-address that is not the loopback interface's"
            )
    return None
