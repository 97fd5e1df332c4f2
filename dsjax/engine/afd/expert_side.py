"""``ExpertSide``: devices with routed experts and nothing else, and how the host takes a step's tokens to them and back."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.afd.layer_programs import CompiledPass, OnHost, PassPrograms, ProgramMaker, Way, rounds_of
from dsjax.engine.device.access import DeviceAccess, DevicePart
from dsjax.model.apart import ExpertWork, LayerPass, Passing, StackExperts, sums_by_choice, wire_of
from dsjax.model.expert_dispatch import ExpertsApart
from dsjax.model.parameters import describe
from dsjax.model.step import ModelStep
from dsjax.model.window import ParameterWindow
from sharding import MeshError, MeshSpec, Rules
from sharding.cut import Described, Run
from sharding.dispatch.between import Between, ExpertHalf, to_experts, to_tokens
from sharding.layer_placement import LayerPlacements
from sharding.mesh import advice_on_emulation, device_order


def build_both(attention: MeshSpec, experts: MeshSpec) -> tuple[Mesh, Mesh]:
    """The meshes of the two sides: the first devices, and those behind them.

    Raises:
        MeshError: fewer devices exist than both sides want.
    """
    devices, first = sorted(jax.devices(), key=device_order), attention.num_devices
    wanted = first + experts.num_devices
    if len(devices) < wanted:
        platform = devices[0].platform
        advice = advice_on_emulation(wanted) if platform == "cpu" else "use smaller meshes"
        raise MeshError(
            f"--attention-mesh {attention} and --expert-mesh ep={experts.ep_size} want {wanted} devices, found {len(devices)} of "
            f"platform {platform!r}; {advice}"
        )
    return attention.arrange(devices[:first]), experts.arrange(devices[first:wanted])


class SidePart(DevicePart):
    """The experts' side as a part of an executor, whichever side it is now."""

    def __init__(self, device: DeviceAccess):
        self._device = device

    def extension(self, kind: type) -> Any:
        """Offer what the side offers."""
        return self._device.programs.experts.extension(kind)

    def close(self) -> None:
        """End the side's threads."""
        self._device.programs.experts.close()

    def release(self, held: HeldWeights | None) -> None:
        """Give the side's parameters up."""
        self._device.programs.experts.release(self._device.model, self._device.placements, held)


class Side(ProgramMaker):
    """Computes the routed experts of a step that has them apart: the ``sharding.cut.Worker`` of its ``ExpertWork``.

    They keep nothing from one call to the next but parameters. Between two calls others may be put in their place.

    Args:
        spec: ``ep=N``.
        waits: whether each program is waited for before the next starts: emulated devices that share a host's cores can deadlock in
            collectives of programs that are in flight together.
    """

    def __init__(self, spec: MeshSpec, *, waits: bool):
        self.spec, self.waits = spec, waits
        self._passes: dict[Hashable, CompiledPass] = {}
        self._lock = threading.Lock()

    def way(self, through: LayerPass) -> Way:
        """How the rows of a pass get there and back, all that it needs compiled."""
        raise NotImplementedError

    def extension(self, kind: type) -> Any:
        """What the side offers to those who know of it by this type; None: nothing of the kind."""
        return None

    def close(self) -> None:
        """End what goes on beside calls."""

    def release(self, step: ModelStep, placements: LayerPlacements, held: HeldWeights | None) -> None:
        """Free the parameters of this process's devices. placements: where experts are. held: takes them over; None: nobody does."""

    def compile_work(self, work: ExpertWork, described: Sequence[Described]) -> tuple[Run, Sequence[Sharding]]:
        """Compile the programs of a pass, or take those of an equal one."""
        compiled = self.compiled(work, described)
        passing: Passing = jax.tree.unflatten(work.tree, described)

        def run(leaves: list[Array]) -> list[Array]:
            passing = jax.tree.unflatten(work.tree, leaves)
            leaves.clear()
            return jax.tree.leaves(compiled.run(passing))

        return run, [leaf.sharding for leaf in jax.tree.leaves((passing.x, passing.cache, passing.report))]

    def compiled(self, work: ExpertWork, described: Sequence[Described]) -> CompiledPass:
        """The programs of a pass, which several steps can share."""
        passes, tree = work.passes, work.tree
        shardings = tuple((one.shape, str(one.dtype), one.sharding) for one in described)
        key = tuple((one.stack, one.first, one.shape) for one in passes), tree, shardings
        with self._lock:
            if key not in self._passes:
                passing: Passing = jax.tree.unflatten(tree, described)
                layers = self.numbers(passes[0].step.mesh, passes[0].layers)
                programs = [PassPrograms.of(self, self.way(one), one, passing, half) for half, one in enumerate(passes)]
                self._passes[key] = CompiledPass(programs, layers, self.waits, self.give_up)
            return self._passes[key]


class ExpertSide(Side):
    """Experts on devices of this process: on all of the expert devices, or on a run of them.

    Args:
        apart: as the step has it. mesh: of the devices. first: the number of the first of them among all expert devices.

    Attributes:
        local: the mesh as numbers. slots: the physical experts of a layer that are here; window: the same, of parameters. infos: of the
            parameters on these devices. rules: where they are. params: these by path, assigned when they are loaded.
    """

    def __init__(self, apart: ExpertsApart, mesh: Mesh, first: int = 0):
        super().__init__(apart.spec, waits=mesh.devices.flat[0].platform == "cpu")
        self.mesh, self.first, self.local = mesh, first, MeshSpec(dp_size=mesh.size)
        self.rules = Rules.for_mesh(self.local)
        on_a_device = next(iter(apart.infos.values())).shape[1] // apart.spec.ep_size
        self.slots = range(on_a_device * first, on_a_device * (first + self.local.ep_size))
        self.window = ParameterWindow(experts=self.slots)
        self.infos = self.window.of(apart.infos)
        self.params: dict[str, Array] = {}

    def described(self) -> dict[str, Described]:
        """Every parameter as a shape, its storage dtype and its sharding."""
        return describe(self.infos, self.rules, self.mesh)

    def release(self, step: ModelStep, placements: LayerPlacements, held: HeldWeights | None) -> None:
        """Free the parameters, or leave them to who takes them over."""
        params, self.params = self.params, {}
        if held is not None:
            held.keep(step, params, placements, self.infos)
            return
        for array in params.values():
            array.delete()

    def half(self, step: ModelStep) -> ExpertHalf:
        """The exchange's half on these devices."""
        per_device = step.placement.n_physical // self.spec.ep_size
        apart = sums_by_choice(step) and self.spec.ep_size > 1
        return ExpertHalf(self.local, self.mesh, self.first, per_device, wire_of(step), apart)

    def compile(self, step: ModelStep, stack: str, tokens: int, senders: int, cells: int) -> Compiled:
        """Compile ``(params, arrivals, layer) -> answers`` of a stack of layers.

        tokens: of a step. senders: arrays that arrive, each with ``cells`` rows for each device.
        """
        half, index = self.half(step), Described((), np.int32, sharding=NamedSharding(self.mesh, P()))
        experts = StackExperts(step, stack, half, self.rules, self.infos, tokens)
        arrivals = half.described_arrivals(senders, cells)
        return self.build(jax.jit(experts.compute).lower(self.described(), arrivals, index))

    def way(self, through: LayerPass) -> WayToDevices:
        """How rows get to the devices."""
        layers = self.numbers(self.mesh, through.layers)
        between, step = through.between(), through.step
        program = self.compile(step, through.stack, between.tokens, between.senders, between.capacity)
        return WayToDevices(self, between, self.half(step), program, layers)


@dataclass(frozen=True, eq=False)
class WayToDevices:
    """``Way`` to devices of this process. layers: their numbers on these devices."""

    side: ExpertSide
    between: Between
    half: ExpertHalf
    program: Compiled
    layers: Sequence[Array]

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> tuple[list[Array], OnHost]:
        """Copy the rows to the experts' devices, and start their program."""
        arrivals = to_experts(self.between, self.half, rows)
        answers = self.program(self.side.params, arrivals, self.layers[layer])
        return (jax.block_until_ready(answers) if self.side.waits else answers), counts

    def returned(self, away: tuple[list[Array], OnHost]) -> tuple[list[Array], int]:
        """Copy the answers back."""
        answers, counts = away
        return to_tokens(self.between, self.half, answers), rounds_of(self.between, counts)
