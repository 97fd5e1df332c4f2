"""Compilation of a step with attention–FFN disaggregation (AFD): all programs of both sides, without devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.compilation import CompiledProgram, compile_lowered
from dsjax.engine.afd.expert_side import ExpertSide, WayToDevices
from dsjax.engine.afd.layer_programs import CompiledPass
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.lowered_programs import LoweredPrograms
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.sizes import with_windows
from dsjax.model.apart import ExpertWork, LayerPass
from dsjax.model.expert_dispatch import ExpertsApart
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.cut import CutCompiled, Described


class DescribedExperts(ExpertSide):
    """``ExpertSide`` for abstract devices: it compiles and keeps its programs, and never runs them.

    Args:
        apart, mesh: as for ``ExpertSide``. target: name of both sides' compilation target, for messages.
        answering: the step of an expert process; None if attention and experts share one process.

    Attributes:
        programs: all compiled programs. passes: each pass through a run of layers, in the order of the step, and its programs.
    """

    def __init__(self, apart: ExpertsApart, mesh: Mesh, target: str, answering: ModelStep | None = None):
        super().__init__(apart, mesh)
        self._target, self._answering = target, answering
        self.programs: dict[int, CompiledProgram] = {}
        self.passes: list[tuple[Sequence[LayerPass], CompiledPass]] = []

    def build(self, lowered: Lowered) -> Compiled:
        """Compile and keep a program of either side."""
        made = compile_lowered(lowered, self._target, self.mesh)
        self.programs[id(made.compiled)] = made
        return made.compiled

    def numbers(self, mesh: Mesh, count: int) -> list[Array]:
        """Return no arrays, since no device can hold them."""
        return []

    def ready(self, program: Compiled) -> Array:
        """Return the program's abstract output, since no device can run it."""
        return program.out_info

    def compiled(self, work: ExpertWork, described: Sequence[Described]) -> CompiledPass:
        """Return a pass's programs, and record them in ``passes``."""
        made = super().compiled(work, described)
        self.passes.append((work.passes, made))
        return made

    def way(self, through: LayerPass) -> WayToDevices:
        """Compile the experts' program. For experts in another process, compile that process's program, with all rows in one array."""
        if self._answering is None:
            return super().way(through)
        between, step = through.between(), self._answering
        program = self.compile(step, through.stack, between.tokens, 1, between.senders * between.capacity)
        return WayToDevices(self, between, self.half(step), program, [])


@dataclass(frozen=True)
class ApartStep:
    """A disaggregated (AFD) step, the abstract values that it was compiled from, and its programs.

    step: the attention side's step. experts: the expert side. passes: each pass through layers with experts, with its programs. pieces:
    the programs before, between and after the passes, each with the name of its part (``step`` or ``drafts``).
    """

    step: ModelStep
    experts: DescribedExperts
    limits: ExecutorLimits
    shape: LaunchShape
    params: dict[str, jax.ShapeDtypeStruct]
    state: DeviceState
    num_drafts: int
    one_process: bool
    pieces: Sequence[tuple[str, CompiledProgram]]

    @property
    def passes(self) -> Sequence[tuple[Sequence[LayerPass], CompiledPass]]:
        """Passes through a run of layers, each with its programs."""
        return self.experts.passes

    def program(self, compiled: Any) -> CompiledProgram:
        """Return the ``CompiledProgram`` of a compiled executable."""
        return self.experts.programs[id(compiled)]


def compile_apart(
    args: DryRunArgs, config: ModelConfig, mesh: Mesh, expert_mesh: Mesh, *, target: str, one_process: bool
) -> ApartStep:
    """Compile all programs of the step that ``args`` describe.

    expert_mesh: the devices with experts; if the experts are in other processes, the devices of one such process (all are alike).
    target: name of the compilation target, for messages. one_process: whether one process has both sides.

    Raises:
        UserError, MeshError: options, model and meshes do not fit together. TooLarge: the target's compiler says the step does not fit.
    """
    spec, engine = MeshSpec.parse(args.engine.mesh), args.for_model(config)
    if mesh.devices.flat[0].platform == "cpu":
        engine = dataclasses.replace(engine, kernels="plain")  # as for one mesh
    mtp = engine.speculation is not None
    step = make_step(engine, config, spec, mesh, mtp=mtp)
    answering = None if one_process else _answering(engine, config, expert_mesh, mtp)
    if not one_process:
        parts = step.apart.spec.num_devices // expert_mesh.size
        step = dataclasses.replace(step, apart=dataclasses.replace(step.apart, parts=parts))
    experts = DescribedExperts(step.apart, expert_mesh, target, answering)
    limits = with_windows(args.limits(config, spec), engine, step)
    speculation = args.engine.speculation
    params = step.abstract_parameters()
    state = device_state.describe(step, limits, speculation.num_speculative_tokens if speculation else 0)
    programs = LoweredPrograms(step, params, state, limits, experts=experts)
    shape = programs.shape(args.decode, args.prefill)
    made: list[tuple[str, CutCompiled]] = [("step", programs.lower_step(shape).compile(compiler=experts.build))]
    if args.drafts:
        made.append(("drafts", programs.lower_drafts(shape, args.drafts).compile(compiler=experts.build)))
    pieces = [
        (name, experts.programs[id(run)])
        for name, compiled in made
        for piece, run in zip(compiled.lowered.pieces, compiled.runs, strict=True)
        if piece.work is None
    ]
    return ApartStep(step, experts, limits, shape, params, state, args.drafts, one_process, pieces)


def _answering(engine: EngineArgs, config: ModelConfig, mesh: Mesh, mtp: bool) -> ModelStep:
    """Return the expert process's step, as ``load_experts`` makes it."""
    alone = MeshSpec()
    return make_step(engine, config, alone, alone.arrange(list(mesh.devices.flat)[:1]), mtp=mtp)
