"""`PlanArgs`: the options of `dsjax plan`, each once, checked when made; and the question that they ask."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsjax.errors import UserError
from dsjax.options import option
from dsjax.plan.precision import PRECISIONS

if TYPE_CHECKING:
    from dsjax.plan.cluster import Cluster
    from dsjax.plan.engine import Engine
    from dsjax.plan.measured import Measured
    from dsjax.plan.operator_tables import OperatorTables
    from dsjax.plan.percentiles import Slo
    from dsjax.plan.question import Question
    from dsjax.plan.workload import Pins, PlanOptions, Workload

_MODES = {"both": ("aggregated", "separated"), "aggregated": ("aggregated",), "separated": ("separated",)}
STATIC_MODES = ("static", "static_ctx", "static_gen")
"""One batch of every layout in place of a service: of both phases, of prompts alone, of decodes alone."""


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """The options of a plan, which the command line shows as they are declared here."""

    model: str = option("deepseek-v3", "Bundled name, or a directory with config.json.")
    cluster: str | None = option(
        None,
        "Bundled name (configs/clusters), a TOML file, or this-machine with --measured. "
        "Default: the device of --measured, else h100-32.",
    )
    hosts: int | None = option(None, "Another number of hosts than the cluster's.", min=1)
    input_tokens: str | None = option(
        None, "Prompt tokens: mean, or mean:variation.", flag="--input", show_default="2000"
    )
    output_tokens: str | None = option(
        None, "Output tokens: mean, or mean:variation.", flag="--output", show_default="500"
    )
    classes: list[str] | None = option(
        None,
        "NAME=SHARE,INPUT,OUTPUT instead of --input and --output: a mixture of lengths; repeatable: "
        "short=0.8,512:0.2,256.",
        flag="--class",
    )
    slo: list[str] | None = option(
        None,
        "Percentile that must hold, in ms: ttft-p95=370, tpot-p99=60, e2e-p50=9000, or of a class: short:ttft-p95=370; "
        "p50, p90, p95 or p99; repeatable. The best deployments are played (--num-prompts, --seed).",
    )
    concurrency: float | None = option(None, "Requests in flight; default: as many as pays.")
    rate: float | None = option(None, "Requests a second that must be kept up with.")
    prefix_hit: float = option(0.0, "Share of prompt tokens found in the cache.")
    working_set: float | None = option(
        None, "Tokens of prompts that come back: what share of them the best deployment's cache and tiers have."
    )
    host_cache_gb: float = option(0.0, "--working-set: host memory for pages, of each host.")
    disk_cache_gb: float = option(0.0, "--working-set: disk for pages, of each host.")
    ttft_ms: float | None = option(None, "Objective: mean time to first token.")
    tpot_ms: float | None = option(None, "Objective: mean time per output token.")
    throughput: float | None = option(None, "Objective: output tokens a second, all together.")
    measured: Path | None = option(None, "JSON of dsjax bench modules: its times in place of published tables.")
    network: Path | None = option(
        None, "JSON of dsjax bench network: its times of collectives in place of assumptions about links."
    )
    precision: str = option(
        "auto",
        f"{', '.join(PRECISIONS)} (-bf16: with attention in bf16); auto: fp8, or what --measured was taken with.",
    )
    kv_cache_dtype: str = option("auto", "Latent cache: auto, bf16 or fp8.")
    mtp: int = option(0, "Tokens drafted by the MTP module a step.")
    mtp_acceptance: str = option(
        "0.85",
        "Chance that the first draft of a step is accepted, or of each position, as vLLM logs it: 0.74,0.48,0.26.",
    )
    redundant_experts: int | None = option(None, "Physical minus logical; default: tried.")
    stages: list[int] | None = option(
        None,
        "Look at layouts of so many pipeline stages beside those of one; repeatable. A --mesh with pp needs no more.",
    )
    enable_shared_experts_fusion: bool = option(
        False, "The shared expert is one more routed one, with a copy on each device.", switch=True
    )
    expert_skew: str = option(
        "default",
        "default, uniform, zipf:S, or a JSON file of tokens per expert, as dsjax serve records them; "
        "EARLIER.json,LATER.json: what a balancer has seen, and what it then served.",
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
        "summed up over all ranks.",
    )
    fp8_gemm_backend: str = option(
        "deep_gemm",
        "--engine sglang on Blackwell: kernels of dense FP8 products, deep_gemm or flashinfer_trtllm.",
    )
    compiled: list[Path] | None = option(
        None, "JSON of dsjax dryrun: its figures in place of assumptions where it is of a layout; repeatable."
    )
    operators: Path | None = option(None, "Folder of your own tables of operations, in the form of configs/operators.")
    host_scheduling: str = option(
        "overlapped", "overlapped with the device's work, or serial: the device waits for it."
    )
    two_batch_overlap: str = option(
        "auto",
        "auto: where it is faster; on; off. Of --engine dsjax `on` is where it is faster, and auto is off, as --enable-dbo is.",
    )
    mode: str = option("both", "aggregated, separated, both; or static, static_ctx, static_gen: one batch.")
    batch: int | None = option(None, "Static modes: requests of a DP rank; default: all that fit.", min=1)
    context: int | None = option(
        None,
        "--mode static_gen: cached tokens of every request; --fit: tokens of the longest. Default: as --input and --output make them.",
        min=1,
    )
    fit: bool = option(
        False,
        "Say whether --mesh fits into memory with --engine, --prefill-tokens and --context, and with which memory fractions; "
        "exit status 3 where it does not.",
        switch=True,
    )
    memory_fraction: float | None = option(
        None,
        "--fit: the engine's share of memory: --gpu-memory-utilization, --mem-fraction-static or free_gpu_memory_fraction. "
        "Default: the engine's.",
    )
    prefill_tokens: int = option(16384, "Most prompt tokens of a DP rank in a step.")
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
    mesh: str | None = option(None, "Plan with instances of this mesh only: dp=32, or dp=4,tp=8, or pp=2,tp=8.")
    prefill_mesh: str | None = option(None, "Separated: mesh of a prefill instance.")
    decode_mesh: str | None = option(None, "Separated: mesh of a decode instance.")
    prefill_instances: int | None = option(None, "Separated: how many of them.")
    decode_instances: int | None = option(None, "Separated: how many of them.")
    max_devices: int | None = option(None, "Use no more devices than this.")
    max_devices_per_instance: int | None = option(None, "No instance is wider than this: what one failure takes down.")
    price_per_hour: float | None = option(
        None, "Of one device, in any currency: the cost of a million output tokens follows."
    )
    explain: str | None = option(
        None, "Derivation of the best, and which assumptions widen it most: tpot, ttft, throughput or memory."
    )
    sweep: list[str] | None = option(
        None,
        "latency, bandwidth, loss-of-hosts, hosts or concurrency, or at your own points: latency=1,10,100; hosts=8:400,16:800 "
        "with so many requests in flight; repeatable.",
    )
    simulate: bool = option(False, "Play arrivals through on the best: percentiles, goodput.", switch=True)
    num_prompts: int = option(1000, "--simulate: requests that are measured.", min=1)
    request_rate: str | None = option(
        None,
        "--simulate: inf starts as benchmarks do, all users at once, and nobody comes after the last. Default: a steady service.",
    )
    warmup: int | None = option(
        None, "--simulate: requests left out at the start. Default: none with --request-rate inf, else a stay's.", min=0
    )
    random_range_ratio: float | None = option(
        None,
        "--simulate: lengths evenly from this share of --input and --output to all of them, as InferenceX's benchmarks draw them.",
    )
    scheduler_recv_interval: int = option(
        1,
        "--simulate, --engine sglang or published: steps of decodes between two looks for new prompts, SGLang's option of this name.",
        min=1,
    )
    burstiness: float = option(1.0, "--simulate: 1 is Poisson, less is burstier, as vllm bench serve has it.")
    seed: int = option(0, "--simulate: of lengths and arrivals.", min=0)
    rows: int = option(8, "Rows of the table.", min=1)
    pareto: Path | None = option(None, "Write the Pareto front: .html, or a picture.")
    plots: Path | None = option(None, "Folder for the sweeps' pictures.")
    recipe_file: Path | None = option(
        None,
        "Write the winner's recipe: FILE.json, FILE.sh with the commands of --engine vllm, sglang or tensorrt-llm, FILE.yaml for "
        "NVIDIA Dynamo's operator, or a folder with a kustomize overlay for Kubernetes.",
        flag="--recipe",
    )
    json_file: str | None = option(None, "Write JSON to this file instead; - for standard output.", flag="--json")

    def __post_init__(self):
        if self.mode not in (*_MODES, *STATIC_MODES):
            raise UserError(f"--mode is {self.mode!r}, expected one of {', '.join((*_MODES, *STATIC_MODES))}")
        if self.explain is not None:
            from dsjax.plan.explain import EXPLAINED

            if self.explain not in EXPLAINED:
                raise UserError(f"--explain is {self.explain!r}, expected one of {', '.join(EXPLAINED)}")
        self._check_arrivals()
        self._check_sglang()
        self._check_batch()
        self._check_fit()
        self._check_reuse()
        self._check_apart()
        if self.plots and not self.sweep:
            raise UserError(
                "--plots draws sweeps, and there is none; give --sweep latency or another, or --pareto FILE.png for the front"
            )
        if self.explain and self.json_file is not None:
            raise UserError("--explain is for reading, --json writes data in its place; give one of them")
        if self.classes and (self.input_tokens or self.output_tokens):
            raise UserError("--class has lengths of its own, in place of --input and --output; give one or the other")
        if self.mesh is not None and self.stages:
            raise UserError(
                f"--stages is of a search over layouts, and --mesh {self.mesh} is one; write pp= into the mesh, or leave one out"
            )
        if self.mesh == "":
            raise UserError("--mesh is '', expected axes such as dp=32 or pp=2,tp=8; leave it out for a search")
        if self.mtp_acceptance != "0.85" and not self.mtp:
            raise UserError("--mtp-acceptance is of drafts, and there are none; give --mtp too, or leave it out")

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
        if self.plans_apart == "off":
            if self.expert_device is not None:
                raise UserError(
                    "--expert-device is of attention and experts apart; give --afd auto or on, or both meshes"
                )
            return
        for flag, given in (
            ("--simulate", self.simulate), ("--slo", self.slo), ("--fit", self.fit), ("--working-set", self.working_set is not None),
        ):  # fmt: skip
            if given:
                raise UserError(f"{flag} knows layouts of one mesh, and --afd looks at two; leave one of the two out")

    @property
    def plans_apart(self) -> str:
        """`--afd`, which meshes of two sides turn on."""
        return "on" if self.attention_mesh is not None else self.afd

    @property
    def _looks_at_stages(self) -> bool:
        meshes = map(_mesh, (self.mesh, self.prefill_mesh, self.decode_mesh))
        return any(count > 1 for count in self.stages or ()) or any(mesh.pp_size > 1 for mesh in meshes if mesh)

    def _check_sglang(self) -> None:
        """Refuse SGLang's own options with other values than are priced, and of other engines."""
        for name, values in (
            ("moe_a2a_backend", ("deepep", "none")),
            ("fp8_gemm_backend", ("deep_gemm", "flashinfer_trtllm")),
        ):
            value = getattr(self, name)
            if value not in values:
                raise UserError(f"{_flag(name)} is {value!r}, expected {' or '.join(values)}: others are not priced")
            if value != values[0] and self.engine != "sglang":
                raise UserError(
                    f"{_flag(name)} is {value} with --engine {self.engine}, but it is SGLang's; give --engine sglang, or leave it out"
                )

    def _check_reuse(self) -> None:
        for name in ("host_cache_gb", "disk_cache_gb"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{_flag(name)} is {value:g}, expected a number of at least 0")
            if value and self.working_set is None:
                raise UserError(f"{_flag(name)} is of --working-set; give it too")
            if value and self.engine == "dsjax" and self._looks_at_stages:
                raise UserError(
                    f"{_flag(name)}: dsjax keeps no pages beside those on its devices where a mesh has stages; leave one out"
                )
        if self.working_set is not None and not 0 < self.working_set < math.inf:
            raise UserError(f"--working-set is {self.working_set:g}, expected a number of tokens above 0")

    def _check_arrivals(self) -> None:
        if not 0 < self.burstiness < math.inf:
            raise UserError(f"--burstiness is {self.burstiness:g}, expected a number above 0")
        if self.burstiness != 1 and (self.concurrency is not None or self.request_rate):
            raise UserError(
                "--burstiness is of arrivals at a rate; with --concurrency and --request-rate inf each request follows one that ended"
            )
        if self.request_rate not in (None, "inf"):
            raise UserError(
                f"--request-rate is {self.request_rate!r}, expected inf: all users at once; give --rate for requests a second"
            )
        if (self.request_rate or self.warmup is not None) and not self.simulate:
            raise UserError("--request-rate and --warmup are of --simulate; give it too")
        if self.scheduler_recv_interval > 1 and not (self.simulate and self.engine in ("sglang", "published")):
            raise UserError(
                f"--scheduler-recv-interval is {self.scheduler_recv_interval} with --engine {self.engine}, but it is SGLang's, in a "
                "simulation; give --simulate and --engine sglang or published, or leave it out"
            )
        ratio = self.random_range_ratio
        if ratio is not None and (not 0 < ratio <= 1 or not self.simulate or self.classes):
            raise UserError(
                f"--random-range-ratio is {ratio:g}, expected a number above 0 and at most 1, with --simulate, --input and --output"
            )
        if self.request_rate and self.rate is not None:
            raise UserError("--request-rate inf starts a fixed number of users at once; give --concurrency, not --rate")

    def _check_fit(self) -> None:
        if not self.fit:
            if self.memory_fraction is not None:
                raise UserError("--memory-fraction is of --fit; give it too")
            return
        if self.mesh is None:
            raise UserError("--fit is about one layout; give it, such as --mesh tp=8")
        given = next((name for name in _OF_A_SERVICE if not _is_absent(getattr(self, name))), None)
        if given or self.is_static:
            what = f"--mode {self.mode}" if given is None else _flag(given)
            raise UserError(f"{what} asks for a plan, --fit about the memory of one layout; give one of them")
        usual = {one.name: one.default for one in dataclasses.fields(self)}
        for name in _OF_TIMES_OR_CHOICES:
            if getattr(self, name) != usual[name] and not _is_absent(getattr(self, name)):
                raise UserError(
                    f"{_flag(name)} says how long steps take or which layouts are looked at, and --fit judges the memory of the one that "
                    "--mesh names, by its own figures; leave it out"
                )

    def _check_batch(self) -> None:
        mode = self.mode
        if self.batch is not None and not self.is_static:
            raise UserError(f"--batch is for --mode {', '.join(STATIC_MODES)}; with --mode {mode} give --concurrency")
        if self.context is not None and mode != "static_gen" and not self.fit:
            raise UserError(
                f"--context is of decode steps alone, --mode {mode} follows from --input and --output; give --mode static_gen, or --fit"
            )
        given = next((name for name in _OF_A_SERVICE if not _is_absent(getattr(self, name))), None)
        if self.is_static and given:
            raise UserError(
                f"{_flag(given)} is of a service, --mode {mode} is one batch of every layout; give aggregated, separated or both"
            )

    @property
    def is_static(self) -> bool:
        """Whether one batch of every layout is asked for, and no service."""
        return self.mode in STATIC_MODES

    def question(self) -> tuple[Question, list[Slo]]:
        """The question that is asked, and the percentiles that must hold.

        Raises:
            UserError: a file that cannot be read, or values that do not go together.
        """
        from dsjax.config import load_config
        from dsjax.hardware import load_hardware
        from dsjax.plan.engine import find_engine
        from dsjax.plan.measured import read_measured
        from dsjax.plan.operator_tables import operator_tables
        from dsjax.plan.own_cluster import find_cluster
        from dsjax.plan.question import Question
        from dsjax.plan.recipe import check_recipe
        from dsjax.plan.sweep import read_sweep
        from dsjax.plan.workload import Objective

        engine = find_engine(self.engine)
        check_recipe(self.recipe_file, engine.name)
        for text in self.sweep or ():
            read_sweep(text)
        config = load_config(self.model)
        measured = read_measured(self.measured, config) if self.measured else None
        cluster, tables = find_cluster(self.cluster, measured), operator_tables(self.operators)
        if self.fp8_gemm_backend == "flashinfer_trtllm" and not cluster.hardware.is_blackwell:
            raise UserError(
                f"--fp8-gemm-backend is flashinfer_trtllm, which needs Blackwell, but {cluster.name} has {cluster.hardware.key}; "
                "leave it out"
            )
        cluster, workload = self._priced(self._timed(cluster)), self._workload()
        objective = Objective(self.ttft_ms and self.ttft_ms / 1e3, self.tpot_ms and self.tpot_ms / 1e3, self.throughput)
        if self.context is not None:
            workload = dataclasses.replace(workload, decoding_at=float(self.context))
        slos = []
        if self.slo:  # what plays requests brings the engine's scheduler in, a third of a second
            from dsjax.plan.percentiles import Slo, guide

            slos = [Slo.parse(text, workload) for text in self.slo]
            objective = guide(objective, slos, workload)
        cluster = cluster.resized(self.hosts) if self.hosts else cluster
        if self.expert_device is not None:
            cluster = cluster.with_experts_on(load_hardware(self.expert_device), self.expert_hosts or cluster.hosts)
        return Question(config, cluster, workload, objective, self._options(engine, measured, tables)), slos

    def _timed(self, cluster: Cluster) -> Cluster:
        """The cluster with the times of its collectives that were measured."""
        from dsjax.plan.measured_network import check_device, read_network

        if self.network is None:
            return cluster
        network = read_network(self.network)
        check_device(network, cluster.hardware, cluster.name)
        return dataclasses.replace(cluster, measured=network)

    def _priced(self, cluster: Cluster) -> Cluster:
        """The cluster with the price of its devices."""
        price = self.price_per_hour
        if price is None:
            return cluster
        if not 0 < price < math.inf:
            raise UserError(f"--price-per-hour is {price:g}, expected a number above 0")
        if cluster.prefill is not None or self.expert_device is not None:
            two = f"{cluster.name} has two" if self.expert_device is None else "--expert-device is another"
            raise UserError(
                f"--price-per-hour is of one kind of device, and {two}; give price_per_hour in the file of each of them"
            )
        return dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, price_per_hour=price))

    def _workload(self) -> Workload:
        from dsjax.plan.workload import Lengths, RequestClass, Workload

        load: dict[str, Any] = {"concurrency": self.concurrency, "rate": self.rate, "prefix_hit": self.prefix_hit}
        if self.classes:
            return Workload.of_classes([RequestClass.parse(text) for text in self.classes], **load)
        prompt = Lengths.parse(self.input_tokens or "2000", "--input")
        output = Lengths.parse(self.output_tokens or "500", "--output")
        if self.random_range_ratio is not None:
            prompt, output = (each.ranged(self.random_range_ratio) for each in (prompt, output))
        return Workload(prompt, output, **load)

    def _options(self, engine: Engine, measured: Measured | None, tables: OperatorTables) -> PlanOptions:
        from dsjax.plan.compiled import read_dry_run
        from dsjax.plan.drafting import read_acceptance
        from dsjax.plan.own_cluster import choose_precision
        from dsjax.plan.skew import read_skew
        from dsjax.plan.workload import PlanOptions

        return PlanOptions(
            precision=engine.precision(choose_precision(self.precision, self.kv_cache_dtype, measured)),
            drafts=self.mtp,
            acceptance=read_acceptance(self.mtp_acceptance),
            redundant=self.redundant_experts,
            skew=read_skew(self.expert_skew),
            overlap=self.two_batch_overlap,
            modes=_MODES.get(self.mode, _MODES["both"]),
            prefill_tokens=self.prefill_tokens,
            max_devices=self.max_devices,
            dispatch=self.dispatch or engine.dispatch,
            compiled=tuple(read_dry_run(path) for path in self.compiled or ()),
            mesh=_mesh(self.mesh),
            measured=measured,
            operators=tables,
            host=self.host_scheduling,
            engine=self._with_sglang(dataclasses.replace(engine, poll_steps=self.scheduler_recv_interval)),
            pins=self._pins(),
            widest=self.max_devices_per_instance,
            fused=self.enable_shared_experts_fusion,
            afd=self.plans_apart,
            afd_stages=self.num_afd_stages,
            stages=(1, *(self.stages or ())),
        )

    def _with_sglang(self, engine: Engine) -> Engine:
        """The engine as SGLang's own options start it.

        Without an all-to-all it refuses `--enable-two-batch-overlap` (`check_server_args` of its srt/server_args.py).
        """
        from dsjax.plan.operations import FLASHINFER_FP8_RATE

        if self.moe_a2a_backend == "none":
            engine = dataclasses.replace(engine, gathers=True, overlaps=False)
        if self.fp8_gemm_backend == "flashinfer_trtllm":
            engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
        return engine

    def _pins(self) -> Pins:
        from dsjax.plan.workload import Pins

        prefill, decode = _mesh(self.prefill_mesh), _mesh(self.decode_mesh)
        apart = _mesh(self.attention_mesh), _mesh(self.expert_mesh and self.expert_mesh.replace("ep=", "dp="))
        return Pins(prefill, decode, self.prefill_instances, self.decode_instances, *apart)


_OF_A_SERVICE = (
    "explain", "pareto", "sweep", "recipe_file", "slo", "concurrency", "rate", "ttft_ms", "tpot_ms", "throughput", "prefill_mesh",
    "decode_mesh", "prefill_instances", "decode_instances", "price_per_hour", "simulate", "working_set",
)  # fmt: skip
"""Options that one batch of every layout does not have."""
_OF_TIMES_OR_CHOICES = (
    "measured", "network", "compiled", "operators", "expert_skew", "host_scheduling", "two_batch_overlap", "stages", "max_devices",
    "max_devices_per_instance", "mtp_acceptance", "prefix_hit",
)  # fmt: skip
"""Options that the memory of one layout does not hang on."""


def _flag(name: str) -> str:
    return "--recipe" if name == "recipe_file" else f"--{name.replace('_', '-')}"


def _is_absent(value: Any) -> bool:
    return value is None or value is False or value == []


def _mesh(text: str | None) -> Any:
    from sharding.mesh import MeshSpec

    return MeshSpec.parse(text) if text else None
