"""From ``EngineArgs`` to a loaded model on its mesh: every check first, then the weights, then the executor."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.expert_link import LinkClosedError
from dsjax.engine.afd.expert_side import ExpertSide, Side, SidePart, build_both
from dsjax.engine.afd.expert_slots import SlotWriter
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.afd.remote_part import RemoteExpertsPart
from dsjax.engine.contract.executor import Executor, ExecutorLimits
from dsjax.engine.device.access import DeviceAccess
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.mesh_executor import MeshExecutor, PartMaker
from dsjax.engine.device.page_staging import PageStaging
from dsjax.engine.device.process import enable_compile_cache, explained_out_of_memory, keep_freed_memory
from dsjax.engine.experts.expert_exchange import ExpertExchange, Reload
from dsjax.engine.experts.expert_moves import ExpertMoves
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.schedule.page_source import import_page_source
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import experts_apart, remote_experts, weights_format
from dsjax.engine.setup.facts import EngineFacts, describe_engine
from dsjax.engine.setup.fitting import check_layout
from dsjax.engine.setup.sizes import EngineLayout, check_device_memory, check_host_memory
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.engine.stream.step_record import RecordingExecutor, StepFile, check_writable, describe_recording
from dsjax.engine.text.tokenizer import Tokenizer, TokenizerError
from dsjax.engine.tiers.disk_pages import DiskPages, PageDisk, Shapes
from dsjax.engine.tiers.offloaded_pages import OffloadedPages
from dsjax.engine.tiers.options import NO_SHARED_DISK
from dsjax.engine.tiers.page_files import PageFiles
from dsjax.engine.tiers.page_folder import PageFolder, lock_folder
from dsjax.engine.transfer.page_chunks import PageChunks
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from dsjax.hosts.options import address_of_this_host, means_loopback
from dsjax.model.derived import materialise
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.layer_placement import LayerPlacements

SMALLER = "use a mesh of more devices, --weights fp8, or a higher --gpu-memory-utilization"
"""What to do where weights do not fit."""
SMALLER_CACHE = "give a smaller --cache-tokens or --max-num-seqs"
"""What to do where the cache does not fit."""


@dataclass(frozen=True)
class LoadedEngine:
    """An executor and what stands around it. ``tokenizer`` is None where the model's directory has none; ``page_space``, with transfers,
    says what a page's values depend on beside its tokens. ``held`` takes the weights over when the
    executor is released. ``sources``: where the weights of all processes come from."""

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
    """Check everything, then load the model that ``args`` names onto its mesh.

    Where devices are to be emulated, ``sharding.emulation.emulate_devices`` must have been called before JAX started.

    group: the processes that share the mesh, which all call this; process 0's executor then leads the others.
    mesh: of the devices that ``args.mesh`` is to be made of; None: the first ones. is_later: no tokenizer is read, for there
        is one already.
    library: of programs that this process has compiled before.
    held: parameters of another mesh on this process's devices, as in ``load``; empty once the executor has its own. None: there are none.

    Raises:
        UserError, MeshError: anything that cannot be; before weights are read, unless they are what is wrong.
    """
    if args.transfer_host is not None and args.disaggregation_mode != "agg":
        alone = group is None or means_loopback(group.options.coordinator[0])
        address_of_this_host(
            "--transfer-host", args.transfer_host, on_loopback=alone and means_loopback(args.transfer_host)
        )
    descriptor_limit()  # a memory-mapped file of the checkpoint keeps one each
    if args.record_steps is not None:
        check_writable(args.record_steps)
    lock = lock_disk(args, group)
    # Whoever keeps the error, as a notebook does, must not keep the folder and connections too.
    with contextlib.ExitStack() as opened:
        if lock is not None:
            opened.callback(lock.close)
        loaded = _load_model(args, group, lock, opened, mesh, is_later, library, show_progress, held)
        opened.pop_all()
        return loaded


def _load_model(
    args: EngineArgs,
    group: HostGroup | None,
    lock: PageFolder | None,
    opened: contextlib.ExitStack,
    mesh: Mesh | None,
    is_later: bool,
    library: ProgramLibrary | None,
    show_progress: bool,
    held: HeldWeights | None,
) -> LoadedEngine:
    """Do what `load_model` says. lock: the folder of `--disk-cache`, which is this engine's. opened: what is closed where it fails."""
    spec = MeshSpec.parse(args.mesh)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    config, directory = checkpoint.config, checkpoint.directory
    # Before the mesh is built, for that starts JAX and emulates its devices.
    of_experts, weights = expert_spec(args), "bf16" if args.weights == "auto" else args.weights
    check_layout(config, spec, args.num_redundant, weights, of_experts, args.moe_dense_tp_size)
    if of_experts is None or args.afd_role == "attention":
        mesh, expert_mesh = mesh or spec.build(), None
    else:
        mesh, expert_mesh = build_both(spec, of_experts)
    if group is not None and not is_later:
        check_shares(spec, mesh, group)
    kept_in = enable_compile_cache()
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    library, held = library or ProgramLibrary(), HeldWeights() if held is None else held
    library.keep_in(kept_in)
    layout = EngineLayout.of(args, checkpoint, mesh)
    step, buckets = layout.step, layout.buckets
    weights = weights_format(args, config, step.dtype, checkpoint.bf16_experts)
    experts: Side | None = None
    if expert_mesh is not None:
        experts = ExpertSide(step.apart, expert_mesh)
    elif of_experts is not None:
        experts = remote_experts(args, mesh.devices.flat[0].platform, group and group.endpoint)
        opened.callback(experts.close)
        _connect_experts(args, step, experts, directory, held.name, group, is_later)

    def read(source: Checkpoint | Path, placement: LayerPlacements | None, **options: Any) -> dict[str, Array]:
        fixed = {"placement": placement, "weights": weights, "mtp": step.has_module}
        if step.apart is None:
            return load(config, source, mesh, step.rules, **fixed, **options)
        fixed |= options
        if isinstance(experts, ExpertSide):
            experts.params = load(config, source, experts.mesh, experts.rules, only=experts.infos, **fixed)
        return load(config, source, mesh, step.rules, only=step.table.infos, **fixed)

    def read_all() -> dict[str, Array]:
        if on_cpu:
            check_host_memory(args, step, held=held.nbytes)
        else:
            pool = Pool.of(step, 0)
            if pool is not None:
                pool = replace(pool, used=pool.used - held.device_bytes(mesh.local_devices[0]))
            check_device_memory(args, step, pool)
        options: dict[str, Any] = {"progress": show_progress, "held": held}
        if group is not None:
            options["check"] = partial(group.check_generation, group.generation, "its weights were loaded")
        with explained_out_of_memory("its weights were loaded", SMALLER):
            return read(checkpoint, step.stored_placement if config.is_moe else None, **options)

    if group is not None:
        if on_cpu:
            group.connect([device.id for device in mesh.devices.flat])
        group.agreement.alike("kernels", "kernels", step.kernels.names(step.prefill_form, step.decode_form))
    held.counts = WeightBytes()
    params = read_all() if group is None else group.agreement.run("loading", read_all)
    sources = held.counts
    if group is not None:
        sources = WeightBytes.total(group.agreement.ask("weights", astuple(sources)))
    with explained_out_of_memory("its weights were loaded", SMALLER):
        params = materialise(step, params)

    def find_limits() -> ExecutorLimits:
        return library.settled(str(spec), layout.limits(args, library, params, None, experts))

    limits = find_limits() if group is None else common_limits(group, find_limits)
    with explained_out_of_memory("its cache was made", SMALLER_CACHE):
        executor: Executor = MeshExecutor(
            step,
            params,
            limits,
            buckets,
            num_drafts=layout.num_drafts,
            experts_per_exchange=layout.per_exchange,
            parts=executor_parts(
                args,
                limits,
                0 if of_experts is not None else layout.per_exchange,
                lambda paths, placements: read(directory, step.stored(placements), only=paths),
                lock and partial(open_disk, args, page_space(args, step, directory), lock),
            )
            + ([_side_part(args, directory, group, mesh)] if of_experts is not None else [])
            + (
                [_mover(step, experts, checkpoint, weights, layout.per_exchange)]
                if of_experts is not None and args.eplb
                else []
            ),
            meet=None if group is None else lambda: group.agreement.ask("compiled"),
            library=library if of_experts is None else None,  # it keeps steps that are one program each
            experts=experts,
        )
    opened.pop_all()  # the executor closes them
    opened.callback(lambda: executor.shutdown())  # the one of now, which may lead others
    if group is not None and group.is_leader and len(group.present) > 1:
        executor = LeaderExecutor(executor, group)
        opened.callback(group.leave, "its engine could not be started")  # first, so that the others hear why
    if group is None or group.is_leader:
        executor = record_if_wanted(args, executor, mesh, directory)
    held.clear()
    has_tokenizer = (directory / "tokenizer.json").is_file() and not is_later
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    return LoadedEngine(
        executor,
        tokenizer,
        config,
        read_eos_token_ids(directory, tokenizer),
        describe_engine(args, step, limits, buckets, params, weights),
        page_space(args, step, directory) if limits.transfers else None,
        held,
        sources,
    )


def _connect_experts(
    args: EngineArgs,
    step: ModelStep,
    side: RemoteExperts,
    directory: Path,
    name: bytes,
    group: HostGroup | None,
    is_later: bool,
) -> None:
    """Connect to the processes with experts, and with the other processes of the attention side. directory: of the checkpoint.

    name: of this process's engine; all processes of the attention side have that of process 0. is_later: experts were there before.
    """
    side.space, side.name = expert_space(args, step, directory), name
    side.placement = step.placement.physical_to_logical
    if group is None:
        side.connect(known=is_later)
        return
    side.generation, side.name = group.generation, group.agreement.ask("attention side", name)[0]
    ids = [member.process_id for member in group.present]
    side.member = ids.index(group.options.process_id), len(ids)
    # Before anything is waited for: a process that is lost meanwhile ends the wait of all others.
    group.collectives.cut_with(group.generation, side.abandon)
    try:
        group.agreement.run("experts", lambda: side.connect(known=is_later))
    except LinkClosedError as error:
        group.check(error)
        raise
    if len(group.present) > 1:
        side.join(AttentionProcesses(group))


def _side_part(args: EngineArgs, directory: Path, group: HostGroup | None, mesh: Mesh) -> PartMaker:
    """Make the part that has experts on devices of their own. directory: of the checkpoint. mesh: of the attention side."""
    if args.afd_role != "attention":
        return lambda device, _: SidePart(device)

    def another(
        expert_mesh: str, afd_address: str, model: ModelStep, before: RemoteExperts
    ) -> tuple[ModelStep, RemoteExperts]:
        changed = replace(args, expert_mesh=expert_mesh, afd_address=afd_address)
        model = replace(model, apart=experts_apart(changed, model.apart.infos))
        side = remote_experts(changed, mesh.devices.flat[0].platform, before.endpoint)
        side.follows(before)
        side.space = expert_space(changed, model, directory)
        return model, side

    def make(device: DeviceAccess, _: PageStaging) -> RemoteExpertsPart:
        part = RemoteExpertsPart(device, another)
        if group is not None:
            group.collectives.cut_with(group.generation, part.abandon)
        return part

    return make


def _mover(step: ModelStep, side: Side, checkpoint: Checkpoint, weights: str, per_exchange: int) -> PartMaker:
    """Make the part that moves experts that have devices of their own. weights: how their parameters are kept."""
    writer = None
    if isinstance(side, ExpertSide):
        platform = side.mesh.devices.flat[0].platform
        reader = ExpertReader(checkpoint.config, checkpoint, weights, platform, mtp=step.has_module)
        writer = SlotWriter(side, step.placement.physical_to_logical, reader.read)
        writer.rehearse()
    return lambda device, _: ExpertMoves(device, per_exchange, writer)


def executor_parts(
    args: EngineArgs,
    limits: ExecutorLimits,
    per_exchange: int,
    reload: Reload,
    disk: Callable[[Shapes], PageDisk] | None,
) -> list[PartMaker]:
    """List the optional parts of an executor with these sizes. What has come from other engines is looked for before host memory."""
    parts: list[PartMaker] = []
    if limits.transfers:
        parts.append(PageChunks)
    if limits.host_pages_per_rank or disk is not None:
        parts.append(partial(OffloadedPages, disk=disk))
    if args.page_source is not None:
        parts.append(import_page_source(args.page_source).device_part)
    if per_exchange:
        parts.append(lambda device, _: ExpertExchange(device, per_exchange, reload))
    return parts


def lock_disk(args: EngineArgs, group: HostGroup | None) -> PageFolder | None:
    """Open and lock the folder for pages, before anything expensive is done; None where none is wanted.

    Raises:
        UserError: the folder cannot be used, or several processes would have to share it.
    """
    if args.disk_cache is None:
        return None
    if group is not None:
        raise UserError(NO_SHARED_DISK)
    return lock_folder(args.disk_cache)


def open_disk(args: EngineArgs, space: dict[str, Any], folder: PageFolder, shapes: Shapes) -> DiskPages:
    """Give the folder's pages of this model. shapes: of a page's arrays."""
    return DiskPages(PageFiles(folder, space, shapes), args.disk_cache_bytes)


def page_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    """Say what a page's values depend on, beside its tokens and shapes. directory: of the checkpoint."""
    return {
        "fingerprint": fingerprint(directory),
        "dtype": str(step.dtype),
        "kv_dtype": str(jnp.dtype(step.cache_dtype)),
        "weights": args.weights,
        "activation_scheme": str(step.scheme),
        "dispatch_wire": args.dispatch_wire,
        **step.attention.form_of_pages,
        "page_size": step.page_size,
        "module_layer": step.has_module,
        **(_arithmetic(step) if args.batch_invariant else {}),
    }


def _arithmetic(step: ModelStep) -> dict[str, Any]:
    """Say what the last bits of a page depend on, for an engine that promises them: what another one computed is not to be found."""
    return {"batch_invariant": step.kernels.names(step.prefill_form, step.decode_form), "form": step.decode_form}


def expert_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    """Say what the answers of routed experts in another process depend on, beside the rows. directory: of the checkpoint."""
    return {
        "fingerprint": fingerprint(directory),
        "dtype": str(step.dtype),
        "weights": args.weights,
        "activation_scheme": str(step.scheme),
        "dispatch_wire": args.dispatch_wire,
        "expert_mesh": args.expert_mesh,
        "physical experts": step.placement.n_physical,
        "processes with experts": len(afd_addresses(args)),
        "sums by choice": step.dispatch.by_choice or step.in_place.ordered,
        "MTP module": step.has_module,
        "encrypt_bulk": args.encrypt_bulk,
    }


def check_shares(spec: MeshSpec, mesh: Mesh, group: HostGroup) -> None:
    """Refuse a mesh in which a process of the group has no device: it would have nothing to follow with."""
    sharing = {device.process_index for device in mesh.devices.flat}
    idle = [member for member in group.members if member.process_id not in sharing]
    if idle:
        raise UserError(
            f"mesh {spec} takes {spec.num_devices} of the group's {jax.device_count()} devices, none of them of {idle[0].name}; "
            f"start {len(sharing)} processes, or use a larger mesh"
        )


def common_limits(group: HostGroup, find: Callable[[], ExecutorLimits]) -> ExecutorLimits:
    """Limits with as many pages as fit the device, and the host, with the least room."""
    limits = group.agreement.run("memory", find)
    rooms = group.agreement.ask("pages", [limits.pages_per_rank, limits.host_pages_per_rank])
    pages, host_pages = (min(each) for each in zip(*rooms, strict=True))
    return replace(limits, pages_per_rank=pages, host_pages_per_rank=host_pages)


def record_if_wanted(args: EngineArgs, executor: Executor, mesh: Mesh, directory: Path) -> Executor:
    """Have all that the executor is told written to the file that `args` name, if they name one."""
    if args.record_steps is None:
        return executor
    device = mesh.devices.flat[0]
    first = describe_recording(
        args.executor_options,
        executor.limits,
        fingerprint(directory),
        jax=jax.__version__,
        platform=device.platform,
        device_kind=device.device_kind,
    )
    return RecordingExecutor(executor, StepFile(args.record_steps, first, args.record_steps_bytes))


def read_eos_token_ids(directory: str | Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids of the tokens that end a completion, ascending.

    They are the tokenizer's own, and those of `generation_config.json`, or of `config.json` where that has none.

    Raises:
        TokenizerError: one of the files is unreadable, or its `eos_token_id` is neither an integer nor a list of them.
    """
    token_ids: set[int] = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        ids = _eos_field(Path(directory) / name)
        if ids:
            token_ids |= ids
            break
    return tuple(sorted(token_ids))


def _eos_field(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TokenizerError(f"{path} has eos_token_id {value!r}, expected an integer of at least 0 or a list of them")
    return set(ids)
