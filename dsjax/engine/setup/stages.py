"""From ``EngineArgs`` to a model that is loaded stage by stage: every check first, then the weights, then an executor for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.descriptors import descriptor_limit
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.process import enable_compile_cache, explained_out_of_memory, keep_freed_memory
from dsjax.engine.device.program_library import ProgramLibrary
from dsjax.engine.pipeline.pipeline_executor import PipelineExecutor
from dsjax.engine.pipeline.stage_executor import StageExecutor
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import check_layout, weights_format
from dsjax.engine.setup.facts import EngineFacts, StageFacts, describe_engine
from dsjax.engine.setup.loading import (
    SMALLER,
    SMALLER_CACHE,
    LoadedEngine,
    materialise,
    read_eos_token_ids,
    record_if_wanted,
)
from dsjax.engine.setup.sizes import EngineLayout, check_device_memory, check_host_memory, page_bytes
from dsjax.engine.stream.step_record import check_writable
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.model.parameters import device_bytes
from dsjax.model.stage import stages_of
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.layer_placement import LayerPlacements


def load_stages(args: EngineArgs, *, show_progress: bool = False) -> LoadedEngine:
    """Check everything, then load the model that ``args`` names onto the meshes of its stages.

    Raises:
        UserError, MeshError: anything that cannot be; before weights are read, unless they are what is wrong.
    """
    descriptor_limit()
    if args.record_steps is not None:
        check_writable(args.record_steps)
    spec = MeshSpec.parse(args.mesh)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    config, directory = checkpoint.config, checkpoint.directory
    # Before the meshes are built, for that starts JAX and emulates their devices.
    weights = "bf16" if args.weights == "auto" else args.weights
    check_layout(config, spec.stage, args.num_redundant, weights, dense_tp=args.moe_dense_tp_size)
    stages_of(config, spec.pp_size, given=args.pp_layer_partition)
    meshes = spec.build_stages()
    enable_compile_cache()
    on_cpu = meshes[0].devices.flat[0].platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    layouts = lay_out_stages(args, checkpoint, meshes)
    steps = [layout.step for layout in layouts]
    if on_cpu:
        check_host_memory(args, *steps)
    else:
        for step in steps:
            check_device_memory(args, step, Pool.of(step, 0))
    weights = weights_format(args, config, steps[0].dtype, checkpoint.bf16_experts)
    with explained_out_of_memory("its weights were loaded", SMALLER):
        params = [
            materialise(step, one)
            for step, one in zip(steps, _read(args, checkpoint, steps, weights, show_progress), strict=True)
        ]
    limits = _limits(args, layouts, params)
    with explained_out_of_memory("its cache was made", SMALLER_CACHE):
        executors = [
            StageExecutor(layout.step, one, limits, layout.buckets, num_drafts=layout.num_drafts)
            for layout, one in zip(layouts, params, strict=True)
        ]
    executor = record_if_wanted(args, PipelineExecutor(executors), meshes[0], directory)
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    return LoadedEngine(
        executor,
        tokenizer,
        config,
        read_eos_token_ids(directory, tokenizer),
        _describe(args, spec, layouts, limits, params, weights),
    )


def lay_out_stages(args: EngineArgs, checkpoint: Checkpoint, meshes: Sequence[Mesh]) -> list[EngineLayout]:
    """Lay out each stage of the model on its mesh.

    Raises:
        UserError, MeshError: options, model and meshes that do not go together.
    """
    stages = stages_of(checkpoint.config, len(meshes), given=args.pp_layer_partition, mtp=args.speculation is not None)
    return [EngineLayout.of(args, checkpoint, mesh, stage=stage) for stage, mesh in zip(stages, meshes, strict=True)]


def _read(
    args: EngineArgs, checkpoint: Checkpoint, steps: Sequence[ModelStep], weights: str, show_progress: bool
) -> list[dict[str, Array]]:
    """Read the parameters of each stage."""
    placement = None
    if checkpoint.config.is_moe:
        own = [step.stored_placement for step in steps if step.config.is_moe]
        placement = LayerPlacements(np.concatenate([one.physical_to_logical for one in own]), own[0].n_logical)
    return [
        load(
            checkpoint.config,
            checkpoint,
            step.mesh,
            step.rules,
            weights=weights,
            placement=placement,
            mtp=args.speculation is not None,
            only=step.table.infos,
            stage=step.stage,
            progress=show_progress,
        )
        for step in steps
    ]


def _limits(args: EngineArgs, layouts: Sequence[EngineLayout], params: Sequence[dict[str, Array]]) -> ExecutorLimits:
    """Limits with as many pages as fit the stage with the least room."""
    each = [layout.limits(args, ProgramLibrary(), one, None) for layout, one in zip(layouts, params, strict=True)]
    return min(each, key=lambda limits: limits.pages_per_rank)


def _describe(
    args: EngineArgs,
    spec: MeshSpec,
    layouts: Sequence[EngineLayout],
    limits: ExecutorLimits,
    params: Sequence[dict[str, Array]],
    weights: str,
) -> EngineFacts:
    """Say what an engine of several stages is: bytes are of a device of the stage with most weights."""
    own = [
        describe_engine(args, layout.step, limits, layout.buckets, one, weights)
        for layout, one in zip(layouts, params, strict=True)
    ]
    stages = [
        StageFacts(
            layers=(step.stage.first, step.stage.first + step.stage.layers - 1),
            weight_bytes=sum(device_bytes(one).values()),
            cache_bytes=device_cache.bytes_per_page(step) * limits.pages_per_rank,
        )
        for step, one in zip([layout.step for layout in layouts], params, strict=True)
    ]
    fullest = max(range(len(own)), key=lambda number: stages[number].weight_bytes)
    again = 0 if layouts[-1].step.begins else layouts[-1].step.table.infos.get("embed.weight")
    moe = next((one for one in own if one.physical_experts_per_device), own[fullest])
    return replace(
        own[fullest],
        parameters=sum(one.parameters for one in own) - (again.count if again else 0),
        mesh=str(spec),
        mesh_shape={"pp": spec.pp_size, **own[fullest].mesh_shape},
        num_devices=spec.num_devices,
        num_processes=jax.process_count(),
        physical_experts_per_device=moe.physical_experts_per_device,
        dispatch=moe.dispatch,
        page_bytes=sum(page_bytes(layout.step) for layout in layouts),
        stages=stages,
    )
