"""The options of `dsjax plan` and its subcommands, each once, checked when made; and the question that they ask."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.config import ModelConfig, load_config
from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.options import Checked, option
from dsjax.plan.cluster import Cluster
from dsjax.plan.compiled import read_dry_run
from dsjax.plan.drafting import read_acceptance
from dsjax.plan.engine import Engine, find_engine
from dsjax.plan.explain import EXPLAINED
from dsjax.plan.measured import Measured, read_measured
from dsjax.plan.measured_network import check_device, read_network
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.operator_tables import operator_tables
from dsjax.plan.own_cluster import choose_precision, find_cluster
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.question import Question
from dsjax.plan.skew import read_skew
from dsjax.plan.workload import Lengths, Objective, Pins, PlanOptions, RequestClass, Workload
from sharding.mesh import MeshSpec

_MODES = {"both": ("aggregated", "separated"), "aggregated": ("aggregated",), "separated": ("separated",)}


@dataclass(frozen=True, kw_only=True)
class LayoutArgs(Checked):
    """What every subcommand is told: model, cluster, engine, lengths, and how weights and caches are kept."""

    model: str = option("deepseek-v3", "Bundled name, or a directory with config.json.")
    cluster: str | None = option(
        None,
        "Bundled name (configs/clusters), a TOML file, or this-machine with --measured. "
        "Default: the device of --measured, else h100-32.",
    )
    hosts: int | None = option(None, "Another number of hosts than the cluster's.", min=1)
    input_tokens: str | None = option(
        None, "Prompt tokens: mean, or mean:variation.", flag="--input", alias="--isl", show_default="2000"
    )
    output_tokens: str | None = option(
        None, "Output tokens: mean, or mean:variation.", flag="--output", alias="--osl", show_default="500"
    )
    engine: str = option(
        "dsjax",
        "dsjax: what dsjax serve can do; published: kernels, overlaps and transfers of SGLang and TensorRT-LLM; vllm, sglang, "
        "tensorrt-llm: the same in layouts that this engine can run, with its own commands.",
    )
    dispatch: str | None = option(
        None,
        "deepep (as published), or dsjax's own: auto, gather, padded, ragged, hierarchical. Default: the engine's.",
    )
    moe_a2a_backend: str = option(
        "deepep",
        "--engine sglang: deepep; or none, SGLang's default: with attention DP all ranks' tokens are gathered for the experts, and results "
        "summed up over all ranks. Others are not priced.",
        choices=("deepep", "none"),
    )
    precision: str = option(
        "auto",
        f"{', '.join(PRECISIONS)} (-bf16: with attention in bf16); auto: fp8, or what --measured was taken with.",
    )
    kv_cache_dtype: str = option("auto", "Latent cache: auto, bf16 or fp8.")
    mtp: int = option(0, "Tokens drafted by the MTP module a step.")
    redundant_experts: int | None = option(None, "Physical minus logical; default: tried.")
    enable_shared_experts_fusion: bool = option(
        False, "The shared expert is one more routed one, with a copy on each device.", switch=True
    )
    prefill_tokens: int = option(16384, "Most prompt tokens of a DP rank in a step.", alias="--max-num-batched-tokens")
    json_file: str | None = option(None, "Write JSON to this file instead; - for standard output.", flag="--json")

    def __post_init__(self):
        super().__post_init__()
        if self.moe_a2a_backend != "deepep" and self.engine != "sglang":
            raise UserError(
                f"--moe-a2a-backend is {self.moe_a2a_backend} with --engine {self.engine}, but it is SGLang's; give --engine sglang, or "
                "leave it out"
            )

    def question(self) -> Question:
        """The question that is asked.

        Raises:
            UserError: a file that cannot be read, or values that do not go together.
        """
        config = load_config(self.model)
        measured = self._measured(config)
        cluster, workload = self._cluster(find_cluster(self.cluster, measured)), self._workload()
        options = PlanOptions(**self._options(find_engine(self.engine), measured))
        return Question(config, cluster, workload, self._objective(workload), options)

    def _measured(self, config: ModelConfig) -> Measured | None:
        return None

    def _cluster(self, found: Cluster) -> Cluster:
        return found.resized(self.hosts) if self.hosts else found

    def _workload(self, **load: Any) -> Workload:
        prompt, output = (
            Lengths.parse(self.input_tokens or "2000", "--input"),
            Lengths.parse(self.output_tokens or "500", "--output"),
        )
        return Workload(prompt, output, **load)

    def _objective(self, workload: Workload) -> Objective:
        return Objective()

    def _options(self, engine: Engine, measured: Measured | None) -> dict[str, Any]:
        if (
            self.moe_a2a_backend == "none"
        ):  # then SGLang refuses --enable-two-batch-overlap (check_server_args of srt/server_args.py)
            engine = dataclasses.replace(engine, gathers=True, overlaps=False)
        return {
            "engine": engine,
            "precision": engine.precision(choose_precision(self.precision, self.kv_cache_dtype, measured)),
            "drafts": self.mtp,
            "redundant": self.redundant_experts,
            "prefill_tokens": self.prefill_tokens,
            "dispatch": self.dispatch or engine.dispatch,
            "fused": self.enable_shared_experts_fusion,
        }


@dataclass(frozen=True, kw_only=True)
class FitArgs(LayoutArgs):
    """The options of `dsjax plan fit`."""

    mesh: str | None = option(None, "The layout: tp=8, dp=32, or dp=4,tp=8.")
    context: int | None = option(
        None,
        "static_gen: cached tokens of every request; fit: tokens of the longest. Default: as --input and --output make them.",
        min=1,
    )
    memory_fraction: float | None = option(
        None,
        "The engine's share of memory: --gpu-memory-utilization, --mem-fraction-static or free_gpu_memory_fraction. "
        "Default: the engine's.",
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.mesh:
            raise UserError("plan fit is about one layout; give it, such as --mesh tp=8")

    def _workload(self, **load: Any) -> Workload:
        return super()._workload(decoding_at=self.context and float(self.context), **load)


@dataclass(frozen=True, kw_only=True)
class TimedArgs(LayoutArgs):
    """What the subcommands that say how long steps take are told besides: which layouts, and what their times are made of."""

    classes: list[str] | None = option(
        None,
        "NAME=SHARE,INPUT,OUTPUT instead of --input and --output: a mixture of lengths; repeatable: "
        "short=0.8,512:0.2,256.",
        flag="--class",
    )
    prefix_hit: float = option(0.0, "Share of prompt tokens found in the cache.")
    mesh: str | None = option(None, "Plan with instances of this mesh only: dp=32, or dp=4,tp=8, or pp=2,tp=8.")
    stages: list[int] | None = option(
        None,
        "Look at layouts of so many pipeline stages beside those of one; repeatable. A --mesh with pp needs no more.",
        alias="--pipeline-parallel-size",
    )
    max_devices: int | None = option(None, "Use no more devices than this.")
    max_devices_per_instance: int | None = option(None, "No instance is wider than this: what one failure takes down.")
    measured: Path | None = option(None, "JSON of dsjax bench modules: its times in place of published tables.")
    network: Path | None = option(
        None, "JSON of dsjax bench network: its times of collectives in place of assumptions about links."
    )
    compiled: list[Path] | None = option(
        None, "JSON of dsjax dryrun: its figures in place of assumptions where it is of a layout; repeatable."
    )
    operators: Path | None = option(None, "Folder of your own tables of operations, in the form of configs/operators.")
    expert_skew: str = option(
        "default",
        "default, uniform, zipf:S, or a JSON file of tokens per expert, as dsjax serve records them; "
        "EARLIER.json,LATER.json: what a balancer has seen, and what it then served.",
    )
    mtp_acceptance: str = option(
        "0.85",
        "Chance that the first draft of a step is accepted, or of each position, as vLLM logs it: 0.74,0.48,0.26.",
    )
    fp8_gemm_backend: str = option(
        "deep_gemm",
        "--engine sglang on Blackwell: kernels of dense FP8 products. Others are not priced.",
        choices=("deep_gemm", "flashinfer_trtllm"),
    )
    host_scheduling: str = option(
        "overlapped", "overlapped with the device's work, or serial: the device waits for it."
    )
    two_batch_overlap: str = option(
        "auto",
        "auto: where it is faster; on; off. Of --engine dsjax `on` is where it is faster, and auto is off, as --enable-dbo is.",
    )
    afd: str = option(
        "off",
        "auto: also look at attention and experts on devices of their own (AFD); on: at nothing else; off. Of --engine dsjax what dsjax "
        "serve does, of published what papers do.",
    )
    attention_mesh: str | None = option(
        None, "With --expert-mesh, in place of --mesh: plan with these devices for attention, dp=8 or dp=4,tp=2."
    )
    expert_mesh: str | None = option(None, "With --attention-mesh: and these for the routed experts, ep=24.")
    num_afd_stages: int = option(
        2,
        "With --afd and --engine dsjax: micro-batches that take turns on the two sides where that is faster than none.",
        min=2,
    )
    expert_device: str | None = option(
        None, "With --afd: the experts are on hosts of this device (configs/hardware) beside the cluster's."
    )
    expert_hosts: int | None = option(
        None, "--expert-device: how many hosts; default: as many as the cluster's.", min=1
    )
    rows: int = option(8, "Rows of the table.", min=1)

    def __post_init__(self):
        super().__post_init__()
        if self.classes and (self.input_tokens or self.output_tokens):
            raise UserError("--class has lengths of its own, in place of --input and --output; give one or the other")
        if self.mesh == "":
            raise UserError("--mesh is '', expected axes such as dp=32 or pp=2,tp=8; leave it out for a search")
        if self.mesh is not None and self.stages:
            raise UserError(
                f"--stages is of a search over layouts, and --mesh {self.mesh} is one; write pp= into the mesh, or leave one out"
            )
        if self.mtp_acceptance != "0.85" and not self.mtp:
            raise UserError("--mtp-acceptance is of drafts, and there are none; give --mtp too, or leave it out")
        if self.fp8_gemm_backend != "deep_gemm" and self.engine != "sglang":
            raise UserError(
                f"--fp8-gemm-backend is {self.fp8_gemm_backend} with --engine {self.engine}, but it is SGLang's; give --engine sglang, or "
                "leave it out"
            )
        self._check_apart()

    def _check_apart(self) -> None:
        if (self.attention_mesh is None) != (self.expert_mesh is None):
            raise UserError(
                "--attention-mesh and --expert-mesh name the two sides of one instance; give both, or --afd alone"
            )
        if self.expert_mesh is not None and not re.fullmatch(r"ep=[1-9]\d*", self.expert_mesh):
            raise UserError(
                f"--expert-mesh is {self.expert_mesh!r}, expected ep= and the number of devices, such as ep=24"
            )
        if self.expert_hosts is not None and self.expert_device is None:
            raise UserError("--expert-hosts is of --expert-device; give it too")
        if self.num_afd_stages != 2 and (self.plans_apart == "off" or self.engine != "dsjax"):
            raise UserError(
                f"--num-afd-stages is {self.num_afd_stages}, an option of dsjax with attention and experts apart; give --engine dsjax and "
                "--afd auto or on, or leave it out"
            )
        if self.expert_device is not None and self.plans_apart == "off":
            raise UserError("--expert-device is of attention and experts apart; give --afd auto or on, or both meshes")

    @property
    def plans_apart(self) -> str:
        """`--afd`, which meshes of two sides turn on."""
        return "on" if self.attention_mesh is not None else self.afd

    def _measured(self, config: ModelConfig) -> Measured | None:
        return read_measured(self.measured, config) if self.measured else None

    def _cluster(self, found: Cluster) -> Cluster:
        if self.fp8_gemm_backend == "flashinfer_trtllm" and not found.hardware.is_blackwell:
            raise UserError(
                f"--fp8-gemm-backend is flashinfer_trtllm, which needs Blackwell, but {found.name} has {found.hardware.key}; "
                "leave it out"
            )
        if self.network is not None:
            network = read_network(self.network)
            check_device(network, found.hardware, found.name)
            found = dataclasses.replace(found, measured=network)
        found = super()._cluster(found)
        if self.expert_device is None:
            return found
        return found.with_experts_on(load_hardware(self.expert_device), self.expert_hosts or found.hosts)

    def _workload(self, **load: Any) -> Workload:
        load["prefix_hit"] = self.prefix_hit
        if self.classes:
            return Workload.of_classes([RequestClass.parse(text) for text in self.classes], **load)
        return super()._workload(**load)

    def _options(self, engine: Engine, measured: Measured | None) -> dict[str, Any]:
        if self.fp8_gemm_backend == "flashinfer_trtllm":
            engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
        return super()._options(engine, measured) | {
            "acceptance": read_acceptance(self.mtp_acceptance),
            "skew": read_skew(self.expert_skew),
            "overlap": self.two_batch_overlap,
            "max_devices": self.max_devices,
            "compiled": tuple(read_dry_run(path) for path in self.compiled or ()),
            "mesh": _mesh(self.mesh),
            "measured": measured,
            "operators": operator_tables(self.operators),
            "host": self.host_scheduling,
            "widest": self.max_devices_per_instance,
            "afd": self.plans_apart,
            "afd_stages": self.num_afd_stages,
            "stages": (1, *(self.stages or ())),
            "pins": self._pins(),
        }

    def _pins(self, *of_separated: Any) -> Pins:
        apart = _mesh(self.attention_mesh), _mesh(self.expert_mesh and self.expert_mesh.replace("ep=", "dp="))
        return Pins(*(of_separated or (None,) * 4), *apart)


@dataclass(frozen=True, kw_only=True)
class StepArgs(TimedArgs):
    """The options of `dsjax plan step`."""

    mode: str = option(
        "static", "Both phases, prompts alone, or decodes alone.", choices=("static", "static_ctx", "static_gen")
    )
    batch: int | None = option(None, "Requests of a DP rank; default: all that fit.", min=1)
    context: int | None = option(
        None,
        "static_gen: cached tokens of every request; fit: tokens of the longest. Default: as --input and --output make them.",
        min=1,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.context is not None and self.mode != "static_gen":
            raise UserError(
                f"--context is of decode steps alone, --mode {self.mode} follows from --input and --output; give --mode static_gen"
            )

    def _workload(self, **load: Any) -> Workload:
        return super()._workload(decoding_at=self.context and float(self.context), **load)


@dataclass(frozen=True, kw_only=True)
class ServiceArgs(TimedArgs):
    """What the subcommands that search for a deployment are told besides: its load, its objectives and its instances."""

    mode: str = option("both", "Whether instances do both phases or one each.", choices=tuple(_MODES))
    max_concurrency: float | None = option(None, "Requests in flight; default: as many as pays.")
    request_rate: float | None = option(
        None,
        "Requests a second that must be kept up with; inf: no rate, and simulate starts all users at once, as benchmarks do.",
    )
    ttft_ms: float | None = option(None, "Objective: mean time to first token.", alias="--ttft")
    tpot_ms: float | None = option(None, "Objective: mean time per output token.", alias="--itl")
    throughput: float | None = option(None, "Objective: output tokens a second, all together.")
    slo: list[str] | None = option(
        None,
        "Percentile that must hold, in ms: ttft-p95=370, tpot-p99=60, e2e-p50=9000, or of a class: short:ttft-p95=370; "
        "p50, p90, p95 or p99; repeatable. The best deployments are played (--num-prompts, --seed).",
    )
    prefill_mesh: str | None = option(None, "Separated: mesh of a prefill instance.")
    decode_mesh: str | None = option(None, "Separated: mesh of a decode instance.")
    prefill_instances: int | None = option(None, "Separated: how many of them.")
    decode_instances: int | None = option(None, "Separated: how many of them.")
    price_per_hour: float | None = option(
        None, "Of one device, in any currency: the cost of a million output tokens follows."
    )
    num_prompts: int = option(1000, "Requests that are played and measured.", min=1)
    burstiness: float = option(1.0, "1 is Poisson, less is burstier, as vllm bench serve has it.")
    seed: int = option(0, "Of the lengths and arrivals that are played.", min=0)

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.burstiness < math.inf:
            raise UserError(f"--burstiness is {self.burstiness:g}, expected a number above 0")
        if self.burstiness != 1 and (self.max_concurrency is not None or self.request_rate == math.inf):
            raise UserError(
                "--burstiness is of arrivals at a rate; with --max-concurrency and --request-rate inf each request follows one that ended"
            )
        if self.slo and self.plans_apart != "off":
            raise UserError("--slo knows layouts of one mesh, and --afd looks at two; leave one of the two out")

    def slos(self, workload: Workload) -> list[Any]:
        """The percentiles (`percentiles.Slo`) that must hold."""
        if not self.slo:
            return []
        from dsjax.plan.percentiles import Slo  # brings the engine's scheduler in, a third of a second

        return [Slo.parse(text, workload) for text in self.slo]

    def _cluster(self, found: Cluster) -> Cluster:
        price = self.price_per_hour
        if price is not None:
            if not 0 < price < math.inf:
                raise UserError(f"--price-per-hour is {price:g}, expected a number above 0")
            if found.prefill is not None or self.expert_device is not None:
                two = f"{found.name} has two" if self.expert_device is None else "--expert-device is another"
                raise UserError(
                    f"--price-per-hour is of one kind of device, and {two}; give price_per_hour in the file of each of them"
                )
            found = dataclasses.replace(found, hardware=dataclasses.replace(found.hardware, price_per_hour=price))
        return super()._cluster(found)

    def _workload(self, **load: Any) -> Workload:
        rate = None if self.request_rate == math.inf else self.request_rate
        return super()._workload(concurrency=self.max_concurrency, rate=rate, **load)

    def _objective(self, workload: Workload) -> Objective:
        objective = Objective(self.ttft_ms and self.ttft_ms / 1e3, self.tpot_ms and self.tpot_ms / 1e3, self.throughput)
        slos = self.slos(workload)
        if not slos:
            return objective
        from dsjax.plan.percentiles import guide

        return guide(objective, slos, workload)

    def _options(self, engine: Engine, measured: Measured | None) -> dict[str, Any]:
        return super()._options(engine, measured) | {"modes": _MODES[self.mode]}

    def _pins(self, *of_separated: Any) -> Pins:
        meshes = _mesh(self.prefill_mesh), _mesh(self.decode_mesh)
        return super()._pins(*meshes, self.prefill_instances, self.decode_instances)


@dataclass(frozen=True, kw_only=True)
class PlanArgs(ServiceArgs):
    """The options of `dsjax plan`."""

    explain: str | None = option(
        None,
        "Derivation of the best, and which assumptions widen it most: tpot, ttft, throughput or memory.",
        choices=EXPLAINED,
    )
    sweep: list[str] | None = option(
        None,
        "latency, bandwidth, loss-of-hosts, hosts or concurrency, or at your own points: latency=1,10,100; hosts=8:400,16:800 "
        "with so many requests in flight; repeatable.",
    )
    plots: Path | None = option(None, "Folder for the sweeps' pictures.")
    pareto: Path | None = option(None, "Write the Pareto front: .html, or a picture.")
    working_set: float | None = option(
        None, "Tokens of prompts that come back: what share of them the best deployment's cache and tiers have."
    )
    host_cache_gb: float = option(0.0, "--working-set: host memory for pages, of each host.")
    disk_cache_gb: float = option(0.0, "--working-set: disk for pages, of each host.")

    def __post_init__(self):
        super().__post_init__()
        if self.plots and not self.sweep:
            raise UserError(
                "--plots draws sweeps, and there is none; give --sweep latency or another, or --pareto FILE.png for the front"
            )
        if self.explain and self.json_file is not None:
            raise UserError("--explain is for reading, --json writes data in its place; give one of them")
        for flag, value in (("--host-cache-gb", self.host_cache_gb), ("--disk-cache-gb", self.disk_cache_gb)):
            if not 0 <= value < math.inf:
                raise UserError(f"{flag} is {value:g}, expected a number of at least 0")
            if value and self.working_set is None:
                raise UserError(f"{flag} is of --working-set; give it too")
            if value and self.engine == "dsjax" and self._looks_at_stages:
                raise UserError(
                    f"{flag}: dsjax keeps no pages beside those on its devices where a mesh has stages; leave one out"
                )
        if self.working_set is not None and not 0 < self.working_set < math.inf:
            raise UserError(f"--working-set is {self.working_set:g}, expected a number of tokens above 0")
        if self.working_set is not None and self.plans_apart != "off":
            raise UserError("--working-set knows layouts of one mesh, and --afd looks at two; leave one of the two out")

    @property
    def _looks_at_stages(self) -> bool:
        meshes = map(_mesh, (self.mesh, self.prefill_mesh, self.decode_mesh))
        return any(count > 1 for count in self.stages or ()) or any(mesh.pp_size > 1 for mesh in meshes if mesh)


@dataclass(frozen=True, kw_only=True)
class SimulateArgs(ServiceArgs):
    """The options of `dsjax plan simulate`."""

    warmup: int | None = option(
        None, "requests left out at the start. Default: none with --request-rate inf, else a stay's.", min=0
    )
    random_range_ratio: float | None = option(
        None, "Lengths evenly between length × (1 - ratio) and length × (1 + ratio), as vllm bench serve draws them."
    )
    scheduler_recv_interval: int = option(
        1,
        "--engine sglang or published: steps of decodes between two looks for new prompts, SGLang's option of this name.",
        min=1,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.plans_apart != "off":
            raise UserError("plan simulate knows layouts of one mesh, and --afd looks at two; leave it out")
        ratio = self.random_range_ratio
        if ratio is not None and (not 0 <= ratio < 1 or self.classes):
            raise UserError(
                f"--random-range-ratio is {ratio:g}, expected at least 0 and less than 1, with --input and --output"
            )
        if self.scheduler_recv_interval > 1 and self.engine not in ("sglang", "published"):
            raise UserError(
                f"--scheduler-recv-interval is {self.scheduler_recv_interval} with --engine {self.engine}, but it is SGLang's; give "
                "--engine sglang or published, or leave it out"
            )

    def _workload(self, **load: Any) -> Workload:
        made, ratio = super()._workload(**load), self.random_range_ratio
        if ratio is None:
            return made
        return dataclasses.replace(made, input=made.input.around(ratio), output=made.output.around(ratio))

    def _options(self, engine: Engine, measured: Measured | None) -> dict[str, Any]:
        engine = dataclasses.replace(engine, poll_steps=self.scheduler_recv_interval)
        return super()._options(engine, measured)


def _mesh(text: str | None) -> MeshSpec | None:
    return MeshSpec.parse(text) if text else None
