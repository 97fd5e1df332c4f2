"""Options of `dsjax plan` and its subcommands, each defined once and checked on construction; and the `Question` that they make."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from dsjax.config import ModelConfig, load_config
from dsjax.errors import UserError
from dsjax.options import Checked, flag_of, option
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import read_dry_run
from dsjax.plan.engine import find_engine
from dsjax.plan.explain import EXPLAINED
from dsjax.plan.measured import Measured, read_measured, read_network
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.operator_tables import operator_tables
from dsjax.plan.own_cluster import choose_precision, find_cluster
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.question import Question
from dsjax.plan.rules import refuse
from dsjax.plan.skew import read_skew
from dsjax.plan.workload import Lengths, Objective, Pins, PlanOptions, RequestClass, Workload, read_acceptance
from sharding.mesh import MeshSpec

_MODES = {"both": ("aggregated", "separated"), "aggregated": ("aggregated",), "separated": ("separated",)}
_CONTEXT = "Context length of every request (step) or of the longest (fit). Default: from --input and --output."


@dataclass(frozen=True, kw_only=True)
class LayoutArgs(Checked):
    """Options of every subcommand: model, cluster, engine, lengths, and formats of weights and caches.

    `needs` of an option: other options that must be given, with their allowed values (none: any). `excludes`: options that conflict.
    """

    model: str = option("deepseek-v3", "Bundled model name, or directory with config.json.")
    cluster: str | None = option(None, "Bundled name, or TOML file. Default: the device of --measured, else h100-32.")
    hosts: int | None = option(None, "Number of hosts, in place of the cluster's.", min=1)
    input_tokens: str | None = option(
        None,
        "Input sequence length in tokens: mean, or mean:variation.",
        flag="--input",
        alias="--isl",
        show_default="2000",
    )
    output_tokens: str | None = option(
        None,
        "Output sequence length in tokens: mean, or mean:variation.",
        flag="--output",
        alias="--osl",
        show_default="500",
    )
    engine: str = option(
        "dsjax",
        "dsjax; vllm, sglang or tensorrt-llm, with its layouts and commands; published: SGLang's and TensorRT-LLM's kernels.",
    )
    dispatch: str | None = option(None, "deepep, or a method of dsjax: auto, gather, padded, ragged, hierarchical.")
    precision: str = option(
        "auto",
        f"Weights: {', '.join(PRECISIONS)} (-bf16: attention in bf16). auto: fp8, the model's 4-bit format, or that of --measured.",
    )
    kv_cache_dtype: str = option("auto", "KV cache data type: auto, bf16 or fp8.")
    mtp: int = option(0, "Number of tokens that the MTP module drafts per step.")
    redundant_experts: int | None = option(None, "Number of redundant experts. Default: try several.")
    enable_shared_experts_fusion: bool = option(False, "Compute the shared expert as a routed expert.", switch=True)
    prefill_tokens: int = option(
        16384, "Maximum prompt tokens of a DP rank per step.", alias="--max-num-batched-tokens"
    )
    json_file: str | None = option(None, "Write JSON to this file instead; - for standard output.", flag="--json")

    def __post_init__(self):
        super().__post_init__()
        fields = {field.name: field for field in dataclasses.fields(self)}
        given_fields = [field for name, field in fields.items() if getattr(self, name) != field.default]
        for field in given_fields:
            for name, allowed in field.metadata.get("needs", {}).items():
                value = getattr(self, name)
                if not (value in allowed if allowed else value):
                    needed = f"{flag_of(fields[name])} {' or '.join(allowed)}".rstrip()
                    raise UserError(f"{flag_of(field)} needs {needed}; give that too, or leave {flag_of(field)} out")
            for other in given_fields:
                if other.name in field.metadata.get("excludes", ()):
                    raise UserError(f"{flag_of(field)} and {flag_of(other)} exclude each other; leave one of them out")

    def question(self) -> Question:
        """Return the question. Options that a subcommand does not have take their defaults.

        Raises:
            UserError: a file cannot be read, or values are incompatible.
        """
        args = SimpleNamespace(**_DEFAULTS | vars(self))
        config = load_config(args.model)
        measured = read_measured(args.measured, config) if args.measured else None
        cluster = _cluster(args, find_cluster(args.cluster, measured))
        workload = _workload(args)
        ttft, tpot = (ms and ms / 1e3 for ms in (args.ttft_ms, args.tpot_ms))
        objective = Objective(ttft, tpot, args.throughput)
        return Question(config, cluster, workload, objective, _options(args, config, measured))


@dataclass(frozen=True, kw_only=True)
class FitArgs(LayoutArgs):
    """The options of `dsjax plan fit`."""

    mesh: str | None = option(None, "Mesh of the layout, such as tp=8, dp=32 or dp=4,tp=8.")
    context: int | None = option(None, _CONTEXT, min=1)
    memory_fraction: float | None = option(None, "Memory fraction, such as vLLM's --gpu-memory-utilization.")

    def __post_init__(self):
        super().__post_init__()
        if not self.mesh:
            raise UserError("plan fit is about one layout; give it, such as --mesh tp=8")


@dataclass(frozen=True, kw_only=True)
class TimedArgs(LayoutArgs):
    """Further options of the subcommands that estimate step times: the layouts, and the sources of their times."""

    classes: list[str] | None = option(
        None,
        "Request class of a mixture: NAME=SHARE,INPUT,OUTPUT. Repeatable.",
        flag="--class",
        excludes=("input_tokens", "output_tokens", "random_range_ratio"),
    )
    prefix_hit: float = option(0.0, "Prefix cache hit rate: share of prompt tokens that are cached.")
    mesh: str | None = option(None, "Consider only instances with this mesh, such as dp=32, dp=4,tp=8 or pp=2,tp=8.")
    stages: list[int] | None = option(
        None,
        "Also consider this number of pipeline stages. Repeatable.",
        alias="--pipeline-parallel-size",
        excludes=("mesh",),
    )
    max_devices: int | None = option(None, "Maximum number of devices to use.")
    max_devices_per_instance: int | None = option(None, "Maximum devices per instance: what one failure takes down.")
    measured: Path | None = option(None, "JSON file of dsjax bench modules, whose times replace published tables.")
    network: Path | None = option(None, "JSON file of dsjax bench network with times of collectives.")
    compiled: list[Path] | None = option(None, "JSON file of dsjax dryrun, for memory and step time. Repeatable.")
    operators: Path | None = option(None, "Folder of your own operator tables, in the format of configs/operators.")
    expert_skew: str = option(
        "default",
        "Expert load: default, uniform, zipf:S, or a JSON file of tokens per expert. A.json,B.json: balanced for A, serving B.",
    )
    mtp_acceptance: str = option(
        "0.85", "Acceptance rate of the first draft, or by position: 0.74,0.48.", needs={"mtp": ()}
    )
    fp8_gemm_backend: str = option(
        "deep_gemm",
        "SGLang's FP8 GEMM kernels on Blackwell.",
        choices=("deep_gemm", "flashinfer_trtllm"),
        needs={"engine": ("sglang",)},
    )
    two_batch_overlap: str = option("auto", "auto, on or off. auto: where faster, dsjax: off. on: dsjax: where faster.")
    attention_mesh: str | None = option(
        None, "AFD: devices for attention, such as dp=8.", needs={"expert_mesh": ()}, excludes=("mesh",)
    )
    expert_mesh: str | None = option(
        None, "AFD: devices for routed experts, such as ep=24.", needs={"attention_mesh": ()}
    )
    num_afd_stages: int = option(2, "AFD: maximum number of micro-batches.", min=2, needs={"attention_mesh": ()})
    rows: int = option(5, "Number of rows to print.", min=1)

    def __post_init__(self):
        super().__post_init__()
        if self.mesh == "":
            raise UserError("--mesh is '', expected axes such as dp=32 or pp=2,tp=8; leave it out for a search")
        if self.expert_mesh is not None and not re.fullmatch(r"ep=[1-9]\d*", self.expert_mesh):
            raise UserError(
                f"--expert-mesh is {self.expert_mesh!r}, expected ep= and the number of devices, such as ep=24"
            )


@dataclass(frozen=True, kw_only=True)
class StepArgs(TimedArgs):
    """The options of `dsjax plan step`."""

    mode: str = option(
        "static",
        "static: prefill and decode; static_ctx: prefill only; static_gen: decode only.",
        choices=("static", "static_ctx", "static_gen"),
    )
    batch: int | None = option(None, "Number of requests per DP rank. Default: as many as fit.", min=1)
    context: int | None = option(None, _CONTEXT, min=1, needs={"mode": ("static_gen",)})


@dataclass(frozen=True, kw_only=True)
class ServiceArgs(TimedArgs):
    """Further options of the subcommands that search for a deployment: its load, objectives and instances."""

    mode: str = option("both", "Aggregated instances, instances separated by phase, or both.", choices=tuple(_MODES))
    max_concurrency: float | None = option(None, "Number of concurrent requests. Default: as many as pay off.")
    request_rate: float | None = option(None, "Requests per second. inf: no rate; simulate starts all users at once.")
    ttft_ms: float | None = option(None, "Objective: maximum mean time to first token, in ms.", alias="--ttft")
    tpot_ms: float | None = option(None, "Objective: maximum mean time per output token, in ms.", alias="--itl")
    throughput: float | None = option(None, "Objective: minimum output tokens per second in total.")
    prefill_mesh: str | None = option(None, "Separated mode: mesh of a prefill instance.")
    decode_mesh: str | None = option(None, "Separated mode: mesh of a decode instance.")
    prefill_instances: int | None = option(None, "Separated mode: number of prefill instances.")
    decode_instances: int | None = option(None, "Separated mode: number of decode instances.")
    price_per_hour: float | None = option(
        None, "Price of a device, to print the cost of a million tokens.", above=0, most=1e9
    )


@dataclass(frozen=True, kw_only=True)
class PlanArgs(ServiceArgs):
    """The options of `dsjax plan`."""

    explain: str | None = option(
        None, "Print all figures (plan), or how one is derived.", choices=EXPLAINED, excludes=("json_file",)
    )
    sweep: list[str] | None = option(
        None,
        "Vary latency, bandwidth, loss-of-hosts, hosts or concurrency: latency=1,10 or hosts=8:400 (users). Repeatable.",
    )
    pareto: Path | None = option(None, "Plot the Pareto front to this file, such as front.svg or front.png.")


@dataclass(frozen=True, kw_only=True)
class SimulateArgs(ServiceArgs):
    """The options of `dsjax plan simulate`."""

    num_prompts: int = option(1000, "Number of requests to simulate and measure.", min=1)
    burstiness: float = option(
        1.0, "Burstiness of arrivals. 1: Poisson; less: burstier.", above=0, most=1e9, excludes=("max_concurrency",)
    )
    seed: int = option(0, "Random seed for lengths and arrivals.", min=0)
    warmup: int | None = option(
        None,
        "Number of first requests to exclude. Default: those of one request's duration; --request-rate inf: 0.",
        min=0,
    )
    random_range_ratio: float | None = option(None, "Lengths: mean × (1 - ratio) to mean × (1 + ratio).", least=0)

    def __post_init__(self):
        super().__post_init__()
        refuse("simulate", o=self)


_DEFAULTS = {
    field.name: field.default for kind in (PlanArgs, SimulateArgs, FitArgs) for field in dataclasses.fields(kind)
}


def _cluster(args: SimpleNamespace, cluster: Cluster) -> Cluster:
    refuse("cluster", o=args, cluster=cluster)
    if args.price_per_hour is not None:
        chip = dataclasses.replace(cluster.hardware, price_per_hour=args.price_per_hour)
        cluster = dataclasses.replace(cluster, hardware=chip)
    if args.network is not None:
        network = read_network(args.network)
        refuse("network", device=network.device, hardware=cluster.hardware, cluster=cluster.name)
        cluster = dataclasses.replace(cluster, measured=network)
    return cluster.resized(args.hosts) if args.hosts else cluster


def _workload(args: SimpleNamespace) -> Workload:
    rate = None if args.request_rate == math.inf else args.request_rate
    context = args.context and float(args.context)
    load = {"concurrency": args.max_concurrency, "rate": rate, "prefix_hit": args.prefix_hit, "decoding_at": context}
    if args.classes:
        return Workload.of_classes([RequestClass.parse(text) for text in args.classes], **load)
    input_text, output_text = args.input_tokens or "2000", args.output_tokens or "500"
    lengths = [Lengths.parse(input_text, "--input"), Lengths.parse(output_text, "--output")]
    if args.random_range_ratio is not None:
        lengths = [length.around(args.random_range_ratio) for length in lengths]
    return Workload(*lengths, **load)


def _options(args: SimpleNamespace, config: ModelConfig, measured: Measured | None) -> PlanOptions:
    engine = find_engine(args.engine).serving(config)
    if args.fp8_gemm_backend == "flashinfer_trtllm":
        engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
    prefill, decode, attention = map(_mesh, (args.prefill_mesh, args.decode_mesh, args.attention_mesh))
    experts = _mesh(args.expert_mesh and args.expert_mesh.replace("ep=", "dp="))
    return PlanOptions(
        engine=engine,
        precision=engine.precision(choose_precision(args.precision, args.kv_cache_dtype, config, measured)),
        drafts=args.mtp,
        acceptance=read_acceptance(args.mtp_acceptance),
        redundant=args.redundant_experts,
        skew=read_skew(args.expert_skew),
        overlap=args.two_batch_overlap,
        modes=_MODES.get(args.mode, _MODES["both"]),  # --mode of plan step has other values
        prefill_tokens=args.prefill_tokens,
        max_devices=args.max_devices,
        dispatch=args.dispatch or engine.dispatch,
        compiled=tuple(read_dry_run(path) for path in args.compiled or ()),
        mesh=_mesh(args.mesh),
        measured=measured,
        operators=operator_tables(args.operators),
        pins=Pins(prefill, decode, args.prefill_instances, args.decode_instances, attention, experts),
        widest=args.max_devices_per_instance,
        fused=args.enable_shared_experts_fusion,
        afd_stages=args.num_afd_stages,
        stages=(1, *(args.stages or ())),
    )


def _mesh(text: str | None) -> MeshSpec | None:
    return MeshSpec.parse(text) if text else None
