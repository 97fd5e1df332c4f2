"""``ExpertScaling``: another expert side for an engine that serves, with more or fewer devices, or other processes; caches stay."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from dsjax.checkpoint.hub import resolve
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import remote_experts
from dsjax.engine.setup.facts import EngineFacts
from dsjax.engine.setup.loading import expert_space
from dsjax.errors import UserError
from dsjax.model.step import ModelStep


@dataclass(frozen=True)
class _Prepared:
    """An expert side that is connected, and the programs for it."""

    args: EngineArgs
    model: ModelStep
    programs: Programs
    seconds: float


class Engine(Protocol):
    """Says what is asked of ``Generations``, which change the attention side.

    Attributes:
        args, executor, facts: of now.
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

    The processes of the new side have been started with the same options, but for `--expert-mesh` and `--afd-address`. They are connected
    to and everything is compiled while steps go on; then the next step goes to them.

    Attributes:
        number: of changes so far. seconds: that the last one took, steps going on.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.number, self.seconds = 0, 0.0

    @property
    def facts(self) -> EngineFacts:
        """Give the facts of the engine as it is now."""
        return self._engine.facts

    def prepare(self, expert_mesh: str | None, afd_address: str | None) -> _Prepared:
        """Connect to the new side and compile, in any thread. What is None stays as it is.

        Raises:
            UserError: it cannot be; everything is as it was. ChangeUnderWayError: another change is being made.
        """
        self._engine.reserve()
        try:
            return self._prepare(expert_mesh, afd_address)
        except BaseException:
            self._engine.forget()
            raise

    def _prepare(self, expert_mesh: str | None, afd_address: str | None) -> _Prepared:
        began, executor, of_now = time.monotonic(), self._engine.executor, self._engine.args
        model = executor.model
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
        before: RemoteExperts = model.apart
        side = remote_experts(args, spec, before.infos, model.mesh.devices.flat[0].platform)
        side.name, side.generation = before.name, before.generation
        side.placement = executor.device.placements.physical_to_logical
        try:
            model = replace(model, apart=side)
            side.space = expert_space(args, model, Path(resolve(args.model, revision=args.revision)))
            side.connect()
            return _Prepared(args, model, executor.compile_for(model), time.monotonic() - began)
        except BaseException:
            side.close()
            raise

    def apply(self, prepared: _Prepared) -> None:
        """Let the next step go to the new side: between two steps, in the engine's thread.

        Raises:
            RuntimeError, UserError: the new side cannot do it; everything is as it was.
        """
        executor, side = self._engine.executor, prepared.model.apart
        before = executor.model.apart
        try:
            rows = executor.device.placements.physical_to_logical
            for row in np.flatnonzero((rows != side.placement).any(axis=1)).tolist():  # experts have moved meanwhile
                side.place(row, rows[row])
        except BaseException:
            side.close()
            self._engine.forget()
            raise
        try:
            executor.go_on_with(prepared.model, prepared.programs)
            before.close()
            self.number, self.seconds = self.number + 1, round(prepared.seconds, 3)
            facts = replace(
                self.facts,
                expert_mesh=f"ep={side.spec.ep_size}",
                physical_experts_per_device=prepared.model.placement.n_physical // side.spec.ep_size,
                expert_weight_bytes=side.bytes_of_device,
            )
            self._engine.goes_on_with(prepared.args, facts)
        finally:
            self._engine.forget()
