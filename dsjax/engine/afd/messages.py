"""Messages between an attention side and its expert processes. `ExpertLinks`: counters of the links to these processes. No JAX.

`Open`, `Compile`, `Stage` and `Place` are requests over a control connection. `Opened` names the link for calls: a `Call` with rows is
answered by an `Answered` with results. A call does not depend on earlier messages, so it can be repeated to another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

OPEN, COMPILE, STAGE, PLACE = "experts.open", "experts.compile", "experts.stage", "experts.place"


class Open(msgspec.Struct, frozen=True, array_like=True):
    """First message of an attention process, answered by an `Opened` once the slots hold its placement.

    Attributes:
        space: compatibility fingerprint: everything that answers depend on besides rows and placement. Must be equal on both sides.
        placement: ``[MoE layers, slots]`` int32, the logical expert in each physical slot.
        side: name of the attention side. While one side moves experts, no other side may be connected.
        first: number of the first expert device expected at this address.
        generation: mesh epoch of the attention side; older epochs are refused.
        process, processes: index of this process in the attention side, and number of its processes.
        change: number of the expert side within the epoch. An expert process belongs to one expert side only.
    """

    space: dict[str, Any]
    placement: bytes = b""
    side: bytes = b""
    first: int = 0
    generation: int = 0
    process: int = 0
    processes: int = 1
    change: int = 0


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """Address that answers calls, the ticket to connect with, and the link's name there."""

    address: str
    ticket: bytes
    name: str


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """Compile the program for calls with these fields."""

    stack: str
    tokens: int
    cells: int


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Send experts of a placement row to their next devices. moves: int32 pairs (source slot, target slot)."""

    row: int
    moves: bytes


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Make the slots of a placement row hold these logical experts (int32, all slots)."""

    row: int
    experts: bytes


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the experts of one layer.

    Attributes:
        stack: parameter path of the layers. layer: index in the stack. tokens: tokens of the whole step. cells: cells per device.
        filled: ``[devices of the process, senders]`` int32, number of filled cells in each sender's equal share. Only the filled rows and
            their answers are sent, sorted by device, sender and place. Calls with the same number are computed together.
        number: call number, the same in all attention processes. again: whether this call repeats one that got no answer.
    """

    stack: str
    layer: int
    tokens: int
    cells: int
    filled: bytes
    number: int = 0
    again: bool = False


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """Header of the answers to a call. With an error, no answers follow."""

    error: str = ""


class LinkCounts(NamedTuple):
    """Counters of a link. calls: answered calls. sent: bytes of rows. received: bytes of answers.

    losses: connections lost during a call. last_gap: seconds from the last loss to the answer of the interrupted call.
    """

    connected: bool
    losses: int
    last_gap: float
    calls: int
    sent: int
    received: int


class ExpertLinks(Protocol):
    """Executor extension for experts in other processes."""

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """Counters of the link to each process."""

    def check(self, addresses: Sequence[str] = ()) -> None:
        """Check that a process answers at each address (default: the current addresses); raise `UserError` otherwise."""
