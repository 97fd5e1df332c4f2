"""Compare two programs of one step, and find the sums whose order of additions differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dsjax.dryrun.program.reductions import Reduction

Signatures = dict[str, frozenset[str]]
"""Source location of a sum → its signatures; several if layers are compiled separately."""


def signatures(reductions: Iterable[Reduction], where: Callable[[Reduction], str]) -> Signatures:
    """Return the signatures of a program's sums. where: returns a sum's source location, which must be equal in both programs."""
    found: dict[str, set[str]] = {}
    for one in reductions:
        found.setdefault(where(one), set()).add(one.signature)
    return {place: frozenset(ways) for place, ways in found.items()}


def order_differences(here: Signatures, there: Signatures) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return ``(place, signature)`` of each sum of ``here`` that ``there`` lacks → the signatures that only ``there`` has, sorted.

    If ``there`` has all signatures of a place and more, it is unknown which layer's sum has changed, so all of them are returned.
    """
    differences = {}
    for place, ways in here.items():
        others = there.get(place, frozenset())
        added = tuple(sorted(others - ways))
        for way in ways if others > ways else ways - others:
            differences[place, way] = added
    return differences
