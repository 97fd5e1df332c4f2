"""``Collective``: one collective of a layer's dispatch, as arithmetic on shapes; and those that several methods have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sharding.dispatch.group import ExpertGroup


@dataclass(frozen=True)
class Collective:
    """One collective operation of a layer's dispatch.

    kind: ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``ragged_all_to_all`` or another of a user's method.
    purpose: ``dispatch``, ``combine`` or ``sizes``.
    axes, ranks: over which mesh axes, and how many ranks meet: all of these axes, or as ``meet`` says those ``inside`` a host, or one
        of each ``between`` hosts.
    operand_bytes: size of a device's operand. bytes_sent: bytes that leave a device each time, padding included (a
        ring or a direct exchange sends the same); of ``ragged_all_to_all`` the mean under even routing.
    times: how often it runs in a layer.
    """

    kind: str
    purpose: str
    axes: tuple[str, ...]
    ranks: int
    operand_bytes: int
    bytes_sent: int
    times: int
    meet: Literal["all", "inside", "between"] = "all"


def gathered(purpose: str, axes: tuple[str, ...], ranks: int, operand: int, times: int) -> Collective:
    """An ``all_gather`` of ``operand`` bytes of each rank."""
    return Collective("all_gather", purpose, axes, ranks, operand, operand * (ranks - 1), times)


def spread(
    kind: str, purpose: str, axes: tuple[str, ...], ranks: int, operand: int, times: int, meet: str = "all"
) -> Collective:
    """An ``all_to_all`` or ``reduce_scatter`` of ``operand`` bytes, of which each rank gets an equal part."""
    return Collective(kind, purpose, axes, ranks, operand, operand // ranks * (ranks - 1), times, meet)


def over_width(group: ExpertGroup, arriving: int, there: int, back: int, times: int) -> list[Collective]:
    """Where an expert's width is split: the pooling of ``arriving`` rows, and the sharing out of their sums. there, back: bytes a row."""
    if group.width == 1:
        return []
    kind = "all_to_all" if group.in_order else "reduce_scatter"
    return [
        gathered("dispatch", group.width_axes, group.width, arriving * there, times),
        spread(kind, "combine", group.width_axes, group.width, group.width * arriving * back, times),
    ]
