"""`dry_run_apart`: dry run of a step under attention–FFN disaggregation (AFD, `--expert-mesh`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from dsjax.config import load_config
from dsjax.dryrun.apart_compilation import ApartStep, compile_apart
from dsjax.dryrun.apart_memory import attention_memory, expert_memory
from dsjax.dryrun.apart_report import ApartReport, Links
from dsjax.dryrun.apart_timeline import ApartTimeline, Pass
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import TEXT, EvenExperts
from dsjax.dryrun.compilation import CompiledProgram
from dsjax.dryrun.memory import parameters_by_component
from dsjax.dryrun.report import ProgramReport
from dsjax.dryrun.run import (
    CPU_HOST_DEVICES,
    expert_flops,
    format_fields,
    read_program,
    shape_fields,
    step_trip_counts,
    target_cluster,
    within_positions,
)
from dsjax.dryrun.side_program import SideProgram
from dsjax.dryrun.topology import target_devices
from dsjax.engine.afd.options import expert_spec
from dsjax.engine.setup.fitting import check_layout
from dsjax.errors import UserError
from dsjax.hardware import Hardware, load_hardware
from dsjax.model.apart import LayerPass
from dsjax.plan.cluster import Cluster
from dsjax.plan.moves import in_one_process, processes_of
from sharding import MeshSpec


def dry_run_apart(
    args: DryRunArgs, *, expert_target: str | None = None, cluster: str | None = None, timeline: bool = False
) -> ApartReport:
    """Compile and analyse the attention and expert programs of the step that ``args`` describes. Allocates no arrays of the model's size.

    expert_target: target of the experts' programs; None: ``args.target``. cluster: as in ``dry_run``, for the target's devices on
    either side. timeline: also simulate both sides' timeline and predict the step time.

    Raises:
        UserError, MeshError: incompatible options, model, meshes or targets.
    """
    expert_target = expert_target or args.target
    if (args.target == "cpu") != (expert_target == "cpu"):
        raise UserError(
            f"--target is {args.target} and --expert-target {expert_target}: the CPU stands in for devices of both sides or of neither; "
            "give two accelerators, or leave --expert-target out"
        )
    if timeline and args.target == "cpu":
        raise UserError("--timeline needs an accelerator's schedule and figures; give a --target such as h200")
    config = load_config(args.engine.model)
    args = within_positions(args, config)
    spec = MeshSpec.parse(args.engine.mesh)
    experts = expert_spec(args.engine)
    weights = "bf16" if args.engine.weights == "auto" else args.engine.weights
    check_layout(config, spec, args.engine.num_redundant, weights, experts, args.engine.moe_dense_tp_size)
    sides = _Sides.of(args.target, expert_target, spec, experts, cluster)
    meshes = sides.meshes()
    target = args.target if expert_target == args.target else f"{args.target} and {expert_target}"
    compiled = compile_apart(args, config, *meshes, target=target, one_process=sides.one_process)
    started = time.perf_counter()
    reader = _Reader(args, compiled, sides, timeline)
    programs, passes = reader.read()
    simulated = None
    if timeline:
        outside_layers = [program.report.timeline.step * program.times for program in programs if not program.in_turn]
        simulated = ApartTimeline.of(outside_layers, passes, sides.attention, sides.experts)
    return ApartReport(
        request=_request(args, compiled, sides, expert_target),
        hardware=(sides.hardware, sides.expert_hardware),
        parameters=_parameters(compiled),
        attention=attention_memory(compiled),
        experts=expert_memory(compiled),
        cache_tokens=(compiled.limits.pages_per_rank - 1) * compiled.step.page_size,
        programs=tuple(programs),
        links=Links.of(compiled, sides.connections),
        timeline=simulated,
        assumptions=dict(TEXT),
        notes=tuple(_notes(sides)),
        seconds={
            "lower and compile": sum(
                program.compile_seconds + program.lower_seconds for program in compiled.experts.programs.values()
            ),
            "read": time.perf_counter() - started,
        },
    )


@dataclass(frozen=True)
class _Sides:
    """Devices of both sides."""

    spec: MeshSpec
    expert_spec: MeshSpec
    hardware: Hardware | None
    expert_hardware: Hardware | None
    attention: Cluster | None  # the attention side's hosts and network; None on the CPU target
    experts: Cluster | None  # the expert side's; None on the CPU target

    @classmethod
    def of(cls, target: str, expert_target: str, spec: MeshSpec, experts: MeshSpec, cluster: str | None) -> _Sides:
        if target == "cpu":
            own_cluster = target_cluster(hardware=None, name=cluster, devices=0)  # None; raises on a named cluster
            return cls(spec, experts, None, None, own_cluster, None)
        hardware, expert_hardware = load_hardware(target), load_hardware(expert_target)
        is_one_kind = target == expert_target
        devices = spec.num_devices + (experts.num_devices if is_one_kind else 0)
        return cls(
            spec,
            experts,
            hardware,
            expert_hardware,
            target_cluster(hardware, cluster, devices),
            target_cluster(expert_hardware, cluster if is_one_kind else None, experts.num_devices),
        )

    @property
    def one_process(self) -> bool:
        """Whether one process has both sides: emulated devices, or devices of one kind on one host."""
        devices = self.spec.num_devices + self.expert_spec.num_devices
        return self.attention is None or in_one_process(self.attention, self.experts, devices)

    @property
    def processes(self) -> int:
        """Number of expert processes: one per host, with equal numbers of devices."""
        devices = self.expert_spec.num_devices
        return 1 if self.one_process else processes_of(self.experts, devices)

    @property
    def attention_processes(self) -> int:
        """Number of attention processes, likewise."""
        return 1 if self.one_process else processes_of(self.attention, self.spec.num_devices)

    @property
    def connections(self) -> int:
        """Number of connections between the sides' processes: one per pair."""
        return 0 if self.one_process else self.attention_processes * self.processes

    def meshes(self) -> tuple[Mesh, Mesh]:
        """Return the meshes of attention and experts, emulated or described. With several processes, experts have one process's devices."""
        first, second = self.spec.num_devices, self.expert_spec.num_devices
        if self.one_process:
            devices = list(target_devices(self.hardware, first + second))
            return self.spec.arrange(devices[:first]), self.expert_spec.arrange(devices[first : first + second])
        per_process = second // self.processes
        attention_devices = list(target_devices(self.hardware, first))[:first]
        expert_devices = list(target_devices(self.expert_hardware, per_process))[:per_process]
        return self.spec.arrange(attention_devices), MeshSpec(dp_size=per_process).arrange(expert_devices)


@dataclass(frozen=True)
class _Reader:
    """Analyses the compiled programs of both sides."""

    args: DryRunArgs
    compiled: ApartStep
    sides: _Sides
    timeline: bool

    def read(self) -> tuple[list[SideProgram], list[Pass]]:
        """Return all programs of a step, and for each pass through MoE layers the programs of its micro-batches."""
        compiled = self.compiled
        outer_programs = [
            SideProgram(
                f"{name}: {place}", "attention", 1, in_turn=False, program=program, report=self._attention(program)
            )
            for name, place, program in _named_outer_programs(compiled)
        ]
        layer_programs: dict[int, SideProgram] = {}
        passes = []
        for layer_passes, compiled_pass in compiled.experts.passes:
            kinds = compiled_pass.kinds
            of_kind = [[] for _ in range(kinds)]  # kind of layer → (programs by name, exchange) of each micro-batch
            for place, (layer_pass, programs) in enumerate(zip(layer_passes, compiled_pass.programs, strict=True)):
                half = place // kinds  # index of the micro-batch, one of `halves`
                halves = len(layer_passes) // kinds
                by_name = {
                    name: self._of_layer(layer_programs, getattr(programs, name), name, layer_pass, half, halves)
                    for name in ("attend", "share", "receive")
                }
                by_name["compute"] = self._of_layer(
                    layer_programs, programs.way.program, "compute", layer_pass, half, halves
                )
                for name in ("pack", "keep", "receive") if programs.further else ():  # only for rows beyond capacity
                    run = getattr(programs.further, name)
                    self._of_layer(layer_programs, run, f"further rounds, {name}", layer_pass, half, halves, 0)
                of_kind[layer_pass.kind].append((by_name, programs.way.between))
            passes += [Pass(layer_passes[0].num_layers, tuple(micro_batches)) for micro_batches in of_kind]
        return [*outer_programs, *layer_programs.values()], passes

    def _of_layer(
        self,
        analysed: dict[int, SideProgram],
        run: jax.stages.Compiled,
        name: str,
        layer_pass: LayerPass,
        half: int,
        halves: int,
        runs: int = 1,
    ) -> SideProgram:
        """Count a layer program's executions and return its entry. Equal passes share a program, which is analysed once. half: index of the
        micro-batch, one of ``halves``. runs: executions per layer."""
        program = self.compiled.experts.programs[id(run)]
        if id(program) not in analysed:
            title = f"{layer_pass.stack}: {name}" + (f", micro-batch {half + 1}" if halves > 1 else "")
            side = "experts" if name == "compute" else "attention"
            report = self._experts(program, layer_pass) if side == "experts" else self._attention(program)
            analysed[id(program)] = SideProgram(title, side, times=0, in_turn=True, program=program, report=report)
        analysed[id(program)].times += runs * layer_pass.num_layers
        return analysed[id(program)]

    def _attention(self, program: CompiledProgram) -> ProgramReport:
        return self._analyse(program, self.compiled.step.mesh, self.sides.attention, experts=None, flops=0.0)

    def _experts(self, program: CompiledProgram, layer_pass: LayerPass) -> ProgramReport:
        step, side = self.compiled.step, self.compiled.experts
        config = step.config
        devices = side.spec.num_devices
        tokens = layer_pass.shape[0] * layer_pass.shape[1]
        top_k = config.num_experts_per_tok
        physical = step.placement.n_physical
        even = EvenExperts(
            platform=side.mesh.devices.flat[0].platform,
            mean_load=tokens * top_k / physical,
            count=physical // devices,
            kernels=step.kernels.name("experts") == "pallas",
        )
        return self._analyse(program, side.mesh, self.sides.experts, even, expert_flops(config, tokens / devices, 1))

    def _analyse(
        self, program: CompiledProgram, mesh: Mesh, cluster: Cluster | None, experts: EvenExperts | None, flops: float
    ) -> ProgramReport:
        trips = step_trip_counts(self.compiled.step, self.compiled.shape.groups, self.args.row_tokens, experts)
        timeline_cluster = cluster if self.timeline else None
        near = cluster.domain if cluster else CPU_HOST_DEVICES
        return read_program(program, mesh, trips, flops, near, timeline_cluster=timeline_cluster)


def _named_outer_programs(compiled: ApartStep) -> Iterator[tuple[str, str, CompiledProgram]]:
    """Yield (name, position, program) for each program outside the MoE layers."""
    for name in dict.fromkeys(name for name, _ in compiled.outer_programs):
        first, *others = [program for part, program in compiled.outer_programs if part == name]
        yield name, "before the layers", first
        for number, program in enumerate(others, 1):
            yield name, "behind them" if number == len(others) else "between passes", program


def _parameters(compiled: ApartStep) -> dict[str, int]:
    step = compiled.step
    expert_parameters = sum(info.count for info in compiled.experts.infos.values())  # of one expert process
    expert_parameters = expert_parameters * compiled.experts.spec.num_devices // compiled.experts.mesh.size
    physical, logical = step.placement.n_physical, step.config.n_routed_experts  # with, without redundant copies
    return parameters_by_component(step) | {"routed experts": expert_parameters // physical * logical}


def _request(args: DryRunArgs, compiled: ApartStep, sides: _Sides, expert_target: str) -> dict[str, object]:
    step = compiled.step
    between = compiled.experts.passes[0][1].programs[0].way.between
    return {
        "model": args.engine.model,
        "attention_mesh": str(step.spec),
        "expert_mesh": f"ep={sides.expert_spec.ep_size}",
        "devices": sides.spec.num_devices + sides.expert_spec.num_devices,
        "target": args.target,
        "expert_target": expert_target,
        "platform": step.mesh.devices.flat[0].platform,
        "processes": 1 if sides.one_process else sides.attention_processes + sides.processes,
        **shape_fields(args, compiled.shape),
        "micro_batches": max(
            len(layer_passes) // compiled_pass.kinds for layer_passes, compiled_pass in compiled.experts.passes
        ),
        **format_fields(args, step),
        "kernels": step.implementations,
        "dispatch": "apart",
        "dispatch_wire": step.dispatch.wire,
        "answers_of_a_row": between.columns,
        "capacity": between.capacity,
        "physical_experts": step.placement.n_physical,
        "page_size": step.page_size,
        "num_drafts": compiled.num_drafts,
    }


def _notes(sides: _Sides) -> Iterator[str]:
    if sides.attention is None:
        yield "temporaries and bytes moved are the CPU backend's, not an accelerator's"
        return
    if sides.one_process:
        yield "both sides are one process of one host; rows travel by device_put"
        return
    number = sides.attention_processes
    yield (
        f"attention is {'one process' if number == 1 else f'{number} processes'}, and experts are {sides.processes}; rows and answers go "
        f"through the hosts' memory, over a connection {'' if number == 1 else 'from each '}to each, call after call"
    )
    if number > 1:
        yield "the processes with attention wait for each other at each layer, by a word over connections between them"
