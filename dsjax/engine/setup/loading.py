"""From ``EngineArgs`` to a loaded model on its mesh: every check first, then the weights, then the executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array

from dsjax.checkpoint.expert_reader import ExpertReader
from dsjax.checkpoint.fingerprint import fingerprint
from dsjax.checkpoint.held_weights import HeldWeights, WeightBytes
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.config import ModelConfig
from dsjax.descriptors import descriptor_limit
from dsjax.engine.afd.expert_side import ExpertSide, ExpertSidePart, build_both
from dsjax.engine.afd.expert_slots import SlotWriter
from dsjax.engine.afd.layer_programs import Side
from dsjax.engine.afd.options import expert_spec
from dsjax.engine.contract.executor import Executor, ExecutorLimits
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.mesh_executor import MeshExecutor, PartMaker
from dsjax.engine.device.process import enable_compile_cache, explained_out_of_memory, keep_freed_memory
from dsjax.engine.experts.expert_exchange import ExpertExchange
from dsjax.engine.experts.expert_part import ExpertPart
from dsjax.engine.pipeline.stage_executor import StageExecutor
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.schedule.page_source import import_page_source
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import weights_format
from dsjax.engine.setup.attention_side import connect_experts, remote_part
from dsjax.engine.setup.facts import EngineFacts, describe_engine
from dsjax.engine.setup.fitting import check_layout
from dsjax.engine.setup.sizes import EngineLayout, check_device_memory, check_host_memory
from dsjax.engine.setup.spaces import page_space
from dsjax.engine.setup.stages import OwnStages, check_shares, placement_of_all
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.engine.stream.step_record import RecordingExecutor, StepFile, check_writable, describe_recording
from dsjax.engine.text.tokenizer import Tokenizer, TokenizerError, has_tokenizer, read_json
from dsjax.engine.tiers.disk_pages import DiskPages, Shapes
from dsjax.engine.tiers.divided_pages import DividedPages
from dsjax.engine.tiers.offloaded_pages import OffloadedPages
from dsjax.engine.tiers.page_folder import PageFiles, PageFolder
from dsjax.engine.transfer.page_chunks import PageChunks
from dsjax.hosts.group import HostGroup
from dsjax.hosts.options import address_of_this_host, means_loopback
from dsjax.model.derived import materialise
from dsjax.model.step import ModelStep
from dsjax.model.window import ParameterWindow
from sharding import MeshSpec
from sharding.layer_placement import LayerPlacements

SMALLER = "use a mesh of more devices, --weights fp8, or a higher --gpu-memory-utilization"
"""Advice if the weights do not fit."""
SMALLER_CACHE = "give a smaller --cache-tokens or --max-num-seqs"
"""Advice if the cache does not fit."""


@dataclass(frozen=True)
class LoadedEngine:
    """An executor with its tokenizer, config and facts.

    tokenizer: None if the model's directory has none. page_space: result of `page_space()`; None without transfers.
    held: takes over the weights when the executor is released. sources: bytes of all weights by origin.
    """

    executor: Executor
    tokenizer: Tokenizer | None
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    facts: EngineFacts
    page_space: dict[str, Any] | None = None
    held: HeldWeights = field(default_factory=HeldWeights)
    sources: WeightBytes = field(default_factory=WeightBytes)


def load_model(
    args: EngineArgs,
    group: HostGroup | None = None,
    *,
    mesh: Mesh | None = None,
    is_later: bool = False,
    library: ProgramLibrary | None = None,
    show_progress: bool = False,
    held: HeldWeights | None = None,
) -> LoadedEngine:
    """Validate ``args``, then load its model onto its mesh, or onto the meshes of its stages. Call `emulate_devices` before.

    group: the processes that share the mesh; all of them call this, and process 0's executor leads the others. mesh: mesh to use for
    ``args.mesh``; None: one of the first devices. Stages always use the first devices. is_later: a tokenizer is loaded already.
    library: programs that this process has compiled before. held: parameters of another mesh on this process's devices, as in ``load``;
    empty once the executor has its own.

    Raises:
        UserError, MeshError: invalid configuration or weights. All but errors in the weights are raised before weights are read.
    """
    if args.transfer_host is not None and args.disaggregation_mode != "agg":
        alone = group is None or means_loopback(group.options.coordinator[0])
        address_of_this_host(
            "--transfer-host", args.transfer_host, on_loopback=alone and means_loopback(args.transfer_host)
        )
    descriptor_limit()  # each memory-mapped checkpoint file takes a descriptor
    if args.record_steps is not None:
        check_writable(args.record_steps)
    # Before anything expensive is done.
    lock = None if args.disk_cache is None else PageFolder(args.disk_cache).lock()
    # An error that outlives this call, as in a notebook, must not keep the folder and connections open.
    with contextlib.ExitStack() as opened:
        if lock is not None:
            opened.callback(lock.close)
        held = HeldWeights() if held is None else held
        loader = _Loader(args, group, mesh, is_later, library or ProgramLibrary(), show_progress, held)
        loaded = loader.load(lock, opened)
        opened.pop_all()
        return loaded


@dataclass(eq=False)
class _Loader:
    """Loads one model for `load_model`; the fields are its arguments.

    Construction opens the checkpoint, builds the meshes (which initializes JAX), enables the compile cache and, with stages, clears `held`.
    Each pipeline stage of this process has a layout, parameters and an executor; without stages there is one of each.
    """

    args: EngineArgs
    group: HostGroup | None
    mesh: Mesh | None
    is_later: bool
    library: ProgramLibrary
    show_progress: bool
    held: HeldWeights

    def __post_init__(self):
        args, group = self.args, self.group
        self.spec = spec = MeshSpec.parse(args.mesh)
        self.checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
        self.config, self.directory = self.checkpoint.config, self.checkpoint.directory
        # Before a mesh is built, since that initializes JAX and its emulated devices.
        expert_mesh_spec, assumed = expert_spec(args), "bf16" if args.weights == "auto" else args.weights
        check_layout(self.config, spec.stage, args.num_redundant, assumed, expert_mesh_spec, args.moe_dense_tp_size)
        self.stages: OwnStages | None = None
        expert_mesh: Mesh | None = None
        if spec.pp_size > 1:
            self.held.clear()  # a stage reads its parameters as parts of the whole model's
            self.stages = OwnStages.of(args, self.config, group)
            meshes = self.stages.meshes
        elif expert_mesh_spec is None or args.afd_role == "attention":
            meshes = [self.mesh or spec.build()]
        else:
            mesh, expert_mesh = build_both(spec, expert_mesh_spec)
            meshes = [mesh]
        if group is not None and not self.is_later and self.stages is None:
            check_shares(spec, {device.process_index for device in meshes[0].devices.flat}, group)
        self.library.keep_in(enable_compile_cache())
        self.on_cpu = meshes[0].devices.flat[0].platform == "cpu"
        if self.on_cpu:
            keep_freed_memory()
        stages = self.stages.stages if self.stages else [None]
        self.layouts = [
            EngineLayout.of(args, self.checkpoint, mesh, stage) for stage, mesh in zip(stages, meshes, strict=True)
        ]
        self.steps = [layout.step for layout in self.layouts]
        self.step = self.steps[-1]  # with stages, the last one of this process
        self.weights_format = weights_format(args, self.config, self.step.dtype, self.checkpoint.bf16_experts)
        self.expert_side: Side | None = None if expert_mesh is None else ExpertSide(self.step.apart, expert_mesh)

    def load(self, lock: PageFolder | None, opened: contextlib.ExitStack) -> LoadedEngine:
        """Read the weights and create the executor. lock: the folder of `--disk-cache`. opened: resources to close on failure."""
        args, group, directory = self.args, self.group, self.directory
        if self.step.apart is not None and self.expert_side is None:
            name, known = self.held.name, self.is_later
            self.expert_side = connect_experts(args, self.step, directory, group, name, opened, known=known)
        params, sources = self._read_all()
        limits = self._limits(params) if group is None else common_limits(group, lambda: self._limits(params))
        facts = [
            describe_engine(args, layout, limits, one, self.weights_format)
            for layout, one in zip(self.layouts, params, strict=True)
        ]
        space = page_space(args, self.step, directory) if lock or limits.transfers else None

        def make_disk(shapes: Shapes, windows: Collection[str]) -> DiskPages:
            return DiskPages(PageFiles(lock, space, shapes, windows), args.disk_cache_bytes)

        disk = None if lock is None else make_disk
        with explained_out_of_memory("its cache was made", SMALLER_CACHE):
            pages = DividedPages(len(self.steps), disk) if disk and self.stages else None
            executors = [
                self._executor(layout, one, limits, pages.join if pages else disk, opened)
                for layout, one in zip(self.layouts, params, strict=True)
            ]
            executor: Executor = self.stages.join(executors, pages, opened) if self.stages else executors[0]
        engine_facts = self.stages.describe(facts, self.steps) if self.stages else facts[0]
        opened.pop_all()  # the executor closes them
        opened.callback(lambda: executor.shutdown())  # late-bound: a wrapper may replace it below
        if group is not None and group.is_leader and len(group.present) > 1:
            executor = LeaderExecutor(executor, group)
            # Runs before shutdown, because callbacks run last-in-first-out, so that the others learn why.
            opened.callback(group.leave, "its engine could not be started")
        if args.record_steps is not None and (group is None or group.is_leader):
            device = self.step.mesh.devices.flat[0]
            first = describe_recording(args.executor_options, executor.limits, fingerprint(directory), device)
            executor = RecordingExecutor(executor, StepFile(args.record_steps, first))
        self.held.clear()
        tokenizer = None if self.is_later else read_tokenizer(args, directory)
        return LoadedEngine(
            executor,
            tokenizer,
            self.config,
            read_eos_token_ids(directory, tokenizer),
            engine_facts,
            space if limits.transfers else None,
            self.held,
            sources,
        )

    def _read_all(self) -> tuple[list[dict[str, Array]], WeightBytes]:
        """Read the parameters of every step, in all processes. Also return the origin of the weights of all processes."""
        group, read = self.group, self._read_here
        if group is not None:
            if self.on_cpu and self.stages is None:
                group.connect([device.id for device in self.step.mesh.devices.flat])
            names = self.step.implementations
            group.agreement.check_equal("kernels", names)
        self.held.counts = WeightBytes()
        params = read() if group is None else group.agreement.run("loading", read)
        sources = self.held.counts
        if group is not None:
            sources = WeightBytes.total(group.agreement.all_gather("weights", astuple(sources)))
        with explained_out_of_memory("its weights were loaded", SMALLER):
            return [materialise(step, one) for step, one in zip(self.steps, params, strict=True)], sources

    def _read_here(self) -> list[dict[str, Array]]:
        args, held, group = self.args, self.held, self.group
        if self.on_cpu:
            check_host_memory(args, *self.steps, held=held.nbytes)
        else:
            for step in self.steps:
                pool = Pool.of(step, 0)
                if pool is not None:
                    pool = replace(pool, used=pool.used - held.device_bytes(step.mesh.local_devices[0]))
                check_device_memory(args, step, pool)
        # With stages, `held` is empty and only counts the bytes.
        options: dict[str, Any] = {"progress": self.show_progress, "held": held}
        if group is not None:
            options["check"] = partial(group.check_epoch, group.epoch, "its weights were loaded")
        with explained_out_of_memory("its weights were loaded", SMALLER):
            return [
                self._reader(step)(self.checkpoint, step.with_shared_slots(step.placement), **options)
                for step in self.steps
            ]

    def _reader(self, step: ModelStep) -> Callable[..., dict[str, Array]]:
        """Return a function that reads a step's parameters (all, or the paths `only`) for a placement.

        The function also sets the parameters of an `ExpertSide`. It does not capture `self`: the executor keeps the function, to read
        experts that move, and would keep this loader and its open checkpoint.
        """
        config, side = self.config, self.expert_side
        load_format = partial(load, weights=self.weights_format, mtp=self.args.speculation is not None)

        def read(
            source: Checkpoint | Path, placement: LayerPlacements | None, only: Collection[str] | None = None, **options
        ) -> dict[str, Array]:
            whole, window = config, ParameterWindow()
            if step.stage is not None:
                whole, window = step.stage.in_whole(config), step.stage.window(config)
            if step.apart is not None or (step.stage is not None and only is None):
                only = step.table.infos
            if not step.config.is_moe:
                placement = None
            elif step.stage is not None:
                placement = placement_of_all(config, step, placement)
            read_onto = partial(load_format, whole, source, placement=placement, window=window, **options)
            if isinstance(side, ExpertSide):
                side.params = read_onto(side.mesh, side.rules, only=side.infos)
            return read_onto(step.mesh, step.rules, only=only)

        return read

    def _mover(self, step: ModelStep, per_exchange: int) -> PartMaker:
        """Return the maker of the part that moves disaggregated experts."""
        side, writer = self.expert_side, None
        if isinstance(side, ExpertSide):
            platform = side.mesh.devices.flat[0].platform
            reader = ExpertReader(self.config, self.checkpoint, self.weights_format, platform, mtp=step.has_mtp)
            writer = SlotWriter(side, step.config.layer_runs, step.placement.physical_to_logical, reader.read)
            writer.rehearse()
        return lambda device, _: ExpertPart(device, per_exchange, writer)

    def _limits(self, params: Sequence[Mapping[str, Array]]) -> ExecutorLimits:
        """Return limits with the pages that fit the devices with the least memory."""
        each = [
            layout.limits(self.args, self.library, params=one, used=None, experts=self.expert_side)
            for layout, one in zip(self.layouts, params, strict=True)
        ]
        least = min(each, key=lambda limits: limits.pages_per_rank)
        windows = min(limits.windows_per_rank for limits in each)
        return self.library.settled(str(self.spec), replace(least, windows_per_rank=windows))

    def _executor(
        self,
        layout: EngineLayout,
        params: dict[str, Array],
        limits: ExecutorLimits,
        disk: Callable[[Shapes, Collection[str]], Any] | None,
        opened: contextlib.ExitStack,
    ) -> MeshExecutor:
        """Create the executor of one mesh."""
        args, group, step, directory = self.args, self.group, layout.step, self.directory
        apart, read, per_exchange = step.apart is not None, self._reader(step), layout.per_exchange
        parts: list[PartMaker] = []
        if limits.transfers:  # before host memory: pages from other engines are looked up first
            parts.append(PageChunks)
        if limits.host_pages_per_rank or disk is not None:
            parts.append(partial(OffloadedPages, disk=disk))
        if args.page_source is not None:
            parts.append(import_page_source(args.page_source).device_part)
        if apart:
            if isinstance(self.expert_side, ExpertSide):
                parts.append(lambda device, _: ExpertSidePart(device, self.expert_side))
            else:
                parts.append(remote_part(args, directory))
            if args.eplb:
                parts.append(self._mover(step, per_exchange))
        elif per_exchange:

            def reload(paths: Sequence[str], placements: LayerPlacements) -> dict[str, Array]:
                return read(directory, step.with_shared_slots(placements), only=paths)

            parts.append(lambda device, _: ExpertExchange(device, per_exchange, reload))
        shared = group is not None and step.stage is None
        executor = (MeshExecutor if step.stage is None else StageExecutor)(
            step,
            params,
            limits,
            layout.buckets,
            num_drafts=layout.num_drafts,
            experts_per_exchange=per_exchange,
            parts=parts,
            meet=(lambda: group.agreement.all_gather("compiled")) if shared else None,
            library=None if apart else self.library,  # it stores only steps that are a single program
            experts=self.expert_side,
        )
        opened.callback(executor.shutdown)
        return executor


def common_limits(group: HostGroup, find: Callable[[], ExecutorLimits]) -> ExecutorLimits:
    """Return limits with the pages that fit the device, and the host, with the least memory in the group."""
    limits = group.agreement.run("memory", find)
    names = "pages_per_rank", "windows_per_rank", "host_pages_per_rank"
    rooms = group.agreement.all_gather("pages", [getattr(limits, name) for name in names])
    return replace(limits, **{name: min(each) for name, each in zip(names, zip(*rooms, strict=True), strict=True)})


def read_tokenizer(args: EngineArgs, directory: Path) -> Tokenizer | None:
    """Read the tokenizer given by the options, or the model's; None if neither exists.

    Raises:
        TokenizerError: its files cannot be read.
    """
    if args.tokenizer is None and not has_tokenizer(directory):
        return None
    return Tokenizer.from_directory(args.tokenizer or directory, args.tokenizer_mode, args.chat_template, directory)


def read_eos_token_ids(directory: str | Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids of end tokens: the tokenizer's, and those of `generation_config.json`, or else of `config.json`.

    Raises:
        TokenizerError: one of the files is unreadable, or its `eos_token_id` is neither an integer nor a list of them.
    """
    token_ids: set[int] = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    paths = (Path(directory) / name for name in ("generation_config.json", "config.json"))
    token_ids |= next((ids for path in paths if (ids := _eos_field(path))), set())
    return tuple(sorted(token_ids))


def _eos_field(path: Path) -> set[int]:
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TokenizerError(f"{path} has eos_token_id {value!r}, expected an integer of at least 0 or a list of them")
    return set(ids)
