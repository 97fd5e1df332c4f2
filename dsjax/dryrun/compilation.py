"""Lower and compile the engine's programs of a step from abstract values: no weights and no devices are needed."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs, TooLarge
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state, expert_programs
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.lowered_programs import LoweredPrograms
from dsjax.engine.device.process import without_compile_cache
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.setup.assembly import experts_per_exchange, make_step
from dsjax.engine.setup.sizes import with_windows
from dsjax.errors import UserError
from dsjax.model.stage import Stage
from dsjax.model.step import ModelStep
from dsjax.versions import installed_version
from sharding import MeshSpec

# The CPU program is inspected and never run, so skip LLVM's optimisations to save seconds. XLA's own passes are unchanged.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PARTITIONED = "after_spmd-partitioning"


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, and the time to make it."""

    compiled: Compiled
    # XLA's text of the program right after SPMD partitioning, before the CPU backend changes dtypes. None for accelerators, whose compiled
    # programs keep the dtypes, and if XLA wrote no text
    partitioned: str | None
    lower_seconds: float
    compile_seconds: float

    @property
    def added_bytes(self) -> int:
        """Bytes of temporaries and of outputs that alias no argument: the program's memory beside its arguments."""
        memory = self.compiled.memory_analysis()
        return memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    def text(self) -> str:
        """Return the compiled program as XLA prints it.

        Raises:
            UserError: jaxlib cannot read the program, because the compiler has another version.
        """
        try:
            return self.compiled.as_text()
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"jaxlib {installed_version('jaxlib')} cannot read the program that {_accelerator_compilers()} made "
                f"({_first_line(error)}); their versions must match: pip install -U 'dsjax[tpu]' or 'dsjax[cuda]' installs the matching "
                "compiler"
            ) from error


@dataclass(frozen=True)
class CompiledExchange:
    """The programs that move experts between two steps (`--enable-eplb`)."""

    stage: CompiledProgram  # sends experts to the staging buffers of their new ranks
    place: CompiledProgram  # writes experts from the staging buffers into the weights
    experts: int  # most experts that a rank receives per exchange

    @property
    def temporaries(self) -> int:
        """``added_bytes`` of the larger program."""
        return max(self.stage.added_bytes, self.place.added_bytes)


@dataclass(frozen=True)
class CompiledStep:
    """A step's programs, and the abstract values from which they were compiled."""

    step: ModelStep
    limits: ExecutorLimits
    shape: LaunchShape
    params: dict[str, jax.ShapeDtypeStruct]
    state: DeviceState
    main: CompiledProgram  # the step, which also verifies the previous step's drafts
    drafts: CompiledProgram | None  # the MTP module's passes after the step; None without drafts
    num_drafts: int  # tokens that each row drafts
    exchange: CompiledExchange | None = None  # None without `--enable-eplb`

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """All programs: the step's, then the expert exchange's."""
        drafts = (self.drafts,) if self.drafts else ()
        exchange = (self.exchange.stage, self.exchange.place) if self.exchange else ()
        return (self.main, *drafts, *exchange)


def compile_step(
    args: DryRunArgs,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    exchange: CompiledExchange | None = None,
    stage: Stage | None = None,
) -> CompiledStep:
    """Compile the programs of the step that ``args`` describe, for the devices of ``mesh``.

    exchange: reused if given, because the programs that move experts do not depend on the step's size.
    stage: the pipeline stage to compile, of which ``mesh`` has the devices; None without pipeline parallelism.

    Raises:
        UserError, MeshError: options, model and mesh do not fit together; raised before tracing.
        TooLarge: the target's compiler says that the step does not fit.
    """
    spec = MeshSpec.parse(args.engine.mesh).stage
    engine = args.for_model(config)
    if mesh.devices.flat[0].platform == "cpu":
        # XLA does not count the FLOPs and bytes of custom calls, so replace native kernels by the plain ones, which have the same counts.
        engine = dataclasses.replace(engine, kernels="plain")
    step = make_step(engine, config, spec, mesh, mtp=engine.speculation is not None, stage=stage)
    limits = with_windows(args.limits(config, spec), engine, step)
    most_drafts = engine.speculation.num_speculative_tokens if engine.speculation else 0
    moved_experts = experts_per_exchange(engine, step)
    params = step.abstract_parameters()
    state = device_state.describe(step, limits, most_drafts, counts_loads=moved_experts > 0)
    programs = LoweredPrograms(step, params, state, limits)
    shape = programs.shape(args.decode, args.prefill)
    main = _compile(lambda: programs.lower_step(shape), args.target, mesh)
    num_drafts = args.drafts if step.is_last_stage else 0
    drafts = _compile(lambda: programs.lower_drafts(shape, num_drafts), args.target, mesh) if num_drafts else None
    if moved_experts and exchange is None:
        exchange = _compile_exchange(step, params, state, moved_experts, args.target)
    return CompiledStep(step, limits, shape, params, state, main, drafts, num_drafts, exchange)


def _compile_exchange(
    step: ModelStep, params: dict[str, jax.ShapeDtypeStruct], state: DeviceState, experts: int, target: str
) -> CompiledExchange:
    layers = expert_programs.expert_layers(step)[0]  # the first stack of layers stands for all
    stage = _compile(lambda: expert_programs.lower_stage(step, params, layers, experts), target, step.mesh)
    place = _compile(
        lambda: expert_programs.lower_place(step, params, layers, state.copies, state.loads), target, step.mesh
    )
    return CompiledExchange(stage, place, experts)


def _compile(lower: Callable[[], Lowered], target: str, mesh: jax.sharding.Mesh) -> CompiledProgram:
    started = time.perf_counter()
    lowered = lower()
    return compile_lowered(lowered, target, mesh, time.perf_counter() - started)


def compile_lowered(
    lowered: Lowered, target: str, mesh: jax.sharding.Mesh, lower_seconds: float = 0.0
) -> CompiledProgram:
    """Compile a program for the devices of a mesh. target: their name in messages.

    Raises:
        TooLarge: the program does not fit on the devices.
        UserError: the target's compiler refuses it for another reason.
    """
    started = time.perf_counter()
    if mesh.devices.flat[0].platform == "cpu":
        with tempfile.TemporaryDirectory(prefix="dsjax-dryrun-") as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
            with without_compile_cache():
                compiled = lowered.compile(compiler_options=_CPU_OPTIONS | dump)
            texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob(f"*{_PARTITIONED}*.txt")]
        partitioned = texts[0] if len(texts) == 1 else None
    else:
        compiled = _compile_for_accelerator(lowered, target)
        partitioned = None
    return CompiledProgram(compiled, partitioned, lower_seconds, time.perf_counter() - started)


def _compile_for_accelerator(lowered: Lowered, target: str) -> Compiled:
    """Compile for an accelerator. Raises `TooLarge` if the compiler rejects the program for its size, as the TPU compiler does."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = _first_line(error).removeprefix("RESOURCE_EXHAUSTED: ")
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise UserError(
                f"{_accelerator_compilers()} cannot compile the step for {target}: {reason}. --kernels plain leaves out dsjax's own "
                "kernels, and --target cpu says what weights, cache and collectives need"
            ) from error
        raise TooLarge(
            f"the step does not fit on {target}: {reason}. Use more devices, --weights fp8, a smaller --batch or --context, "
            "or --target cpu, which says what weights and cache need"
        ) from error


def _accelerator_compilers() -> str:
    """Return the names and versions of the installed compilers for accelerators."""
    versions = {name: installed_version(name, missing="") for name in ("libtpu", "jax-cuda13-plugin")}
    return " or ".join(f"{name} {version}" for name, version in versions.items() if version) or "the compiler"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
