"""``ExpertSide``: devices of this process that hold only routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.afd.layer_programs import OnHost, Side, rounds_of
from dsjax.engine.device.access import DeviceAccess, DevicePart
from dsjax.model.apart import LayerPass, StackExperts, sums_by_choice, wire_of
from dsjax.model.expert_dispatch import ExpertsApart
from dsjax.model.parameters import describe
from dsjax.model.step import ModelStep
from dsjax.model.window import ParameterWindow
from sharding import MeshError, MeshSpec, Rules
from sharding.cut import Described
from sharding.dispatch.between import Between, ExpertHalf, to_experts, to_tokens
from sharding.mesh import advice_on_emulation, device_order


def build_both(attention: MeshSpec, experts: MeshSpec) -> tuple[Mesh, Mesh]:
    """Return the meshes of the two sides: attention on the first devices, experts on the next. Raise `MeshError` if there are too few."""
    devices, num_attention = sorted(jax.devices(), key=device_order), attention.num_devices
    wanted = num_attention + experts.num_devices
    if len(devices) < wanted:
        platform = devices[0].platform
        advice = advice_on_emulation(wanted) if platform == "cpu" else "use smaller meshes"
        raise MeshError(
            f"--attention-mesh {attention} and --expert-mesh ep={experts.ep_size} want {wanted} devices, found {len(devices)} of "
            f"platform {platform!r}; {advice}"
        )
    return attention.arrange(devices[:num_attention]), experts.arrange(devices[num_attention:wanted])


class ExpertSide(Side):
    """Computes the routed experts on devices of this process: all expert devices, or a contiguous range of them.

    apart: the step's `ExpertsApart`. mesh: of the devices. first: index of the mesh's first device among all expert devices.

    Attributes:
        local: the mesh's spec. slots: numbers of the physical experts on these devices, equal in all layers. window: selects these slots.
        infos, rules: of the parameters on these devices. params: the parameters by path, set when loaded.
    """

    def __init__(self, apart: ExpertsApart, mesh: Mesh, first: int = 0):
        super().__init__(apart.spec, waits=mesh.devices.flat[0].platform == "cpu")
        self.mesh, self.first, self.local = mesh, first, MeshSpec(dp_size=mesh.size)
        self.rules = Rules.for_mesh(self.local)
        slots_per_device = next(iter(apart.infos.values())).shape[1] // apart.spec.ep_size
        self.slots = range(slots_per_device * first, slots_per_device * (first + self.local.ep_size))
        self.window = ParameterWindow(experts=self.slots)
        self.infos = self.window.of(apart.infos)
        self.params: dict[str, Array] = {}

    def described(self) -> dict[str, Described]:
        """Return every parameter's shape, storage dtype and sharding."""
        return describe(self.infos, self.rules, self.mesh)

    def half(self, step: ModelStep) -> ExpertHalf:
        """Return these devices' half of the exchange."""
        per_device = step.placement.n_physical // self.spec.ep_size
        returns_terms = sums_by_choice(step) and self.spec.ep_size > 1
        return ExpertHalf(self.local, self.mesh, self.first, per_device, wire_of(step), returns_terms)

    def compile(self, step: ModelStep, stack: str, tokens: int, senders: int, cells: int) -> Compiled:
        """Compile ``(params, arrivals, layer) -> answers`` for a stack of layers.

        tokens: in a step. senders: number of arriving arrays, each with ``cells`` rows for each device.
        """
        half, index = self.half(step), Described((), np.int32, sharding=NamedSharding(self.mesh, P()))
        experts = StackExperts(step, stack, half, self.rules, self.infos, tokens)
        arrivals = half.described_arrivals(senders, cells)
        return self.build(jax.jit(experts.compute).lower(self.described(), arrivals, index), step)

    def way(self, through: LayerPass) -> WayToDevices:
        """Compile the expert program for the rows of a pass, and return the route to it."""
        layers = self.numbers(self.mesh, through.num_layers)
        between, step = through.between(), through.step
        program = self.compile(step, through.stack, between.tokens, between.senders, between.capacity)
        return WayToDevices(self, between, self.half(step), program, layers)


class ExpertSidePart(DevicePart):
    """Releases an ``ExpertSide``'s parameters with the executor."""

    def __init__(self, device: DeviceAccess, side: ExpertSide):
        self._device, self._side = device, side

    def release(self, held: HeldWeights | None) -> None:
        """Free the parameters, or hand them over to ``held``."""
        side = self._side
        params, side.params = side.params, {}
        if held is not None:
            held.keep(self._device.model, params, self._device.placements, side.infos)
            return
        for array in params.values():
            array.delete()


@dataclass(frozen=True, eq=False)
class WayToDevices:
    """``Way`` (expert route) to devices of this process. One program serves all layers of a stack, in every round."""

    side: ExpertSide
    between: Between
    half: ExpertHalf
    program: Compiled
    layers: Sequence[Array]  # layer numbers, as arrays on these devices

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> tuple[list[Array], OnHost]:
        """Copy a round's rows to the expert devices, and start their program."""
        arrivals = to_experts(self.between, self.half, rows)
        answers = self.program(self.side.params, arrivals, self.layers[layer])
        return (jax.block_until_ready(answers) if self.side.waits else answers), counts

    def returned(self, away: tuple[list[Array], OnHost]) -> tuple[list[Array], int]:
        """Copy the answers to the token devices. Return them, and the number of rounds that the layer needs."""
        answers, counts = away
        return to_tokens(self.between, self.half, answers), rounds_of(self.between, counts)
