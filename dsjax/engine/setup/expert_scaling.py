"""``ExpertScaling``: another expert side for an engine that serves, with more or fewer devices, or other processes; caches stay."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.contract.commands import ChangeExperts, PrepareExperts
from dsjax.engine.contract.executor import Executor
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.facts import EngineFacts
from dsjax.errors import UserError
from dsjax.hosts.rendezvous import GroupError


@dataclass(eq=False)
class _Change:
    """A change that is being prepared.

    Attributes:
        executor: that was told so. prepared: done when all processes with attention have prepared. began: on the monotonic clock.
        failure: why the side of now stays.
    """

    number: int
    args: EngineArgs
    executor: Executor
    prepared: Future[None]
    began: float
    failure: Exception | None = None


class Engine(Protocol):
    """Says what is asked of ``Generations``, which change the attention side.

    Attributes:
        args, executor, facts: of now. The executor is the one of this process's devices.
    """

    args: EngineArgs
    executor: MeshExecutor
    facts: EngineFacts

    def reserve(self) -> None:
        """Keep others from changing a side until `forget` is called."""

    def forget(self) -> None:
        """Let others."""

    def goes_on_with(self, args: EngineArgs, facts: EngineFacts) -> None:
        """Take notice of another side."""


class ExpertScaling:
    """Changes the expert side of an engine whose experts are in other processes.

    The processes of the new side have been started with the same options, but for `--expert-mesh` and `--afd-address`. All processes with
    attention are told by commands (``afd/side_change.py``): they connect and compile while steps go on; then the next step goes there.
    ``begin``, ``wait`` and ``end`` are called in turn, as ``change`` does.

    Attributes:
        number: of changes so far. seconds: that the last one took, steps going on.
    """

    def __init__(self, engine: Engine):
        self._engine, self._begun = engine, 0
        self.number, self.seconds = 0, 0.0

    @property
    def facts(self) -> EngineFacts:
        """Give the facts of the engine as it is now."""
        return self._engine.facts

    def begin(self, executor: Executor, expert_mesh: str | None, afd_address: str | None) -> _Change:
        """Have all processes begin to prepare the new side: between two steps, in the engine's thread. What is None stays as it is.

        Raises:
            UserError: it cannot be; everything is as it was. ChangeUnderWayError: another change is being made.
        """
        self._engine.reserve()
        try:
            args = self._changed(expert_mesh, afd_address)
            self._begun += 1
            command = PrepareExperts(self._begun, args.expert_mesh, args.afd_address)
            began, prepared = time.monotonic(), executor.collect(executor.launch(command))
            return _Change(self._begun, args, executor, prepared, began)
        except BaseException:
            self._engine.forget()
            raise

    def _changed(self, expert_mesh: str | None, afd_address: str | None) -> EngineArgs:
        """The options with another side of experts, as far as they can be checked without it."""
        of_now, model = self._engine.args, self._engine.executor.model
        args = replace(
            of_now, expert_mesh=expert_mesh or of_now.expert_mesh, afd_address=afd_address or of_now.afd_address
        )
        if set(afd_addresses(args)) & set(afd_addresses(of_now)):
            raise UserError(
                f"--afd-address {args.afd_address} names a process of {of_now.afd_address}, which has the experts of now; start the "
                "new side beside it, at other addresses"
            )
        spec, slots = expert_spec(args), model.placement.n_physical
        if slots % spec.ep_size:
            raise UserError(
                f"--expert-mesh {args.expert_mesh} does not divide the {slots} physical experts that this engine was started with; choose "
                "a number of devices that does, or start it with other --redundant-experts"
            )
        return args

    def wait(self, change: _Change) -> None:
        """Wait until all processes have prepared, or one cannot. Any thread may call it."""
        change.failure = UserError("the wait for the other side of experts was interrupted, and the one of now stays")
        change.failure = change.prepared.exception()

    def change(self, executor: Executor, expert_mesh: str | None, afd_address: str | None) -> None:
        """Go on with the new side, in this thread, where nothing else is computed meanwhile. After Ctrl-C the side of now stays.

        Raises:
            UserError: as of ``begin`` and ``end``.
        """
        change = self.begin(executor, expert_mesh, afd_address)
        try:
            self.wait(change)
        except BaseException:
            with contextlib.suppress(UserError):  # that says what the interrupt says
                self.end(executor, change)
            raise
        self.end(executor, change)

    def end(self, executor: Executor, change: _Change) -> None:
        """Let the next step go to the new side, or forget it: between two steps, in the engine's thread.

        Raises:
            UserError: one of the processes cannot do it; all go on with the side of now.
        """
        try:
            if executor is not change.executor:
                raise UserError(
                    "the attention side's mesh has changed while the other side of experts was prepared, and the experts stay where they "
                    "are; ask again"
                )
            going = ChangeExperts(change.number, change.failure is None)
            failed = executor.collect(executor.launch(going))
            if change.failure is not None:
                raise _told(change.failure)
            if failed is not None:
                raise UserError(f"the other side of experts cannot take over, and the one of now stays: {failed}")
            self._goes_on(change)
        finally:
            self._engine.forget()

    def _goes_on(self, change: _Change) -> None:
        side = self._engine.executor.model.apart
        self.number, self.seconds = self.number + 1, round(time.monotonic() - change.began, 3)
        facts = replace(
            self.facts,
            expert_mesh=f"ep={side.spec.ep_size}",
            physical_experts_per_device=self._engine.executor.model.placement.n_physical // side.spec.ep_size,
            expert_weight_bytes=side.bytes_of_device,
        )
        self._engine.goes_on_with(change.args, facts)


def _told(failure: Exception) -> Exception:
    """Say why a side could not be prepared, to who has asked for it: another process of the group says so for itself."""
    if isinstance(failure, UserError) and not isinstance(failure, GroupError):
        return failure
    return UserError(f"the other side of experts cannot be prepared, and the one of now stays: {failure}")
