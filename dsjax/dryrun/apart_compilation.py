"""Compilation of a step with attention–FFN disaggregation (AFD): all programs of both sides, without devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

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
from dsjax.model.step_description import StepDescription
from sharding import MeshSpec
from sharding.cut import Described


class AbstractExpertSide(ExpertSide):
    """``ExpertSide`` for abstract devices: it compiles and keeps the programs of both sides, and never runs them.

    Args:
        apart, mesh: as for ``ExpertSide``.
        target: name of both sides' compilation target, for messages.
        expert_process_step: the step of an expert process; None if attention and experts share one process.

    Attributes:
        programs: all compiled programs, by the id of their executable.
        passes: each pass through a run of layers, in the order of the step, and its programs.
    """

    def __init__(self, apart: ExpertsApart, mesh: Mesh, target: str, expert_process_step: ModelStep | None = None):
        super().__init__(apart, mesh)
        self._target, self._expert_process_step = target, expert_process_step
        self.programs: dict[int, CompiledProgram] = {}
        self.passes: list[tuple[Sequence[LayerPass], CompiledPass]] = []

    def build(self, lowered: Lowered, step: StepDescription | None = None) -> Compiled:
        """Compile and keep a program of either side."""
        program = compile_lowered(lowered, self._target, self.mesh)
        self.programs[id(program.compiled)] = program
        return program.compiled

    def numbers(self, mesh: Mesh, count: int) -> list[Array]:
        """Return no arrays, since no device can hold them."""
        return []

    def ready(self, program: Compiled) -> Array:
        """Return the program's abstract output, since no device can run it."""
        return program.out_info

    def compiled(self, work: ExpertWork, described: Sequence[Described]) -> CompiledPass:
        """Return a pass's programs, and record them in ``passes``."""
        compiled_pass = super().compiled(work, described)
        self.passes.append((work.passes, compiled_pass))
        return compiled_pass

    def way(self, through: LayerPass) -> WayToDevices:
        """Compile the experts' program. For experts in another process, compile that process's program, with all rows in one array."""
        step = self._expert_process_step
        if step is None:
            return super().way(through)
        between = through.between()
        program = self.compile(step, through.stack, between.tokens, 1, between.senders * between.capacity)
        return WayToDevices(self, between, self.half(step), program, [])


@dataclass(frozen=True)
class ApartStep:
    """A disaggregated (AFD) step, the abstract values that it was compiled from, and its programs."""

    step: ModelStep  # the attention side's step
    experts: AbstractExpertSide  # the expert side
    limits: ExecutorLimits
    shape: LaunchShape
    params: dict[str, jax.ShapeDtypeStruct]
    state: DeviceState
    num_drafts: int
    one_process: bool
    # the programs before, between and after the passes of `experts`, each with the name of its part (``step`` or ``drafts``)
    outer_programs: Sequence[tuple[str, CompiledProgram]]


def compile_apart(
    args: DryRunArgs, config: ModelConfig, mesh: Mesh, expert_mesh: Mesh, *, target: str, one_process: bool
) -> ApartStep:
    """Compile all programs of the step that ``args`` describe.

    expert_mesh: the devices with experts; if the experts are in other processes, the devices of one such process (all are alike).
    target: name of the compilation target, for messages. one_process: whether one process has both sides.

    Raises:
        UserError, MeshError: options, model and meshes do not fit together. TooLarge: the target's compiler says the step does not fit.
    """
    spec = MeshSpec.parse(args.engine.mesh)
    engine = args.for_model(config)
    if mesh.devices.flat[0].platform == "cpu":
        engine = dataclasses.replace(engine, kernels="plain")  # as in `compile_step`
    speculation = engine.speculation
    mtp = speculation is not None
    step = make_step(engine, config, spec, mesh, mtp=mtp)
    expert_process_step = None
    if not one_process:
        expert_process_step = _expert_process_step(engine, config, expert_mesh, mtp)
        processes = step.apart.spec.num_devices // expert_mesh.size
        step = dataclasses.replace(step, apart=dataclasses.replace(step.apart, parts=processes))
    experts = AbstractExpertSide(step.apart, expert_mesh, target, expert_process_step)
    limits = with_windows(args.limits(config, spec), engine, step)
    params = step.abstract_parameters()
    state = device_state.describe(step, limits, speculation.num_speculative_tokens if mtp else 0)
    programs = LoweredPrograms(step, params, state, limits, experts=experts)
    shape = programs.shape(args.decode, args.prefill)
    parts = {"step": programs.lower_step(shape)}
    if args.drafts:
        parts["drafts"] = programs.lower_drafts(shape, args.drafts)
    outer_programs = [
        (part, experts.programs[id(program)])
        for part, lowered in parts.items()
        for program in lowered.compile(compiler=experts.build).programs
    ]
    return ApartStep(step, experts, limits, shape, params, state, args.drafts, one_process, outer_programs)


def _expert_process_step(engine: EngineArgs, config: ModelConfig, mesh: Mesh, mtp: bool) -> ModelStep:
    """Return the expert process's step, as ``load_experts`` makes it."""
    alone = MeshSpec()
    return make_step(engine, config, alone, alone.arrange(list(mesh.devices.flat)[:1]), mtp=mtp)
