"""Compare two programs of one step, and name the sums that they do not make in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dsjax.dryrun.program.reductions import Reduction

Signatures = dict[str, frozenset[str]]
"""Where a sum comes from → how the program makes it; several ways where layers are compiled apart."""


def signatures(reductions: Iterable[Reduction], where: Callable[[Reduction], str]) -> Signatures:
    """What to compare of a program. where: the place in the source, which both programs must name alike."""
    found: dict[str, set[str]] = {}
    for one in reductions:
        found.setdefault(where(one), set()).add(one.signature)
    return {place: frozenset(ways) for place, ways in found.items()}


def order_differences(here: Signatures, there: Signatures) -> dict[tuple[str, str], tuple[str, ...]]:
    """``(place, signature)`` of each sum of ``here`` that ``there`` makes otherwise → how, sorted; empty where it makes no other sum there.

    Where ``there`` has all ways of a place and others besides, nobody can tell which layer's sum has changed: all of them have.
    """
    differences = {}
    for place, ways in here.items():
        others = there.get(place, frozenset())
        added = tuple(sorted(others - ways))
        for way in ways if others > ways else ways - others:
            differences[place, way] = added
    return differences
