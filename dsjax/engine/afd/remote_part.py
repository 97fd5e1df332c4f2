"""``RemoteExpertsPart``: the executor's part for routed experts in other processes, which a command replaces by others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dsjax.engine.afd.link_counts import ExpertLinks
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.contract.commands import ConnectExperts
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.errors import UserError
from dsjax.model.step import ModelStep

_log = logging.getLogger(__name__)


class RemoteExpertsPart(DevicePart):
    """Connects to another expert side between two steps. Caches and requests stay as they are.

    With several attention processes, all of them carry out the command between the same two steps. Either all continue with the new
    side, or all stay with the current one.

    another: ``(command, device, side) -> (model, side)`` with the experts that the command names, not connected yet.
    """

    def __init__(
        self,
        device: DeviceAccess,
        another: Callable[[ConnectExperts, DeviceAccess, RemoteExperts], tuple[ModelStep, RemoteExperts]],
    ):
        self._device, self._another = device, another

    def register(self, table: CommandTable) -> None:
        """Add the command that connects to another side."""
        table.add(ConnectExperts, Handler(self._connect, lambda pending: pending.error))

    def extension(self, kind: type) -> Any:
        """Offer the links to metrics, and their check to callers that change a mesh."""
        return self._side if kind is ExpertLinks else None

    def close(self) -> None:
        """End the connections, those of the attention side among them."""
        self._side.attention.close()

    @property
    def _side(self) -> RemoteExperts:
        return self._device.programs.experts

    def _connect(self, pending: Pending, command: ConnectExperts) -> Running:
        def run() -> Running:
            pending.error = self._change_to(command)
            yield from ()

        return run()

    def _change_to(self, command: ConnectExperts) -> str | None:
        """Connect and compile. Return why the current side stays, or None if the new side has taken over."""
        device, before = self._device, self._side
        model, after = self._another(command, device, before)
        attention, error, programs = before.attention, None, None
        try:
            try:
                after.connect()
                programs = device.programs.of(model, after)
            except (UserError, RuntimeError, ValueError) as caught:
                error = str(caught) if isinstance(caught, UserError) else f"{type(caught).__name__}: {caught}"
                _log.warning("The current expert processes stay, because the new ones cannot take over: %s", error)
            attention.tell(int(error is not None))
            if attention.wait(int(error is not None)):
                return error or "another attention process could not connect to them"
            device.go_on_with(model, programs)
        finally:
            (after if self._side is before else before).close()
        return None
