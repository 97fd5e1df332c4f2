"""What the two sides say to each other where they are processes of their own.

The attention side sends `Open` over a control connection. The reply, `Opened`, names the link for its calls: a `Call` with rows, answered
by an `Answered` with the results. Slow requests (`Compile`, `Stage`, `Place`) use the control connection. A call depends on no earlier
message, so it can be repeated to another process.
"""

from __future__ import annotations

from typing import Any

import msgspec

OPEN, COMPILE, STAGE, PLACE = "experts.open", "experts.compile", "experts.stage", "experts.place"


class Open(msgspec.Struct, frozen=True, array_like=True):
    """The attention side's first message, answered by an `Opened`, or refused.

    Attributes:
        space: what both sides must have alike: everything that an answer depends on beside its rows and where experts are.
        placement: ``[MoE layers, slots]`` int32, the logical expert in each physical slot. The process makes its slots hold these before it
            answers.
        side: which attention side it is, whichever of its connections. Where one moves experts, no other may be connected.
        first: the first of the expert devices that the attention side expects at this address.
        generation: of the attention side's mesh. A connection of an earlier one than was heard of is late, and its placement old.
        process, processes: which process of the attention side it is, and of how many.
        change: which of the sides of experts that the attention side has had in its generation it calls, from 0 on: the one of now, or the
            one that is to take over. No process is on both.
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
    """Where calls are answered, and the name by which the attention process connects there."""

    address: str
    ticket: bytes
    name: str


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """Compile for calls of a stack; the fields are a `Call`'s."""

    stack: str
    tokens: int
    cells: int


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Bring experts of a layer to the devices that will have them.

    Attributes:
        row: of the placement. moves: int32 pairs (physical slot that has an expert, physical slot that gets it), of all processes.
    """

    row: int
    moves: bytes


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Have the slots of a layer hold these logical experts.

    Attributes:
        row: of the placement. experts: int32, of all slots.
    """

    row: int
    experts: bytes


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Rows for the experts of one layer.

    Attributes:
        stack: path of the layers among the parameters. layer: number in the stack. tokens: of the step, in all. cells: rows that each
            expert device has room for.
        filled: ``[devices of the process, senders]`` int32: of a device's cells, how many of each sender's equal part are filled. These
            rows alone come with it, and their answers alone go back, sorted by device, sender and place. Senders of other processes of
            the attention side fill none: what these send in calls of the same number is computed with it.
        number: of the call, the same in all processes of the attention side. again: it was made before, and had no answer.
    """

    stack: str
    layer: int
    tokens: int
    cells: int
    filled: bytes
    number: int = 0
    again: bool = False


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """The answers to a call come with it. error: why none do."""

    error: str = ""
