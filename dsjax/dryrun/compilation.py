"""Lowering and compiling a step of abstract values: the engine's own programs, with nothing behind them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered

from dsjax.config import ModelConfig
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.engine import cache as device_cache
from dsjax.engine.assembly import make_step
from dsjax.engine.buckets import Rectangle
from dsjax.engine.executor import ExecutorLimits
from dsjax.engine.process import without_compile_cache
from dsjax.engine.programs import Programs
from dsjax.engine.sampler import greedy
from dsjax.errors import UserError
from dsjax.model.rows import GroupShape, RowGroup, last_tokens, unpack
from dsjax.model.step import Step
from sharding import MeshSpec

# The CPU program is read and never run: LLVM's optimisations would only cost seconds. What XLA itself does is not changed.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_PARTITIONED = "after_spmd-partitioning"


class TooLarge(UserError):
    """A step that the target's compiler finds too large for the device."""


@dataclass(frozen=True)
class CompiledProgram:
    """A program.

    partitioned: its text right after partitioning, before the backend changed any dtype; None on accelerators, whose
    compiled programs keep dtypes, and where XLA wrote none. lower_seconds, compile_seconds: what the two took.
    """

    compiled: Compiled
    partitioned: str | None
    lower_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class CompiledStep:
    """A step, the descriptions it was compiled from, and its programs.

    filled: which cache slots the MTP module has filled; None without speculative decoding. main: the step itself, which with
    speculative decoding verifies the drafts of the step before. drafts: the MTP module's passes after it; None where nothing is
    drafted. num_drafts: how many tokens.
    """

    step: Step
    limits: ExecutorLimits
    shapes: tuple[GroupShape, ...]
    params: dict[str, jax.ShapeDtypeStruct]
    cache: dict[str, jax.ShapeDtypeStruct]
    filled: jax.ShapeDtypeStruct | None
    main: CompiledProgram
    drafts: CompiledProgram | None
    num_drafts: int

    @property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """All programs of the step."""
        return (self.main, self.drafts) if self.drafts else (self.main,)


def abstract_parameters(step: Step) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter of a step as a shape, its storage dtype and its sharding: what the engine's are made of."""
    return {
        path: jax.ShapeDtypeStruct(
            info.shape, info.storage_dtype, sharding=step.rules.sharding(step.mesh, info.logical_axes, info.shape)
        )
        for path, info in step.table.infos.items()
    }


def compile_step(args: DryRunArgs, config: ModelConfig, mesh: jax.sharding.Mesh) -> CompiledStep:
    """Compile the programs of the decode or prefill step that ``args`` describe, on a mesh of any devices.

    Raises:
        UserError, MeshError: options, model and mesh that do not go together, before anything is traced.
        TooLarge: the target's compiler refuses.
    """
    spec = MeshSpec.parse(args.engine.mesh)
    step = make_step(args.for_model(config), config, spec, mesh, mtp=args.engine.speculation is not None)
    limits = args.limits(config, spec)
    params, cache = abstract_parameters(step), device_cache.describe(step, limits.pages_per_rank)
    filled = describe_filled(step, limits) if step.has_module else None
    programs = Programs(step, params, cache, limits)
    rectangle = Rectangle(args.rows, args.chunk)
    shapes = programs.shapes(rectangle, None) if args.step == "decode" else programs.shapes(None, rectangle)
    if not step.has_module:
        main = _compile(lambda: programs.lower_step(shapes), args.target, mesh)
        return CompiledStep(step, limits, shapes, params, cache, filled, main, None, 0)
    drafting = _Drafting(step, params, cache, filled, limits, shapes)
    main = _compile(drafting.lower_verify, args.target, mesh)
    drafts = _compile(lambda: drafting.lower_drafts(args.drafts), args.target, mesh) if args.drafts else None
    return CompiledStep(step, limits, shapes, params, cache, filled, main, drafts, args.drafts)


def describe_filled(step: Step, limits: RunnerLimits) -> jax.ShapeDtypeStruct:
    """Which cache slots hold an entry of the MTP module: ``[dp × pages, page_size]`` bool, pages spread over the DP ranks."""
    shape = (limits.num_ranks * limits.pages_per_rank, limits.page_size)
    return jax.ShapeDtypeStruct(shape, bool, sharding=NamedSharding(step.mesh, P(step.spec.batch_axes)))


@dataclass(frozen=True)
class _Drafting:
    """The two programs of a step with speculative decoding."""

    step: Step
    params: dict[str, jax.ShapeDtypeStruct]
    cache: dict[str, jax.ShapeDtypeStruct]
    filled: jax.ShapeDtypeStruct
    limits: RunnerLimits
    shapes: tuple[GroupShape, ...]

    def lower_verify(self) -> Lowered:
        """``(params, cache, filled, packed) -> (greedy tokens, logits, hidden, cache, filled)``: decodes have logits of all tokens."""
        step = self.step

        def run(params, cache, filled, packed):
            groups = unpack(packed, self.shapes)
            hidden, cache, _ = step.hidden(params, cache, groups, self._copies())
            wanted = hidden if self.shapes[0].form == step.decode_form else last_tokens(hidden, groups)
            logits = step.logits(params, wanted)
            return greedy(logits), logits, hidden, cache, step.mark(filled, step.slots(groups), False)

        return jax.jit(run, donate_argnums=(1, 2)).lower(self.params, self.cache, self.filled, self._packed())

    def lower_drafts(self, count: int) -> Lowered:
        """``(params, cache, filled, packed, hidden, next_tokens) -> (drafts, cache, filled)``: the first pass goes over all tokens of the
        step, each further one over one token of each row."""
        step = self.step

        def run(params, cache, filled, packed, hidden, next_tokens):
            groups = unpack(packed, self.shapes)
            with jax.named_scope("draft_1"):
                hidden, cache, filled, _ = step.further(
                    params, cache, filled, groups, hidden, next_tokens, self._copies()
                )
                hidden = last_tokens(hidden, groups)
                drafts = [greedy(step.logits(params, hidden))]
            (group,) = groups
            shape = GroupShape(group.shape.rows, 1, group.shape.pages, step.decode_form)
            for index in range(1, count):
                with jax.named_scope(f"draft_{index + 1}"):
                    start = group.start + group.length - 1 + index
                    one = RowGroup(drafts[-1][..., None], start, jnp.minimum(group.length, 1), group.tables, shape)
                    hidden, cache, filled, _ = step.further(
                        params, cache, filled, [one], hidden, drafts[-1], self._copies()
                    )
                    drafts.append(greedy(step.logits(params, hidden)))
            return jnp.stack(drafts, axis=-1), cache, filled

        ranks, tokens = self.limits.num_ranks, sum(shape.tokens for shape in self.shapes)
        hidden = self._of_ranks((ranks, tokens, step.config.hidden_size), step.dtype)
        next_tokens = self._of_ranks((ranks, tokens), jnp.int32)
        return jax.jit(run, donate_argnums=(1, 2)).lower(
            self.params, self.cache, self.filled, self._packed(), hidden, next_tokens
        )

    def _copies(self):
        step = self.step
        return step.placement.tables_of(step.moe_layers_with_module) if step.config.is_moe else None

    def _packed(self) -> jax.ShapeDtypeStruct:
        return self._of_ranks((self.limits.num_ranks, sum(shape.packed_width for shape in self.shapes)), jnp.int32)

    def _of_ranks(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.step.mesh, P(self.step.spec.batch_axes)))


def _compile(lower: Callable[[], Lowered], target: str, mesh: jax.sharding.Mesh) -> CompiledProgram:
    started = time.perf_counter()
    lowered = lower()
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
        compiled, partitioned = _compile_for_accelerator(lowered, target), None
    return CompiledProgram(compiled, partitioned, lowering, time.perf_counter() - started)


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
