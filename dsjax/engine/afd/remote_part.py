"""``RemoteExpertsPart``: the executor's part for routed experts in other processes, which a command replaces by others."""

from __future__ import annotations

import logging
import threading
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

    another: ``(expert_mesh, afd_address, model, side) -> (model, side)`` with the experts at those addresses, not connected yet.
    """

    def __init__(
        self,
        device: DeviceAccess,
        another: Callable[[str, str, ModelStep, RemoteExperts], tuple[ModelStep, RemoteExperts]],
    ):
        self._device, self._another = device, another
        self._lock = threading.Lock()
        self._next: RemoteExperts | None = None  # the side that is being connected
        self._is_abandoned = False

    def register(self, table: CommandTable) -> None:
        """Add the command that connects to another side."""
        table.add(ConnectExperts, Handler(self._connect, lambda pending: pending.error))

    def extension(self, kind: type) -> Any:
        """Offer the links to metrics, and their check to callers that change a mesh."""
        return self._side if kind is ExpertLinks else None

    def close(self) -> None:
        """End the connections."""
        self._side.close()

    def abandon(self) -> None:
        """Stop waiting for other processes: a process of this attention side is gone. Any thread may call this."""
        with self._lock:
            self._is_abandoned = True
            sides = self._side, self._next
        for side in filter(None, sides):
            side.abandon()

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
        model, after = self._another(command.expert_mesh, command.afd_address, device.model, before)
        after.placement = device.placements.physical_to_logical.copy()
        with self._lock:
            self._next = after
            if self._is_abandoned:
                after.abandon()
        error, programs = None, None
        try:
            try:
                after.connect()
                programs = device.programs.of(model, after)
            except (UserError, RuntimeError, ValueError) as caught:
                error = str(caught) if isinstance(caught, UserError) else f"{type(caught).__name__}: {caught}"
                _log.warning("The current expert processes stay, because the new ones cannot take over: %s", error)
            before.tell(int(error is not None))
            if before.agree(int(error is not None)):
                return error or "another attention process could not connect to them"
            before.hand_over(after)
            device.go_on_with(model, programs)
        finally:
            with self._lock:
                self._next = None
            (after if self._side is before else before).close()
        return None
