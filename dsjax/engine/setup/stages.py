"""From ``EngineArgs`` to a model that is loaded stage by stage: every check first, then the weights, then an executor for each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.config import ModelConfig
from dsjax.descriptors import descriptor_limit
from dsjax.engine.contract.executor import Executor, ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.process import enable_compile_cache, explained_out_of_memory, keep_freed_memory
from dsjax.engine.experts.expert_exchange import Reload
from dsjax.engine.pipeline.experts_of_stages import ExpertsOfProcesses, ExpertsOfStages
from dsjax.engine.pipeline.pipeline_executor import PipelineExecutor
from dsjax.engine.pipeline.process_links import ProcessLinks
from dsjax.engine.pipeline.stage_executor import StageExecutor
from dsjax.engine.pipeline.stages_of_process import StagesOfProcess
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import weights_format
from dsjax.engine.setup.facts import EngineFacts, StageFacts, describe_engine
from dsjax.engine.setup.fitting import check_layout
from dsjax.engine.setup.loading import (
    SMALLER,
    SMALLER_CACHE,
    LoadedEngine,
    common_limits,
    executor_parts,
    lock_disk,
    open_disk,
    page_space,
    read_eos_token_ids,
    record_if_wanted,
)
from dsjax.engine.setup.sizes import EngineLayout, check_device_memory, check_host_memory
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.engine.stream.step_record import check_writable
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.engine.tiers.divided_pages import DividedPages
from dsjax.engine.tiers.page_folder import PageFolder
from dsjax.engine.tiers.page_tiers import PageReporter
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from dsjax.model.derived import materialise
from dsjax.model.parameters import device_bytes
from dsjax.model.stage import Stage, stages_of
from dsjax.model.step import ModelStep
from sharding import MeshError, MeshSpec
from sharding.layer_placement import LayerPlacements


def load_stages(
    args: EngineArgs, group: HostGroup | None = None, *, show_progress: bool = False, is_later: bool = False
) -> LoadedEngine:
    """Check everything, then load the model that ``args`` names onto the meshes of its stages.

    group: the processes that share the stages, which all call this and load their own; process 0's executor then leads the others.
    is_later: as of ``load_model``.

    Raises:
        UserError, MeshError: anything that cannot be; before weights are read, unless they are what is wrong.
    """
    descriptor_limit()
    if args.record_steps is not None:
        check_writable(args.record_steps)
    lock = lock_disk(args, group)
    with contextlib.ExitStack() as opened:
        if lock is not None:
            opened.callback(lock.close)
        loaded = _load_stages(args, group, lock, opened, show_progress, is_later)
        opened.pop_all()
        return loaded


def _load_stages(
    args: EngineArgs,
    group: HostGroup | None,
    lock: PageFolder | None,
    opened: contextlib.ExitStack,
    show_progress: bool,
    is_later: bool,
) -> LoadedEngine:
    """Do what `load_stages` says. lock: the folder of `--disk-cache`, which is this engine's. opened: what is closed where it fails."""
    spec = MeshSpec.parse(args.mesh)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    config, directory = checkpoint.config, checkpoint.directory
    # Before the meshes are built, for that starts JAX and emulates their devices.
    weights = "bf16" if args.weights == "auto" else args.weights
    check_layout(config, spec.stage, args.num_redundant, weights, dense_tp=args.moe_dense_tp_size)
    stages = stages_of(config, spec.pp_size, given=args.pp_layer_partition, mtp=args.speculation is not None)
    meshes = spec.build_stages()
    order = [owner_of(stage, mesh) for stage, mesh in zip(stages, meshes, strict=True)]
    if group is not None:
        check_owners(spec, order, group)
        own = [place for place, owner in enumerate(order) if owner == group.options.process_id]
        stages, meshes = ([each[place] for place in own] for each in (stages, meshes))
    library = ProgramLibrary()
    library.keep_in(enable_compile_cache())
    on_cpu = meshes[0].devices.flat[0].platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    layouts = [EngineLayout.of(args, checkpoint, mesh, stage=stage) for stage, mesh in zip(stages, meshes, strict=True)]
    steps = [layout.step for layout in layouts]
    weights = weights_format(args, config, steps[0].dtype, checkpoint.bf16_experts)

    def read_all() -> list[dict[str, Array]]:
        if on_cpu:
            check_host_memory(args, *steps)
        else:
            for step in steps:
                check_device_memory(args, step, Pool.of(step, 0))
        with explained_out_of_memory("its weights were loaded", SMALLER):
            read = _read(args, checkpoint, steps, weights, show_progress)
            return [materialise(step, one) for step, one in zip(steps, read, strict=True)]

    if group is None:
        params = read_all()
        limits = _limits(args, layouts, params)
    else:
        names = steps[0].kernels.names(args.mla_prefill, args.mla_decode)
        group.agreement.alike("kernels", "kernels", names)
        params = group.agreement.run("loading", read_all)
        limits = common_limits(group, lambda: _limits(args, layouts, params))
    pages = None
    if lock is not None:
        space = page_space(args, steps[-1], directory)
        pages = DividedPages(len(steps), partial(open_disk, args, space, lock))
    executors = list[StageExecutor]()
    with explained_out_of_memory("its cache was made", SMALLER_CACHE):
        for layout, one in zip(layouts, params, strict=True):
            reload = _reloading(args, config, directory, layout.step, weights)
            executor_of_stage = StageExecutor(
                layout.step,
                one,
                limits,
                layout.buckets,
                num_drafts=layout.num_drafts,
                experts_per_exchange=layout.per_exchange,
                parts=executor_parts(args, limits, layout.per_exchange, reload, pages and pages.part),
                library=library,
            )
            executors.append(executor_of_stage)
            opened.callback(executor_of_stage.shutdown)
    if pages is not None:
        pages.report_through([one.extension(PageReporter) for one in executors])
    facts = _describe(args, spec, layouts, limits, params, weights)
    executor: Executor
    if group is None or len(group.present) == 1:
        experts = ExpertsOfStages(executors, config) if args.eplb else None
        executor = PipelineExecutor(executors, experts, [] if pages is None else [pages])
    else:
        links = ProcessLinks(group, list(dict.fromkeys(order)))
        opened.callback(links.close)
        executor = StagesOfProcess(
            executors, links, ExpertsOfProcesses(executors, config, links) if args.eplb else None
        )
        facts = _of_all(group, facts)
        if group.is_leader:
            executor = LeaderExecutor(executor, group)
    if group is None or group.is_leader:
        executor = record_if_wanted(args, executor, meshes[0], directory)
    has_tokenizer = (directory / "tokenizer.json").is_file() and not is_later
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    return LoadedEngine(
        executor,
        tokenizer,
        config,
        read_eos_token_ids(directory, tokenizer),
        facts,
    )


def owner_of(stage: Stage, mesh: Mesh) -> int:
    """The process that has a stage's devices.

    Raises:
        MeshError: there are several.
    """
    owners = sorted({device.process_index for device in mesh.devices.flat})
    if len(owners) > 1:
        raise MeshError(
            f"the devices of {stage} are of processes {', '.join(map(str, owners))}, expected one: a stage's own exchanges are inside a "
            "process; give each process whole stages"
        )
    return owners[0]


def check_owners(spec: MeshSpec, order: Sequence[int], group: HostGroup) -> None:
    """Refuse stages that leave a process of the group without any: it would have nothing to follow with.

    Raises:
        UserError: one has none.
    """
    idle = [member for member in group.members if member.process_id not in order]
    if idle:
        raise UserError(
            f"mesh {spec} has {spec.pp_size} stages, none of them of {idle[0].name}; start {len(set(order))} processes, or use more stages"
        )


def _read(
    args: EngineArgs, checkpoint: Checkpoint, steps: Sequence[ModelStep], weights: str, show_progress: bool
) -> list[dict[str, Array]]:
    """Read the parameters of each stage of this process."""
    return [
        _read_stage(
            args, checkpoint.config, checkpoint, step, weights, step.stored_placement, step.table.infos, show_progress
        )
        for step in steps
    ]


def _read_stage(
    args: EngineArgs,
    config: ModelConfig,
    source: Checkpoint | Path,
    step: ModelStep,
    weights: str,
    placement: LayerPlacements,
    only: Collection[str],
    show_progress: bool = False,
) -> dict[str, Array]:
    """Read parameters of a stage, given by their paths. config: of the whole model; placement: of this stage's experts."""
    return load(
        config,
        source,
        step.mesh,
        step.rules,
        weights=weights,
        placement=_as_of_all(config, step, placement) if step.config.is_moe else None,
        mtp=args.speculation is not None,
        only=only,
        window=step.stage.window(config),
        progress=show_progress,
    )


def _as_of_all(config: ModelConfig, step: ModelStep, placement: LayerPlacements) -> LayerPlacements:
    """A stage's placement as one of the whole model's layers; those of other stages, which nobody reads, have the first of its rows."""
    rows = np.tile(placement.physical_to_logical[:1], (config.num_moe_layers + config.num_nextn_predict_layers, 1))
    first = step.stage.first_row(config)
    rows[first : first + placement.n_layers] = placement.physical_to_logical
    return LayerPlacements(rows, placement.n_logical)


def _reloading(args: EngineArgs, config: ModelConfig, directory: Path, step: ModelStep, weights: str) -> Reload:
    """Make what reads experts of a stage anew."""

    def reload(paths: list[str], placements: LayerPlacements) -> Mapping[str, Array]:
        return _read_stage(args, config, directory, step, weights, step.stored(placements), paths)

    return reload


def _limits(args: EngineArgs, layouts: Sequence[EngineLayout], params: Sequence[dict[str, Array]]) -> ExecutorLimits:
    """Limits with as many pages as fit the stage with the least room."""
    each = [layout.limits(args, ProgramLibrary(), one, None) for layout, one in zip(layouts, params, strict=True)]
    return min(each, key=lambda limits: limits.pages_per_rank)


_OF_FULLEST = ("weight_bytes", "cache_bytes")
_OF_EXPERTS = ("physical_experts_per_device", "dispatch")


def _of_all(group: HostGroup, facts: EngineFacts) -> EngineFacts:
    """These facts of one process, with the stages and sizes of all; bytes are of a device of the stage with most weights."""
    names = ("parameters", *_OF_FULLEST, *_OF_EXPERTS)
    everybody = group.agreement.ask(
        "facts", {name: getattr(facts, name) for name in names} | {"stages": [asdict(one) for one in facts.stages]}
    )
    stages = [StageFacts(**one | {"layers": tuple(one["layers"])}) for own in everybody for one in own["stages"]]
    fullest = max(everybody, key=lambda own: sum(own["weight_bytes"].values()))
    moe = next((own for own in everybody if own["physical_experts_per_device"]), fullest)
    return replace(
        facts,
        parameters=sum(own["parameters"] for own in everybody),
        num_processes=len(everybody),
        stages=sorted(stages, key=lambda stage: stage.layers),
        **{name: fullest[name] for name in _OF_FULLEST},
        **{name: moe[name] for name in _OF_EXPERTS},
    )


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
        stages=stages,
    )
