"""``PendingStages``: a command on its way through the stages of one process."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from dsjax.engine.contract.commands import Command
from dsjax.engine.device.access import Pending


class PendingStages:
    """A command that was launched.

    Attributes:
        parts: of it at each stage, as far as they have begun; None: nothing of it is that stage's. passed: stages that it has gone through.
        hidden: the hidden states of its launches that have left the last of these, on the devices of the next one.
        results: what came of it, once that was read; from another process as `ProcessLinks.hear` gives it. told: stages that know it.
        number: under which the process with the last stage publishes what came of it; None: it publishes nothing of it.
    """

    def __init__(self, command: Command):
        self.command = command
        self.parts: list[Pending | None] = []
        self.passed = self.told = 0
        self.hidden: list[Array] = []
        self.results: Any = None
        self.number: int | None = None
