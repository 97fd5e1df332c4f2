"""Messages between an attention side and the processes with its experts. `ExpertLinks`: counters of the links to them. No JAX.

`Open`, `Compile`, `Stage` and `Place` are requests over a control connection. `Opened` names the link for calls: a `Call` with rows,
answered by an `Answered` with results. A call depends on no earlier message, so it can be repeated to another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

OPEN, COMPILE, STAGE, PLACE = "experts.open", "experts.compile", "experts.stage", "experts.place"


class Open(msgspec.Struct, frozen=True, array_like=True):
    """The first message of an attention process, answered by an `Opened` once the slots hold its placement.

    Attributes:
        space: what answers depend on beside rows and placement; equal on both sides.
        placement: ``[MoE layers, slots]`` int32, the logical expert in each physical slot.
        side: name of the attention side. While one side moves experts, no other may be connected.
        first: first expert device that is expected at this address.
        generation: mesh epoch of the attention side; older ones are refused.
        process, processes: which process of the attention side it is, and of how many.
        change: number of the expert side within the epoch. No process is on two.
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
    """Where calls are answered, and the link's name there."""

    address: str
    ticket: bytes
    name: str


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """Compile for calls with these fields."""

    stack: str
    tokens: int
    cells: int


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Bring experts of a row of the placement to their next devices; moves: int32 pairs (slot that has it, slot that gets it)."""

    row: int
    moves: bytes


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Have the slots of a row of the placement hold these logical experts (int32, all slots)."""

    row: int
    experts: bytes


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the experts of one layer.

    Attributes:
        stack: path of the layers among the parameters. layer: number in the stack. tokens: of the whole step. cells: of each device.
        filled: ``[devices of the process, senders]`` int32, how many cells of each sender's equal part are filled. Only these rows and
            their answers travel, sorted by device, sender and place. Calls with the same number are computed together.
        number: of the call, the same in all processes of the attention side. again: it had no answer the first time.
    """

    stack: str
    layer: int
    tokens: int
    cells: int
    filled: bytes
    number: int = 0
    again: bool = False


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """Answers to a call come with it, unless there is an error."""

    error: str = ""


class LinkCounts(NamedTuple):
    """Counters of a link. calls: answered ones. sent, received: bytes of rows, and of answers.

    losses: connections that ended under a call. last_gap: seconds from the last loss to the answer of the call that met it.
    """

    connected: bool
    losses: int
    last_gap: float
    calls: int
    sent: int
    received: int


class ExpertLinks(Protocol):
    """Extension of an executor whose experts are in other processes."""

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """Counters of the link to each process."""

    def check(self, addresses: Sequence[str] = ()) -> None:
        """Check that a process answers at each address (default: the current ones); a `UserError` where none does."""
