"""Compare two programs of one step, and find the sums whose order of additions differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dsjax.dryrun.program.reductions import Reduction

Signatures = dict[str, frozenset[str]]
"""Source location of a sum → its signatures; several if layers are compiled separately."""


def signatures(reductions: Iterable[Reduction], location: Callable[[Reduction], str]) -> Signatures:
    """Return the signatures of a program's sums. location: returns a sum's source location, which must be equal in both programs."""
    by_location: dict[str, set[str]] = {}
    for reduction in reductions:
        by_location.setdefault(location(reduction), set()).add(reduction.signature)
    return {place: frozenset(values) for place, values in by_location.items()}


def order_differences(first: Signatures, second: Signatures) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return ``(location, signature)`` of each sum that only ``first`` has → the signatures that only ``second`` has there, sorted.

    If ``second`` has all signatures of a location and more, it is unknown which layer's sum has changed, so all of them are returned.
    """
    differences = {}
    for location, own in first.items():
        others = second.get(location, frozenset())
        added = tuple(sorted(others - own))
        for signature in own if others > own else own - others:
            differences[location, signature] = added
    return differences
