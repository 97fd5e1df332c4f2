"""Counters of the links to processes with experts. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


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
