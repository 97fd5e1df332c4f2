"""`dry_run`: compile the step that serves, and report its memory, collectives, costs and times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from dsjax.config import ModelConfig, load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import TEXT, EvenExperts, drafting_trip_counts, trip_counts
from dsjax.dryrun.compilation import CompiledProgram, CompiledStep, compile_step
from dsjax.dryrun.memory import DeviceMemory, fit, parameters_by_component
from dsjax.dryrun.orders import OrderReport, order_report, variant
from dsjax.dryrun.prices import default_cluster, even_ragged_share
from dsjax.dryrun.program import Program, program_collectives, program_costs, true_dtypes
from dsjax.dryrun.program.reductions import Reduction, program_reductions
from dsjax.dryrun.program.walk import TripCount
from dsjax.dryrun.rebalance import read_rebalance
from dsjax.dryrun.report import DryRunReport, ProgramReport, StagesReport
from dsjax.dryrun.timeline import Timeline
from dsjax.dryrun.topology import target_devices
from dsjax.engine.device.slots import LaunchShape
from dsjax.engine.setup.assembly import dispatch_method
from dsjax.engine.setup.fitting import check_layout
from dsjax.errors import UserError
from dsjax.hardware import Hardware, load_hardware
from dsjax.model.parameter_counts import expert_parameters
from dsjax.model.rows import GroupShape
from dsjax.model.stage import Stage, stages_of
from dsjax.model.step import ModelStep
from dsjax.plan.cluster import Cluster, load_cluster
from sharding import MeshSpec
from sharding.scheduler_flags import start_exchanges_early

CPU_HOST_DEVICES = 8
"""Emulated devices of a host on the CPU target, without `--devices-per-host`."""


def dry_run(
    args: DryRunArgs,
    *,
    search: bool = False,
    cluster: str | None = None,
    timeline: bool = False,
    reductions: bool = False,
    against: Sequence[str] = (),
) -> DryRunReport | StagesReport:
    """Compile the step described by ``args`` for its target, and read the program. Allocates no arrays of the model's size.

    A mesh with several stages is compiled stage by stage.

    search: also find the largest batch, context and cache that fit, which takes a dozen further compilations.
    cluster: a name in `configs/clusters` or the path of such a file, with the target's devices; None: hosts as the hardware's file
    describes them. timeline: also predict the step's time from its schedule. reductions: also list the sums whose order of additions
    matters. against: variants of the step (see ``variant``) to compile, and whose sums to compare.

    Raises:
        UserError, MeshError: options, model, mesh and target do not go together.
    """
    if search and args.target == "cpu":
        raise UserError(
            "--fit needs an accelerator's memory and its compiler's temporaries; give a --target such as h200"
        )
    if timeline and args.target == "cpu":
        raise UserError(
            "--timeline needs an accelerator's schedule and figures: the CPU program computes bf16 as float32, exchanges "
            "synchronously, and no hardware file describes the machine; give a --target such as h200"
        )
    config = load_config(args.engine.model)
    spec = MeshSpec.parse(args.engine.mesh)
    hardware = None if args.target == "cpu" else load_hardware(args.target)
    machines = target_cluster(hardware, cluster, spec.num_devices)
    if args.engine.devices_per_host is None:
        near = machines.domain if machines else CPU_HOST_DEVICES
        args = replace(args, engine=replace(args.engine, devices_per_host=near))
    if against and not reductions:
        raise UserError("--against compares the order of sums; give --reductions as well")
    args = within_positions(args, config)
    variants = {text: within_positions(variant(args, text), config, f"--against {text}: ") for text in against}
    # Check the layouts before devices are described or emulated.
    weights = "bf16" if args.engine.weights == "auto" else args.engine.weights
    for one in (args, *variants.values()):
        layout = MeshSpec.parse(one.engine.mesh).stage
        check_layout(config, layout, args.engine.num_redundant, weights, dense_tp=args.engine.moe_dense_tp_size)
    if args.engine.enable_dbo and hardware is not None:
        start_exchanges_early()
    mesh = spec.stage.build(target_devices(hardware, spec.stage_devices))
    if spec.pp_size > 1:
        for flag, is_given in (("--fit", search), ("--reductions", reductions)):
            if is_given:
                raise UserError(
                    f"{flag} looks at one program, and --mesh {spec} has {spec.pp_size}, one for each stage; leave it out, or give a mesh "
                    f"without pp"
                )
        parts = stages_of(
            config, spec.pp_size, given=args.engine.pp_layer_partition, mtp=args.engine.speculation is not None
        )
        stages = [_read_mesh(args, config, mesh, hardware, machines, timeline, stage=stage) for stage in parts]
        return StagesReport(str(spec), spec.num_devices, tuple(stages))
    report = _read_mesh(args, config, mesh, hardware, machines, timeline, variants if reductions else None)
    if not search or hardware is None:
        return report
    exchange = report.compiled.exchange
    return replace(report, fit=fit(args, config, mesh, hardware.visible_bytes, exchange))


def _read_mesh(
    args: DryRunArgs,
    config: ModelConfig,
    mesh: Mesh,
    hardware: Hardware | None,
    machines: Cluster | None,
    timeline: bool,
    variants: Mapping[str, DryRunArgs] | None = None,
    stage: Stage | None = None,
) -> DryRunReport:
    """Compile the step, or one of its stages, on one mesh, and read the program.

    variants: steps whose sums are compared with this step's; None: do not list sums.
    """
    compiled = compile_step(args, config, mesh, stage=stage)
    shape, step = compiled.shape, compiled.step
    reader = _ProgramReader(args, step, machines, timeline)
    trips = reader.trip_counts(shape.groups)
    started = time.perf_counter()
    main = reader.read(compiled.main, trips, shape.tokens, step.config.num_moe_layers)
    drafts = None
    if compiled.drafts:
        rows = sum(group.rows for group in shape.groups)
        last = replace(shape.groups[0], rows=rows, chunk=1)
        trips = drafting_trip_counts({shape.tokens: trips, rows: reader.trip_counts((last,))})
        tokens = shape.tokens + (compiled.num_drafts - 1) * rows
        drafts = reader.read(compiled.drafts, trips, tokens, 1)
    reading = time.perf_counter() - started
    return DryRunReport(
        request=_request(args, compiled),
        hardware=hardware,
        **vars(main),
        drafts=drafts,
        parameters=parameters_by_component(step),
        memory=DeviceMemory.of(compiled),
        cache_tokens=(compiled.limits.pages_per_rank - 1) * step.page_size,
        rebalance=read_rebalance(compiled, args.engine.eplb, machines) if compiled.exchange else None,
        orders=None if variants is None else _orders(compiled, variants, config, hardware),
        fit=None,
        assumptions=dict(TEXT),
        notes=tuple(_notes(hardware, compiled)),
        seconds={
            "lower": sum(program.lower_seconds for program in compiled.programs),
            "compile": sum(program.compile_seconds for program in compiled.programs),
            "read": reading,
        },
        compiled=compiled,
    )


def within_positions(args: DryRunArgs, config: ModelConfig, whose: str = "") -> DryRunArgs:
    """Return the arguments with the context limited to the model's positions. whose: prefix of error messages.

    Raises:
        UserError: a longer context or model length was given.
    """
    for flag, value in (("--context", args.context), ("--max-model-len", args.engine.max_model_len)):
        if value and value > config.max_position_embeddings:
            raise UserError(
                f"{whose}{flag} is {value}, but the model has {config.max_position_embeddings} positions; lower it"
            )
    # The default context can exceed the model's positions.
    return replace(args, context=min(args.row_tokens, config.max_position_embeddings))


@dataclass(frozen=True)
class _ProgramReader:
    """Reads the programs of a step."""

    args: DryRunArgs
    step: ModelStep
    machines: Cluster | None
    timeline: bool

    def trip_counts(self, groups: Sequence[GroupShape]) -> TripCount:
        """Return assumed trip counts of loops of unknown length, for a pass over these row groups."""
        step = self.step
        tokens = -(-sum(group.tokens for group in groups) // step.num_micro_batches(groups))
        experts = even_experts(step, tokens) if step.config.is_moe else None
        return step_trip_counts(step, groups, self.args.row_tokens, experts)

    def read(self, compiled: CompiledProgram, trips: TripCount, tokens: int, moe_layers: int) -> ProgramReport:
        """Read a program. tokens: of a DP rank, processed by ``moe_layers`` MoE layers."""
        config, spec = self.step.config, self.step.spec
        ragged = even_ragged_share(spec.ep_size, config.num_experts_per_tok) if config.is_moe else 1.0
        flops = expert_flops(config, tokens / spec.tp_size, moe_layers)
        near = self.machines.domain if self.machines else self.args.engine.devices_per_host
        machines = self.machines if self.timeline else None
        return read_program(
            compiled, self.step.mesh, trips, flops, near, timeline_cluster=machines, ragged_share=ragged
        )


def step_trip_counts(
    step: ModelStep, groups: Sequence[GroupShape], context: int, experts: EvenExperts | None
) -> TripCount:
    """Return assumed trip counts of loops of unknown length, for a program of a step over these row groups."""
    return trip_counts(step.attention.turns(groups, context, step.page_size), experts)


def read_program(
    compiled: CompiledProgram,
    mesh: Mesh,
    trips: TripCount,
    expert_flops: float,
    host_devices: int,
    *,
    timeline_cluster: Cluster | None = None,
    ragged_share: float = 1.0,
) -> ProgramReport:
    """Read a program that runs on a mesh.

    host_devices: number of neighbouring devices joined by fast links. timeline_cluster: cluster for a timeline; None: no timeline.
    """
    program = Program.parse(compiled.text())
    dtypes = true_dtypes(Program.parse(compiled.partitioned)) if compiled.partitioned else None
    collectives = program_collectives(
        program, dict(mesh.shape), host_devices=host_devices, dtypes=dtypes, trip_count=trips
    )
    return ProgramReport(
        collectives=collectives,
        costs=program_costs(program, trip_count=trips),
        expert_flops=expert_flops,
        timeline=Timeline.of(program, collectives, timeline_cluster, trips, ragged_share) if timeline_cluster else None,
    )


def _orders(
    compiled: CompiledStep, variants: Mapping[str, DryRunArgs], config: ModelConfig, hardware: Hardware | None
) -> OrderReport:
    others = {}
    for label, args in variants.items():
        spec = MeshSpec.parse(args.engine.mesh)
        mesh = spec.build(target_devices(hardware, spec.num_devices))
        others[label] = _sums(compile_step(args, config, mesh, compiled.exchange))
    return order_report(_sums(compiled), others)


def _sums(compiled: CompiledStep) -> dict[str, tuple[Reduction, ...]]:
    mesh = compiled.step.mesh
    programs = {"step": compiled.main} | ({"drafts": compiled.drafts} if compiled.drafts else {})
    platform = mesh.devices.flat[0].platform
    return {
        name: program_reductions(Program.parse(program.text()), dict(mesh.shape), platform)
        for name, program in programs.items()
    }


def expert_flops(config: ModelConfig, tokens: float, moe_layers: int) -> float:
    """Return the FLOPs of a device's routed experts under even routing, for its ``tokens`` in ``moe_layers`` layers.

    A device receives as many (token, expert) pairs as it sends, or an equal amount of work in parts of experts.
    """
    return 2 * tokens * config.num_experts_per_tok * expert_parameters(config) * moe_layers


def even_experts(step: ModelStep, tokens: int) -> EvenExperts:
    """Return the load of one device's experts under even routing, for a DP rank's ``tokens``."""
    spec = step.spec
    return EvenExperts(
        platform=step.mesh.devices.flat[0].platform,
        mean_load=step.experts.mean_load(tokens * spec.dp_size),
        count=step.placement.n_physical // spec.ep_size,
        kernels=step.kernels.name("experts") == "pallas",
    )


def target_cluster(hardware: Hardware | None, name: str | None, devices: int) -> Cluster | None:
    """Return the named cluster, or hosts as the hardware's file describes them; None on the CPU target.

    Raises:
        UserError: the cluster has other devices, or too few.
    """
    if name is None:
        return default_cluster(hardware, devices) if hardware else None
    named = load_cluster(name)
    if hardware is None or named.hardware.key != hardware.key:
        raise UserError(
            f"--cluster {name} is of {named.hardware.key}, --target is {hardware.key if hardware else 'cpu'}; "
            f"give --target {named.hardware.key}"
        )
    if named.num_devices < devices:
        raise UserError(
            f"--cluster {name} has {named.num_devices} devices, the mesh {devices}; expected at most as many"
        )
    return named


def shape_fields(args: DryRunArgs, shape: LaunchShape) -> dict[str, object]:
    """Return the fields of a report's request about the compiled step."""
    first = shape.groups[0]
    groups = [{"rows": g.rows, "chunk": g.chunk, "mla": g.form.name} for g in shape.groups]
    rows = {"groups": groups, "batch": first.rows, "chunk": first.chunk}
    return {"step": args.step, **rows, "context": args.row_tokens}


def format_fields(args: DryRunArgs, step: ModelStep) -> dict[str, object]:
    """Return the fields of a report's request about number formats."""
    weights = str(step.dtype) if args.engine.weights == "auto" else args.engine.weights
    formats = {"dtype": str(step.dtype), "weights": weights, "activation_scheme": str(step.scheme)}
    return formats | {"kv_cache_dtype": str(step.cache_dtype)}


def _request(args: DryRunArgs, compiled: CompiledStep) -> dict[str, object]:
    step = compiled.step
    shape = compiled.shape.groups[0]
    stage = step.stage
    part = {} if stage is None else {"stage": stage.number, "layers": [stage.first, stage.first + stage.layers - 1]}
    if stage is not None and not stage.is_last:
        part["hidden_bytes"] = compiled.shape.tokens * step.config.hidden_size * step.dtype.itemsize
    return {
        **part,
        "model": args.engine.model,
        "mesh": str(step.spec),
        "mesh_shape": dict(step.mesh.shape),
        "devices": step.spec.num_devices,
        "target": args.target,
        "platform": step.mesh.devices.flat[0].platform,
        **shape_fields(args, compiled.shape),
        "tokens_per_device": compiled.shape.tokens / step.spec.tp_size,
        **format_fields(args, step),
        "mla": shape.form.name,
        "kernels": step.implementations,
        "dispatch": dispatch_method(step, compiled.shape.tokens, halved=step.runs_in_halves(compiled.shape.groups)),
        "dispatch_wire": step.dispatch.wire,
        "physical_experts": step.placement.n_physical if step.config.is_moe else 0,
        "page_size": step.page_size,
        "num_drafts": compiled.num_drafts,
        "halves": step.runs_in_halves(compiled.shape.groups),
    }


def _notes(hardware: Hardware | None, compiled: CompiledStep):
    if hardware is None:
        yield "temporaries, bytes moved and synchrony are the CPU backend's, not an accelerator's"
        yield f"hosts are taken to be {compiled.step.dispatch.devices_per_host} neighbouring devices"
        if compiled.main.partitioned is None and compiled.step.spec.num_devices > 1:
            yield "XLA wrote no partitioned program: bf16 collectives count as float32, in which the CPU backend sends them"
    elif hardware.platform == "cuda":
        yield "hosts are scale-up domains: devices that NVLink joins"
    if compiled.step.kernels.note:
        yield compiled.step.kernels.note
    memory = DeviceMemory.of(compiled)
    unread = memory.persistent - memory.staging - memory.arguments
    if unread > 0:
        among = " (among them the MTP module's, which drafting reads)" if compiled.step.has_mtp else ""
        yield f"this step does not read {unread:,} bytes of the weights{among}, so that they are no arguments of its program"
    elif unread < 0:
        yield f"the compiler pads the arguments by {-unread:,} bytes"
