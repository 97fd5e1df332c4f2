"""``DeviceAccess``: the state of an executor that its parts share; ``CommandTable``: the handler of each kind of command."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.contract.commands import Command
from dsjax.engine.contract.executor import ExecutorLimits, Kind
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.programs import Programs
from dsjax.model.step import ModelStep
from sharding.arrays import put
from sharding.layer_placement import LayerPlacements

Running = Generator[Array, None, None]
"""A command being executed: yields, for each program, an array that is ready when the program is done."""


@dataclass(eq=False)
class DeviceAccess:
    """State, parameters and programs of one executor, shared by its parts. A part that changes state or parameters assigns them here."""

    model: ModelStep
    limits: ExecutorLimits
    programs: Programs
    params: dict[str, Array]  # by path
    state: DeviceState
    placements: LayerPlacements | None = None  # the expert placement; None for a model without experts

    def replace_programs(self, model: ModelStep, programs: Programs) -> None:
        """Use these programs from the next command on: the same model and state, with the experts on other devices."""
        self.model, self.programs = model, programs

    def send(self, array: np.ndarray) -> Array:
        """Put an array whose first axis is the DP ranks on the devices of each rank."""
        return self.programs.put_rows(array)

    def send_everywhere(self, arrays: Any) -> Any:
        """Replicate an array, or a tree of arrays, on every device."""
        return put(arrays, self.programs.everywhere)


@dataclass(eq=False)
class Pending:
    """A command that was launched."""

    command: Command
    handler: Handler
    running: Running | None = None
    last: Array | None = None
    kept: Any = None  # what the handler keeps for `collect`
    error: str | None = None  # why the command failed, if the executor survives the failure
    done: bool = False
    started: float = 0.0  # seconds of the monotonic clock; with two steps in flight, the time of enqueuing
    ended: float = 0.0  # seconds of the monotonic clock


class Handler(NamedTuple):
    """How commands of one kind are carried out."""

    execute: Callable[[Pending, Any], Running]  # sends a command's inputs and returns its execution, which begins later
    collect: Callable[[Pending], Any] = lambda pending: None  # returns the results of a finished command
    # whether a caller waits for such a command. Other commands run at once where programs in flight together could deadlock
    is_awaited: bool = False
    # whether the last array that `execute` yields is donated to no other program, so that any later wait can use it
    keeps_last: bool = True


class CommandTable(dict[type[Command] | str, Handler]):
    """The handlers of an executor by kind of command; for `Custom` commands, by the name of their page source."""

    def add(self, kind: type[Command] | str, handler: Handler) -> None:
        """Add the handler of a kind; a `ValueError` if the kind has one."""
        if kind in self:
            raise ValueError(f"two parts of the executor carry out {_describe(kind)}, expected one")
        self[kind] = handler

    def __missing__(self, kind: type[Command] | str) -> Handler:
        raise ValueError(
            f"no part of this executor carries out {_describe(kind)}; it was made without the option that asks for it"
        )


def _describe(kind: type[Command] | str) -> str:
    return f"commands of {kind!r}" if isinstance(kind, str) else kind.__name__


class DevicePart:
    """A part of an executor that moves pages or experts. It is made from a `DeviceAccess` before the first command."""

    def register(self, table: CommandTable) -> None:
        """Add the commands that the part carries out."""

    def rehearse(self, run: Callable[[Command], Any]) -> None:
        """Run once whatever needs a trial after all programs are compiled; `run` launches a command and collects it."""

    def close(self) -> None:
        """Finish background work and end the part's threads."""

    def release(self, held: HeldWeights | None) -> None:
        """Release the part's parameters on devices, after `close`. held: takes them over; None: free them."""

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return what the part offers under this type, or None."""
        return None
