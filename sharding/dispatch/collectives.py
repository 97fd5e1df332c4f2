"""``Collective``: size and traffic of one collective of a layer's dispatch, computed from shapes; and constructors for common ones."""

from dataclasses import dataclass
from typing import Literal

from sharding.dispatch.group import ExpertGroup


@dataclass(frozen=True)
class Collective:
    """One collective operation of a layer's dispatch.

    kind: ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``ragged_all_to_all``, or any other name in a user-defined method.
    purpose: ``dispatch``, ``combine`` or ``sizes``.
    axes: mesh axes. ranks: size of the group. meet: ranks in the group: ``all`` of the axes, those ``inside`` one host, or one of each host
        (``between``).
    operand_bytes: size of one device's operand. bytes_sent: bytes that one device sends per call, padding included (equal for ring and
        direct algorithms); for ``ragged_all_to_all``, the mean under even routing.
    times: calls per layer.
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
    """Return an ``all_gather`` of ``operand`` bytes per rank."""
    return Collective("all_gather", purpose, axes, ranks, operand, operand * (ranks - 1), times)


def spread(
    kind: str, purpose: str, axes: tuple[str, ...], ranks: int, operand: int, times: int, meet: str = "all"
) -> Collective:
    """Return an ``all_to_all`` or ``reduce_scatter`` of ``operand`` bytes per rank, split equally over the ranks."""
    return Collective(kind, purpose, axes, ranks, operand, operand // ranks * (ranks - 1), times, meet)


def over_width(group: ExpertGroup, arriving: int, there: int, back: int, times: int) -> list[Collective]:
    """Return the collectives over a split expert width: gather ``arriving`` rows of ``there`` bytes, then sum rows of ``back`` bytes."""
    if group.width == 1:
        return []
    kind = "all_to_all" if group.in_order else "reduce_scatter"  # in order: each rank adds what arrives
    return [
        gathered("dispatch", group.width_axes, group.width, arriving * there, times),
        spread(kind, "combine", group.width_axes, group.width, group.width * arriving * back, times),
    ]
