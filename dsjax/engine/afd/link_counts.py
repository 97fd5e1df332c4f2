"""What is known of the links to processes with experts, for whoever shows it. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class LinkCounts(NamedTuple):
    """What a link has done so far.

    Attributes:
        connected: whether it is connected now, as far as the kernel knows. losses: how often the connection has ended under a call.
        last_gap: seconds from the last loss to the answer of the call that met it. calls: answered ones. sent, received: bytes of rows,
            and of answers.
    """

    connected: bool
    losses: int
    last_gap: float
    calls: int
    sent: int
    received: int


class ExpertLinks(Protocol):
    """What an executor offers whose experts are in other processes (`Executor.extension`)."""

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """What the link to each process has done so far."""

    def check(self, addresses: Sequence[str] = ()) -> None:
        """Make sure that a process is at each address; default: at those of now.

        Raises:
            UserError: one is not.
        """
