"""Messages between an attention side and its expert processes. `ExpertLinks`: counters of the links to these processes. No JAX.

`Open`, `Compile`, `Stage` and `Place` are requests over a control connection. `Opened` names the link for calls: a `Call` with rows is
answered by an `Answered` with results. A call does not depend on earlier messages, so it can be repeated to another process.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

OPEN, COMPILE, STAGE, PLACE = "experts.open", "experts.compile", "experts.stage", "experts.place"


class Open(msgspec.Struct, frozen=True, array_like=True):
    """First message of an attention process, answered by an `Opened` once the slots hold its placement."""

    # compatibility fingerprint: everything that answers depend on besides rows and placement. Must be equal on both sides
    space: dict[str, Any]
    placement: bytes = b""  # ``[MoE layers, slots]`` int32, the logical expert in each physical slot
    side: bytes = b""  # name of the attention side. While one side moves experts, no other side may be connected
    first: int = 0  # number of the first expert device expected at this address
    generation: int = 0  # mesh epoch of the attention side; older epochs are refused
    process: int = 0  # index of this process in the attention side
    processes: int = 1  # number of processes of the attention side
    change: int = 0  # number of the expert side within the epoch. An expert process belongs to one expert side only


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
    """Send experts of a placement row to their next devices."""

    row: int
    moves: bytes  # int32 pairs (source slot, target slot)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Make the slots of a placement row hold these logical experts (int32, all slots)."""

    row: int
    experts: bytes


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the experts of one layer."""

    stack: str  # parameter path of the layers
    layer: int  # index in the stack
    tokens: int  # tokens of the whole step
    cells: int  # cells per device
    # ``[devices of the process, senders]`` int32, number of filled cells in each sender's equal share. Only the filled rows and their
    # answers are sent, sorted by device, sender and place
    filled: bytes
    # call number, the same in all attention processes. Calls with the same number are computed together
    number: int = 0
    again: bool = False  # whether this call repeats one that got no answer


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """Header of the answers to a call. With an error, no answers follow."""

    error: str = ""


class LinkCounts(NamedTuple):
    """Counters of a link."""

    connected: bool
    losses: int  # connections lost during a call
    last_gap: float  # seconds from the last loss to the answer of the interrupted call
    calls: int  # answered calls
    sent: int  # bytes of rows
    received: int  # bytes of answers


class ExpertLinks(Protocol):
    """Executor extension for experts in other processes."""

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """Counters of the link to each process."""

    def check(self, addresses: Sequence[str] = ()) -> None:
        """Check that a process answers at each address (default: the current addresses); raise `UserError` otherwise."""
