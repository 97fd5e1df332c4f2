"""Lowering and compiling a step of abstract values: the engine's own program, with nothing behind it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.engine import cache as device_cache
from dsjax.engine.assembly import make_step
from dsjax.engine.buckets import Rectangle
from dsjax.engine.plan import RunnerLimits
from dsjax.engine.process import without_compile_cache
from dsjax.engine.programs import Programs
from dsjax.errors import UserError
from dsjax.model.rows import GroupShape
from dsjax.model.step import Step
from sharding import MeshSpec

# The CPU program is read and never run: LLVM's optimisations would only cost seconds. What XLA itself does is not changed.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PARTITIONED = "after_spmd-partitioning"


class TooLarge(UserError):
    """A step that the target's compiler finds too large for the device."""


@dataclass(frozen=True)
class CompiledStep:
    """A step, the descriptions it was compiled from, and the program.

    partitioned: the program's text right after partitioning, before the backend changed any dtype; None on accelerators, whose
    compiled programs keep dtypes, and where XLA wrote none. lower_seconds, compile_seconds: what the two took.
    """

    step: Step
    limits: RunnerLimits
    shapes: tuple[GroupShape, ...]
    params: dict[str, jax.ShapeDtypeStruct]
    cache: dict[str, jax.ShapeDtypeStruct]
    compiled: Compiled
    partitioned: str | None
    lower_seconds: float
    compile_seconds: float


def abstract_parameters(step: Step) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter of a step as a shape, its storage dtype and its sharding: what the engine's are made of."""
    return {
        path: jax.ShapeDtypeStruct(
            info.shape, info.storage_dtype, sharding=step.rules.sharding(step.mesh, info.logical_axes, info.shape)
        )
        for path, info in step.table.infos.items()
    }


def compile_step(args: DryRunArgs, config: ModelConfig, mesh: jax.sharding.Mesh) -> CompiledStep:
    """Compile the decode or prefill program that ``args`` describe, on a mesh of any devices.

    Raises:
        UserError, MeshError: options, model and mesh that do not go together, before anything is traced.
        TooLarge: the target's compiler refuses.
    """
    spec = MeshSpec.parse(args.engine.mesh)
    engine = args.for_model(config)
    if mesh.devices.flat[0].platform == "cpu":
        # Native kernels are custom calls, whose operations and bytes a compiled program does not tell; the plain forms' are theirs.
        engine = dataclasses.replace(engine, kernels="plain")
    step = make_step(engine, config, spec, mesh)
    limits = args.limits(config, spec)
    params, cache = abstract_parameters(step), device_cache.describe(step, limits.pages_per_rank)
    programs = Programs(step, params, cache, limits)
    rectangle = Rectangle(args.rows, args.chunk)
    shapes = programs.shapes(rectangle, None) if args.step == "decode" else programs.shapes(None, rectangle)
    started = time.perf_counter()
    lowered = programs.lower_step(shapes)
    lowering = time.perf_counter() - started
    started = time.perf_counter()
    if mesh.devices.flat[0].platform == "cpu":
        with tempfile.TemporaryDirectory(prefix="dsjax-dryrun-") as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
            with without_compile_cache():
                compiled = lowered.compile(compiler_options=_CPU_OPTIONS | dump)
            texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob(f"*{_PARTITIONED}*.txt")]
        partitioned = texts[0] if len(texts) == 1 else None
    else:
        compiled, partitioned = _compile_for_accelerator(lowered, args.target), None
    return CompiledStep(
        step, limits, shapes, params, cache, compiled, partitioned, lowering, time.perf_counter() - started
    )


def _compile_for_accelerator(lowered: Lowered, target: str) -> Compiled:
    """Compile, and tell a program that is too large for the device (which TPU's compiler refuses) from one that is at fault."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise TooLarge(
            f"the step does not fit on {target}: {reason} Use more devices, --weights fp8, a smaller --batch or --context, "
            "or --target cpu, which says what weights and cache need"
        ) from error
