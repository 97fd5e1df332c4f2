"""``DeviceAccess``: what the parts of an executor may touch of it; ``CommandTable``: which part carries out which command."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.contract.commands import Command, Custom
from dsjax.engine.contract.executor import ExecutorLimits, Kind
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.programs import Programs
from dsjax.model.step import ModelStep
from sharding.arrays import put
from sharding.layer_placement import LayerPlacements

Running = Generator[Array, None, None]
"""A command being executed: gives, program by program, an array that is ready when the program is done."""


@dataclass(eq=False)
class DeviceAccess:
    """State, parameters and programs of one executor, as its parts see it. Whoever changes the state or the parameters assigns them here.

    params: by path. placements: where experts are; None for a model without any.
    """

    model: ModelStep
    limits: ExecutorLimits
    programs: Programs
    params: dict[str, Array]
    state: DeviceState
    placements: LayerPlacements | None = None

    def go_on_with(self, model: ModelStep, programs: Programs) -> None:
        """Compute with other programs of the same state from now on, between two commands: the same model, its experts elsewhere."""
        self.model, self.programs = model, programs

    def send(self, array: np.ndarray) -> Array:
        """An array whose first axis is the DP ranks, on the devices of each."""
        return self.programs.put_rows(array)

    def send_everywhere(self, arrays: Any) -> Any:
        """Arrays, or a tree of them, whole on every device."""
        return put(arrays, self.programs.everywhere)


@dataclass(eq=False)
class Pending:
    """A command that was launched.

    kept: what the command's part keeps for `collect`. error: why it could not be carried out, where that is survived. started, ended:
    seconds of the monotonic clock; with two steps in flight `started` is when it was enqueued.
    """

    command: Command
    handler: Handler
    running: Running | None = None
    last: Array | None = None
    kept: Any = None
    error: str | None = None
    done: bool = False
    started: float = 0.0
    ended: float = 0.0


class Handler(NamedTuple):
    """How commands of one kind are carried out.

    Attributes:
        execute: lays out and sends a command's inputs, and gives its execution, which begins later.
        collect: gives what came of a command that is done.
        is_awaited: whether somebody will wait for it. All others are done at once where programs in flight together could deadlock.
        keeps_last: whether what its programs gave last is nobody else's, so that it can be waited for at any time.
    """

    execute: Callable[[Pending, Any], Running]
    collect: Callable[[Pending], Any] = lambda pending: None
    is_awaited: bool = False
    keeps_last: bool = True


class CommandTable:
    """The handlers of an executor, by kind of command."""

    def __init__(self):
        self._handlers: dict[type | str, Handler] = {}

    def add(self, kind: type[Command] | str, handler: Handler) -> None:
        """Have commands of a kind carried out so, or a page source's `Custom` ones; a `ValueError` where another part does that."""
        if kind in self._handlers:
            raise ValueError(f"two parts of the executor carry out {_named(kind)}, expected one")
        self._handlers[kind] = handler

    def is_awaited(self, command: Command) -> bool:
        """Whether somebody will wait for a command of this kind. Nobody does for those of a page source."""
        return type(command) in self._handlers and self._handlers[type(command)].is_awaited

    def launch(self, command: Command) -> Pending:
        """A command with its inputs laid out and sent; a `ValueError` where no part of the executor carries it out."""
        kind = command.source if isinstance(command, Custom) else type(command)
        if kind not in self._handlers:
            raise ValueError(
                f"no part of this executor carries out {_named(kind)}; it was made without the option that asks for it"
            )
        pending = Pending(command, self._handlers[kind])
        pending.running = pending.handler.execute(pending, command)
        return pending


def _named(kind: type[Command] | str) -> str:
    return f"commands of {kind!r}" if isinstance(kind, str) else kind.__name__


class DevicePart:
    """A part of an executor that moves pages or experts. It is made from a `DeviceAccess` before the first command."""

    def register(self, table: CommandTable) -> None:
        """Add the commands that the part carries out."""

    def rehearse(self, run: Callable[[Command], Any]) -> None:
        """Run what has to be tried once all programs are compiled; `run` launches a command and collects it."""

    def close(self) -> None:
        """Finish what goes on beside commands, and end the part's threads."""

    def release(self, held: HeldWeights | None) -> None:
        """Free the parameters that the part has on devices, after `close`. held: takes them over; None: they are freed."""

    def extension(self, kind: type[Kind]) -> Kind | None:
        """What the part offers to those who know of it by this type; None: nothing of the kind."""
        return None
