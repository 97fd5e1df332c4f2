"""``SideChanges``: the executor's part that has routed experts in other processes, and goes on with others when commands say so.

Where attention has several processes, all carry out the same commands in the same order. Each connects to the new side and compiles by
itself while steps go on. Then, between the same two steps, all go on with the new side, or all stay with the old one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from dsjax.engine.afd.expert_side import SidePart
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.contract.commands import ChangeExperts, PrepareExperts
from dsjax.engine.device.access import CommandTable, DeviceAccess, Handler, Pending, Running
from dsjax.engine.device.programs import Programs
from dsjax.model.step import ModelStep

Result = TypeVar("Result")

Meet = Callable[[str, Callable[[], Result]], Result]
"""Does something that all processes with attention do, under a name, and tells them what came of it; process 0 waits for all."""

_log = logging.getLogger(__name__)


class _Prepared(NamedTuple):
    """A model whose experts are on another side, which is connected, and the programs for it."""

    model: ModelStep
    programs: Programs


class SideChanges(SidePart):
    """Prepares another side of experts beside steps, and goes on with it between two of them.

    Args:
        another: the model with its experts at other addresses: (--expert-mesh, --afd-address, the model of now). It connects to nobody.
        meet: as of ``Meet``; alone, it does it and no more.
    """

    def __init__(
        self,
        device: DeviceAccess,
        another: Callable[[str, str, ModelStep], ModelStep],
        meet: Meet = lambda name, act: act(),
    ):
        super().__init__(device)
        self._device, self._another, self._meet = device, another, meet
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dsjax-other-experts")
        self._lock = threading.Lock()
        self._wanted: int | None = None  # the number of the change that is prepared
        self._coming: RemoteExperts | None = None  # its side, which is connected, or is being so
        self._prepared: _Prepared | None = None

    def register(self, table: CommandTable) -> None:
        """Add the commands that change the side."""
        table.add(PrepareExperts, Handler(self._prepare, lambda pending: pending.kept))
        table.add(ChangeExperts, Handler(self._change, lambda pending: pending.error))

    def close(self) -> None:
        """End the threads of the side of now, and of one that was prepared."""
        self._drop()
        self._pool.shutdown(wait=False)  # who waits for what was begun hears that it was given up
        super().close()

    def abandon(self) -> None:
        """End what waits for other processes: this generation of the attention side has broken."""
        self._side.abandon()
        with self._lock:
            coming = self._coming
        if coming is not None:
            coming.abandon()

    @property
    def _side(self) -> RemoteExperts:
        return self._device.model.apart

    def _prepare(self, pending: Pending, command: PrepareExperts) -> Running:
        """Begin to prepare, beside the commands that follow. What is collected is a future, done when all processes have prepared."""
        pending.kept = Future()

        def run() -> Running:
            self._drop()
            with self._lock:
                self._wanted = command.number
            # Where experts are at this command, which is the same in all processes: they connect to one side, at different times.
            placement = self._device.placements.physical_to_logical.copy()
            self._pool.submit(self._make, command, placement, pending.kept)
            yield from ()

        return run()

    def _make(self, command: PrepareExperts, placement: np.ndarray, done: Future[None]) -> None:
        """Connect and compile, in a thread of its own."""

        def make() -> None:
            model = self._another(command.expert_mesh, command.afd_address, self._device.model)
            side: RemoteExperts = model.apart
            side.placement = placement
            try:
                with self._lock:
                    self._check_wanted(command.number)
                    self._coming = side
                side.connect()
                programs = self._device.programs.of(model)
                with self._lock:
                    self._check_wanted(command.number)
                    self._prepared = _Prepared(model, programs)
            except BaseException:
                side.close()
                raise

        try:
            self._meet(f"experts, change {command.number}", make)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _check_wanted(self, number: int) -> None:
        """Give a change up that nobody wants any more. Under the lock.

        Raises:
            RuntimeError: nobody does.
        """
        if self._wanted != number:
            raise RuntimeError("the change of the experts' side was given up meanwhile")

    def _change(self, pending: Pending, command: ChangeExperts) -> Running:
        """Go on with the side that was prepared, or drop it."""

        def run() -> Running:
            if command.go:
                pending.error = self._go_on(command.number)
            else:
                self._drop()
            yield from ()

        return run()

    def _go_on(self, number: int) -> str | None:
        """Go on with the new side if all processes can; why not, where they stay with the side of now.

        Raises:
            RuntimeError: another process with attention has gone.
        """
        device, before, error = self._device, self._side, None
        with self._lock:
            prepared = self._prepared if self._wanted == number else None
        try:
            if prepared is None:
                raise RuntimeError("this process has not prepared it")
            prepared.model.apart.catch_up(device.placements.physical_to_logical, asks=before.leads)
        except (RuntimeError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"
            _log.warning("The other side of experts cannot take over, and the one of now stays: %s", error)
        try:
            before.tell(int(error is not None))
            if before.agree(int(error is not None)):
                self._drop()
                return error or "another process with attention could not"
            after: RemoteExperts = prepared.model.apart
            before.hand_over(after)
        except BaseException:
            self._drop()
            raise
        device.go_on_with(prepared.model, prepared.programs)
        with self._lock:  # only now: `abandon` must find the new side, as the one of now or as the coming one
            self._wanted = self._coming = self._prepared = None
        before.close()
        return None

    def _drop(self) -> None:
        """Close a side that does not take over."""
        with self._lock:
            coming = self._coming
            self._wanted = self._coming = self._prepared = None
        if coming is not None:
            coming.close()
