"""The options of `dsjax plan` and its subcommands, each once, checked when made; and the question that they ask."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsjax.config import ModelConfig, load_config
from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.options import Checked, flag_of, option
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import read_dry_run
from dsjax.plan.engine import Engine, find_engine
from dsjax.plan.explain import EXPLAINED
from dsjax.plan.measured import Measured, check_device, read_measured, read_network
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.operator_tables import operator_tables
from dsjax.plan.own_cluster import choose_precision, find_cluster
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.question import Question
from dsjax.plan.skew import read_skew
from dsjax.plan.workload import Lengths, Objective, Pins, PlanOptions, RequestClass, Workload, read_acceptance
from sharding.mesh import MeshSpec

_MODES = {"both": ("aggregated", "separated"), "aggregated": ("aggregated",), "separated": ("separated",)}
_SGLANG = {"engine": ("sglang",)}
_APART = {"afd": ("auto", "on")}
_CONTEXT = "Cached tokens of every request (step), of the longest (fit). Default: as --input and --output make them."


@dataclass(frozen=True, kw_only=True)
class LayoutArgs(Checked):
    """What every subcommand is told: model, cluster, engine, lengths, and how weights and caches are kept.

    An option's `needs` are the options, with their values, without which it would be ignored; `excludes` those that it cannot go with.
    """

    model: str = option("deepseek-v3", "Bundled name, or a directory with config.json.")
    cluster: str | None = option(None, "Bundled name, or a TOML file; default: the device of --measured, else h100-32.")
    hosts: int | None = option(None, "Another number of hosts than the cluster's.", min=1)
    input_tokens: str | None = option(
        None, "Prompt tokens: mean, or mean:variation.", flag="--input", alias="--isl", show_default="2000"
    )
    output_tokens: str | None = option(
        None, "Output tokens: mean, or mean:variation.", flag="--output", alias="--osl", show_default="500"
    )
    engine: str = option(
        "dsjax",
        "dsjax; published: kernels of SGLang and TensorRT-LLM; vllm, sglang, tensorrt-llm: in that engine's layouts and commands.",
    )
    dispatch: str | None = option(None, "deepep, or dsjax's auto, gather, padded, ragged, hierarchical.")
    moe_a2a_backend: str = option(
        "deepep",
        "SGLang's; none: all ranks' tokens are gathered for the experts.",
        choices=("deepep", "none"),
        needs=_SGLANG,
    )
    precision: str = option(
        "auto",
        f"{', '.join(PRECISIONS)} (-bf16: attention in bf16); auto: fp8, the model's four bits with a bf16 cache, or --measured's.",
    )
    kv_cache_dtype: str = option("auto", "Latent cache: auto, bf16 or fp8.")
    mtp: int = option(0, "Tokens drafted by the MTP module a step.")
    redundant_experts: int | None = option(None, "Physical minus logical; default: tried.")
    enable_shared_experts_fusion: bool = option(False, "The shared expert is one more routed one.", switch=True)
    prefill_tokens: int = option(16384, "Most prompt tokens of a DP rank in a step.", alias="--max-num-batched-tokens")
    json_file: str | None = option(None, "Write JSON to this file instead; - for standard output.", flag="--json")

    def __post_init__(self):
        super().__post_init__()
        fields = {field.name: field for field in dataclasses.fields(self)}
        given = [field for name, field in fields.items() if getattr(self, name) != field.default]
        for field in given:
            for name, values in field.metadata.get("needs", {}).items():
                value = getattr(self, name)
                if value not in values if values else not value:
                    needed = f"{flag_of(fields[name])} {' or '.join(values)}".rstrip()
                    raise UserError(f"{flag_of(field)} needs {needed}; give that too, or leave {flag_of(field)} out")
            for other in (other for other in given if other.name in field.metadata.get("excludes", ())):
                raise UserError(f"{flag_of(field)} and {flag_of(other)} exclude each other; leave one of them out")

    def question(self) -> Question:
        """The question that is asked. An option that a subcommand does not have is at its default.

        Raises:
            UserError: a file that cannot be read, or values that do not go together.
        """
        a = SimpleNamespace(**_DEFAULTS | vars(self))
        config = load_config(a.model)
        measured = read_measured(a.measured, config) if a.measured else None
        cluster, workload = _cluster(a, find_cluster(a.cluster, measured)), _workload(a)
        objective = Objective(a.ttft_ms and a.ttft_ms / 1e3, a.tpot_ms and a.tpot_ms / 1e3, a.throughput)
        if a.slo:
            from dsjax.plan.percentiles import guide

            objective = guide(objective, parse_slos(a.slo, workload), workload)
        return Question(config, cluster, workload, objective, PlanOptions(**_options(a, config, measured)))


@dataclass(frozen=True, kw_only=True)
class FitArgs(LayoutArgs):
    """The options of `dsjax plan fit`."""

    mesh: str | None = option(None, "The layout: tp=8, dp=32, or dp=4,tp=8.")
    context: int | None = option(None, _CONTEXT, min=1)
    memory_fraction: float | None = option(None, "The engine's --gpu-memory-utilization, or as it calls that.")

    def __post_init__(self):
        super().__post_init__()
        if not self.mesh:
            raise UserError("plan fit is about one layout; give it, such as --mesh tp=8")


@dataclass(frozen=True, kw_only=True)
class TimedArgs(LayoutArgs):
    """What the subcommands that say how long steps take are told besides: which layouts, and what their times are made of."""

    classes: list[str] | None = option(
        None,
        "NAME=SHARE,INPUT,OUTPUT: one of a mixture of lengths; repeatable.",
        flag="--class",
        excludes=("input_tokens", "output_tokens", "random_range_ratio"),
    )
    prefix_hit: float = option(0.0, "Share of prompt tokens found in the cache.")
    mesh: str | None = option(None, "Plan with instances of this mesh only: dp=32, or dp=4,tp=8, or pp=2,tp=8.")
    stages: list[int] | None = option(
        None, "Also look at so many pipeline stages; repeatable.", alias="--pipeline-parallel-size", excludes=("mesh",)
    )
    max_devices: int | None = option(None, "Use no more devices than this.")
    max_devices_per_instance: int | None = option(None, "No instance is wider than this: what one failure takes down.")
    measured: Path | None = option(None, "JSON of dsjax bench modules: its times in place of published tables.")
    network: Path | None = option(None, "JSON of dsjax bench network: its times of collectives.")
    compiled: list[Path] | None = option(None, "JSON of dsjax dryrun: its figures of its layout; repeatable.")
    operators: Path | None = option(None, "Folder of your own tables of operations, in the form of configs/operators.")
    expert_skew: str = option(
        "default",
        "default, uniform, zipf:S, or a JSON file of tokens per expert; EARLIER.json,LATER.json: seen by a balancer, then served.",
    )
    mtp_acceptance: str = option(
        "0.85", "Share of first drafts accepted, or of each position: 0.74,0.48,0.26.", needs={"mtp": ()}
    )
    fp8_gemm_backend: str = option(
        "deep_gemm",
        "SGLang's kernels of FP8 products on Blackwell.",
        choices=("deep_gemm", "flashinfer_trtllm"),
        needs=_SGLANG,
    )
    host_scheduling: str = option("overlapped", "overlapped with the device's work, or serial.")
    two_batch_overlap: str = option(
        "auto", "auto: where it is faster; on; off. Of dsjax on is where it is faster, and auto is off."
    )
    afd: str = option(
        "off", "auto: also look at attention and experts on devices of their own (AFD); on: at nothing else; off."
    )
    attention_mesh: str | None = option(None, "With --expert-mesh, in place of --mesh: devices for attention, dp=8.")
    expert_mesh: str | None = option(None, "With --attention-mesh: and these for the routed experts, ep=24.")
    num_afd_stages: int = option(
        2, "Most micro-batches that the sides take in turn.", min=2, needs={"engine": ("dsjax",)} | _APART
    )
    expert_device: str | None = option(None, "Experts are on hosts of this device beside the cluster's.", needs=_APART)
    expert_hosts: int | None = option(None, "Hosts of it; default: the cluster's.", min=1, needs={"expert_device": ()})
    rows: int = option(5, "Rows of the table.", min=1)

    def __post_init__(self):
        if self.attention_mesh is not None:
            object.__setattr__(self, "afd", "on")
        super().__post_init__()
        if self.mesh == "":
            raise UserError("--mesh is '', expected axes such as dp=32 or pp=2,tp=8; leave it out for a search")
        if (self.attention_mesh is None) != (self.expert_mesh is None):
            raise UserError(
                "--attention-mesh and --expert-mesh name the two sides of one instance; give both, or --afd alone"
            )
        if self.expert_mesh is not None and not re.fullmatch(r"ep=[1-9]\d*", self.expert_mesh):
            raise UserError(
                f"--expert-mesh is {self.expert_mesh!r}, expected ep= and the number of devices, such as ep=24"
            )


@dataclass(frozen=True, kw_only=True)
class StepArgs(TimedArgs):
    """The options of `dsjax plan step`."""

    mode: str = option(
        "static", "Both phases, prompts alone, or decodes alone.", choices=("static", "static_ctx", "static_gen")
    )
    batch: int | None = option(None, "Requests of a DP rank; default: all that fit.", min=1)
    context: int | None = option(None, _CONTEXT, min=1, needs={"mode": ("static_gen",)})


@dataclass(frozen=True, kw_only=True)
class ServiceArgs(TimedArgs):
    """What the subcommands that search for a deployment are told besides: its load, its objectives and its instances."""

    mode: str = option("both", "Whether instances do both phases or one each.", choices=tuple(_MODES))
    max_concurrency: float | None = option(None, "Requests in flight; default: as many as pays.")
    request_rate: float | None = option(None, "Requests a second; inf: none, and simulate starts all users at once.")
    ttft_ms: float | None = option(None, "Objective: mean time to first token.", alias="--ttft")
    tpot_ms: float | None = option(None, "Objective: mean time per output token.", alias="--itl")
    throughput: float | None = option(None, "Objective: output tokens a second, all together.")
    slo: list[str] | None = option(
        None,
        "Percentile to keep, ms: ttft-p95=370, tpot-p99=60, e2e-p50=9000, short:ttft-p90=370 of a class; repeatable. Deployments are "
        "played (--num-prompts, --seed).",
        excludes=("afd",),
    )
    prefill_mesh: str | None = option(None, "Separated: mesh of a prefill instance.")
    decode_mesh: str | None = option(None, "Separated: mesh of a decode instance.")
    prefill_instances: int | None = option(None, "Separated: how many of them.")
    decode_instances: int | None = option(None, "Separated: how many of them.")
    price_per_hour: float | None = option(
        None, "Price of a device: adds the cost of a million tokens.", above=0, most=1e9
    )
    num_prompts: int = option(1000, "Requests that are played and measured.", min=1)
    burstiness: float = option(
        1.0, "Arrivals: 1 is Poisson, less is burstier.", above=0, most=1e9, excludes=("max_concurrency",)
    )
    seed: int = option(0, "Of the lengths and arrivals that are played.", min=0)

    def __post_init__(self):
        super().__post_init__()
        if self.burstiness != 1 and self.request_rate == math.inf:
            raise UserError("--burstiness is of arrivals at a rate; with --request-rate inf requests follow each other")


@dataclass(frozen=True, kw_only=True)
class PlanArgs(ServiceArgs):
    """The options of `dsjax plan`."""

    explain: str | None = option(
        None, "plan: every figure; or one figure's derivation.", choices=EXPLAINED, excludes=("json_file",)
    )
    sweep: list[str] | None = option(
        None,
        "latency, bandwidth, loss-of-hosts, hosts, concurrency; points: latency=1,10; hosts=8:400 (users); repeatable.",
    )
    plots: Path | None = option(None, "Folder for the sweeps' pictures.", needs={"sweep": ()})
    pareto: Path | None = option(None, "Write the Pareto front: .html, or a picture.")
    working_set: float | None = option(
        None, "Tokens of prompts that come back: what share caches have.", above=0, most=1e18, excludes=("afd",)
    )
    host_cache_gb: float = option(0.0, "A host's memory for pages.", least=0, most=1e9, needs={"working_set": ()})
    disk_cache_gb: float = option(0.0, "A host's disk for pages.", least=0, most=1e9, needs={"working_set": ()})

    def __post_init__(self):
        super().__post_init__()
        meshes = (_mesh(text) for text in (self.mesh, self.prefill_mesh, self.decode_mesh) if text)
        staged = any(count > 1 for count in self.stages or ()) or any(mesh.pp_size > 1 for mesh in meshes)
        if (self.host_cache_gb or self.disk_cache_gb) and self.engine == "dsjax" and staged:
            raise UserError(
                "--host-cache-gb and --disk-cache-gb: dsjax keeps no pages beside those on its devices where a mesh has stages"
            )


@dataclass(frozen=True, kw_only=True)
class SimulateArgs(ServiceArgs):
    """The options of `dsjax plan simulate`."""

    warmup: int | None = option(
        None, "Requests left out at the start; default: a stay's, with --request-rate inf none.", min=0
    )
    random_range_ratio: float | None = option(
        None, "Lengths × (1 - ratio) to × (1 + ratio), as vllm bench serve.", least=0
    )
    scheduler_recv_interval: int = option(
        1, "Decode steps between looks for prompts.", min=1, needs={"engine": ("sglang", "published")}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.afd != "off":
            raise UserError("plan simulate knows layouts of one mesh, and --afd looks at two; leave it out")
        if self.random_range_ratio is not None and self.random_range_ratio >= 1:
            raise UserError(f"--random-range-ratio is {self.random_range_ratio:g}, expected at least 0 and less than 1")


_DEFAULTS = {
    field.name: field.default for kind in (PlanArgs, SimulateArgs, FitArgs) for field in dataclasses.fields(kind)
}


def _cluster(a: SimpleNamespace, found: Cluster) -> Cluster:
    if a.price_per_hour is not None:
        if found.prefill is not None or a.expert_device is not None:
            two = f"{found.name} has two" if a.expert_device is None else "--expert-device is another"
            raise UserError(
                f"--price-per-hour is of one kind of device, and {two}; give price_per_hour in the file of each of them"
            )
        chip = dataclasses.replace(found.hardware, price_per_hour=a.price_per_hour)
        found = dataclasses.replace(found, hardware=chip)
    if a.fp8_gemm_backend == "flashinfer_trtllm" and not found.hardware.is_blackwell:
        raise UserError(
            f"--fp8-gemm-backend is flashinfer_trtllm, which needs Blackwell, but {found.name} has {found.hardware.key}; leave it out"
        )
    if a.network is not None:
        network = read_network(a.network)
        check_device(network, found.hardware, found.name)
        found = dataclasses.replace(found, measured=network)
    found = found.resized(a.hosts) if a.hosts else found
    if a.expert_device is None:
        return found
    return found.with_experts_on(load_hardware(a.expert_device), a.expert_hosts or found.hosts)


def _workload(a: SimpleNamespace) -> Workload:
    rate = None if a.request_rate == math.inf else a.request_rate
    load = {"concurrency": a.max_concurrency, "rate": rate, "prefix_hit": a.prefix_hit}
    load["decoding_at"] = a.context and float(a.context)
    if a.classes:
        return Workload.of_classes([RequestClass.parse(text) for text in a.classes], **load)
    lengths = [Lengths.parse(a.input_tokens or "2000", "--input"), Lengths.parse(a.output_tokens or "500", "--output")]
    if a.random_range_ratio is not None:
        lengths = [length.around(a.random_range_ratio) for length in lengths]
    return Workload(*lengths, **load)


def _options(a: SimpleNamespace, config: ModelConfig, measured: Measured | None) -> dict[str, Any]:
    engine: Engine = dataclasses.replace(find_engine(a.engine).serving(config), poll_steps=a.scheduler_recv_interval)
    if a.fp8_gemm_backend == "flashinfer_trtllm":
        engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
    if a.moe_a2a_backend == "none":
        # Then SGLang refuses --enable-two-batch-overlap (check_server_args of srt/server_args.py).
        engine = dataclasses.replace(engine, gathers=True, overlaps=False)
    experts = a.expert_mesh and a.expert_mesh.replace("ep=", "dp=")
    meshes = [_mesh(text) for text in (a.prefill_mesh, a.decode_mesh, a.attention_mesh, experts)]
    return {
        "engine": engine,
        "precision": engine.precision(choose_precision(a.precision, a.kv_cache_dtype, config, measured)),
        "drafts": a.mtp,
        "acceptance": read_acceptance(a.mtp_acceptance),
        "redundant": a.redundant_experts,
        "skew": read_skew(a.expert_skew),
        "overlap": a.two_batch_overlap,
        "modes": _MODES.get(a.mode, _MODES["both"]),
        "prefill_tokens": a.prefill_tokens,
        "max_devices": a.max_devices,
        "dispatch": a.dispatch or engine.dispatch,
        "compiled": tuple(read_dry_run(path) for path in a.compiled or ()),
        "mesh": _mesh(a.mesh),
        "measured": measured,
        "operators": operator_tables(a.operators),
        "host": a.host_scheduling,
        "pins": Pins(*meshes[:2], a.prefill_instances, a.decode_instances, *meshes[2:]),
        "widest": a.max_devices_per_instance,
        "fused": a.enable_shared_experts_fusion,
        "afd": a.afd,
        "afd_stages": a.num_afd_stages,
        "stages": (1, *(a.stages or ())),
    }


def parse_slos(texts: list[str] | None, workload: Workload) -> list[Any]:
    """The percentiles (`percentiles.Slo`) that must hold."""
    if not texts:
        return []
    from dsjax.plan.percentiles import Slo  # brings the engine's scheduler in, a third of a second

    return [Slo.parse(text, workload) for text in texts]


def _mesh(text: str | None) -> MeshSpec | None:
    return MeshSpec.parse(text) if text else None
