"""`EngineArgs`: all engine options, shared by `LLM(...)`, `dsjax serve` and `dsjax generate`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.config import ModelConfig
from dsjax.config.model_config import INDEX_FORMATS
from dsjax.config.weights import ROW_FORMATS, SERVED
from dsjax.engine.afd.options import ApartOptions, check_apart, expert_share, expert_spec
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.experts.eplb import ExpertOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.combinations import check_combinations
from dsjax.engine.setup.side_options import SideOptions, check_sides, check_sizes, default_page
from dsjax.engine.text.prompt_encoder import TOKENIZER_MODES
from dsjax.engine.tiers.options import TierOptions
from dsjax.errors import UserError
from dsjax.hosts.options import GroupOptions
from dsjax.model.forms import FORMS
from dsjax.options import Group, advanced, option

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
MLA_FORMS = tuple(FORMS)
PREFILL_CHUNK = 256
"""Default of `--prefill-chunk`, in tokens."""


@dataclass(frozen=True, kw_only=True)
class BasicOptions:
    """Options of every engine: the model, its numerics and kernels, and batch and cache sizes."""

    model: str = option("demo", "Name of a bundled model, Hugging Face repository id, or checkpoint path.", Group.MODEL)
    revision: str | None = option(None, "Branch, tag or commit of the Hugging Face repository.", Group.MODEL)
    tokenizer: str | None = advanced(None, "Path to a different tokenizer.", Group.MODEL, host_only=True)
    tokenizer_mode: str = advanced(
        "auto",
        "How to render chat messages as a prompt. hf: with the chat template; deepseek_v32, deepseek_v4: with the encoder of that "
        "model; auto: with the chat template if there is one, else with the model's encoder.",
        Group.MODEL,
        choices=TOKENIZER_MODES,
        host_only=True,
    )
    chat_template: str | None = option(None, "Path to a different Jinja chat template.", Group.MODEL, host_only=True)
    max_model_len: int | None = option(None, "Maximum context length. Default: the model's.", Group.MODEL, least=1)
    dtype: str = option(
        "auto",
        "auto: the checkpoint's data type; float32 on CPUs.",
        Group.MODEL,
        choices=("auto", "float32", "bfloat16"),
    )
    seed: int = advanced(0, "Random seed for requests without a seed.", Group.MODEL, least=0, host_only=True)
    weights: str = option(
        "auto",
        "Format of weights in device memory. auto: --dtype; fp8: FP8 for weights that the checkpoint stores in FP8; others: this "
        "format for routed experts and FP8 (with -bf16: bfloat16) for other matrices.",
        Group.QUANTIZATION,
        choices=("auto", *SERVED),
    )
    activation_scheme: str = advanced(
        "auto",
        "How to quantise activations for quantised weights. dynamic: to FP8 in blocks of 1 × 128; an expert format: rows of routed "
        "experts to that format, others as dynamic; none: widen the weights to --dtype; auto: dynamic for FP8 weights on GPUs that "
        "multiply FP8, else none.",
        Group.QUANTIZATION,
        choices=("auto", "dynamic", *ROW_FORMATS, "none"),
    )
    mesh: str = option(
        "dp=1",
        "Parallelism sizes, such as dp=4,tp=8. dp: number of DP ranks; tp: devices per DP rank; pp: pipeline stages, each with dp × "
        "tp devices; ep: EP ranks (default: dp × tp ÷ etp); etp: devices that split each expert (default: 1, or tp if ep is not a "
        "multiple of tp).",
        Group.MESH,
    )
    pp_layer_partition: str | None = advanced(
        None, "Layers of each pipeline stage, such as 31,30. Default: balanced.", Group.MESH
    )
    moe_dense_tp_size: int | None = advanced(
        None, "TP size of dense MLPs. 1: replicate them and split their tokens. Default: tp.", Group.MESH, least=1
    )
    enable_dp_lm_head: bool = advanced(False, "Replicate the LM head in each DP rank and split its tokens.", Group.MESH)
    dispatch: str = option(
        "auto",
        "All-to-all method for expert dispatch and combine.",
        Group.EXPERTS,
        choices=("auto", "gather", "padded", "ragged", "hierarchical"),
        classes=True,
    )
    router: type | None = option(None, "Class of the routers (an ExpertRouter). Default: the model's.", classes=True)
    devices_per_host: int | None = advanced(
        None,
        "Number of consecutive devices that share fast links, used by --dispatch auto and hierarchical and by --ep-dispatch-algorithm "
        "static. Default: the slice that JAX reports (an NVLink domain or an ICI slice); on a CPU, the devices of a process; in a dry "
        "run, those of the target.",
        Group.EXPERTS,
        least=1,
    )
    dispatch_wire: str = advanced(
        "compute", "Data type of tokens sent to experts. compute: --dtype.", Group.EXPERTS, choices=("compute", "fp8")
    )
    moe_chunk_tokens: int | None = advanced(None, "Maximum tokens per rank and dispatch.", Group.EXPERTS, least=1)
    ep_dispatch_algorithm: str = advanced(
        "dynamic",
        "Which replica of an expert receives a token. dynamic: all replicas in turn; static: replicas on the same DP rank, else on "
        "the same host, in turn.",
        Group.EXPERTS,
        choices=("dynamic", "static"),
    )
    enable_shared_experts_fusion: bool = advanced(
        False, "Compute the shared expert as a routed expert, with a replica on each device.", Group.EXPERTS
    )
    enable_dbo: bool = option(
        False, "Two-batch overlap: dispatch one half of a step while computing the other.", Group.EXPERTS
    )
    dbo_decode_token_threshold: int = advanced(
        32, "Minimum tokens per rank for --enable-dbo in a decode step.", Group.EXPERTS, least=1
    )
    dbo_prefill_token_threshold: int = advanced(
        512, "Minimum tokens per rank for --enable-dbo in a step with prefills.", Group.EXPERTS, least=1
    )
    gpu_memory_utilization: float = option(
        0.9, "Fraction of each accelerator's memory to use.", Group.CACHE, above=0, most=1
    )
    kv_cache_dtype: str = option("auto", "KV cache data type. auto: --dtype.", Group.CACHE, choices=KV_CACHE_DTYPES)
    cache_tokens: int | None = option(
        None, "KV cache size per DP rank, in tokens. Default: from --max-num-seqs and memory.", Group.CACHE, least=1
    )
    page_size: int | None = option(
        None, "Tokens per KV cache page (block). Default: 16, or 128 for DeepSeek-V4.", Group.CACHE, least=1
    )
    enable_prefix_caching: bool = option(True, "Share KV cache pages of equal prefixes.", Group.CACHE, host_only=True)
    embedding_location: str = advanced(
        "device",
        "Where to keep the token embedding. host: in host memory, which leaves more device memory for the KV cache.",
        Group.CACHE,
        choices=("device", "host"),
    )
    max_num_seqs: int | None = option(
        None, "Maximum running requests per DP rank. Default: 256 ÷ DP ranks, at least 8.", Group.SCHEDULING, least=1
    )
    max_num_batched_tokens: int = option(2048, "Maximum tokens per DP rank and step.", Group.SCHEDULING, least=1)
    prefill_chunk: int | None = option(
        None,
        f"Maximum tokens of a prompt per step. Default: {PREFILL_CHUNK}, or --max-num-batched-tokens if less.",
        Group.SCHEDULING,
        least=1,
    )
    scheduling_policy: str = option(
        "fcfs", "Order of waiting requests.", Group.SCHEDULING, choices=("fcfs", "priority"), host_only=True
    )
    async_scheduling: bool = advanced(True, "Schedule ahead of the running step.", Group.SCHEDULING, host_only=True)
    stream_interval: int = advanced(
        1,
        "Number of tokens per streamed chunk. The first and the last are sent immediately. Larger values take less CPU time.",
        Group.SCHEDULING,
        least=1,
        host_only=True,
    )
    speculative_config: str | dict[str, Any] | None = option(
        None,
        """Draft with the MTP module. JSON: '{"method": "mtp", "num_speculative_tokens": 2}'.""",
        Group.SPECULATION,
    )
    kernels: str = option(
        "auto",
        "Kernel backend. auto: the fastest for the platform; plain: JAX operations only; native: C++ on CPUs; pallas: Triton on GPUs, "
        "Mosaic on TPUs.",
        Group.KERNELS,
        choices=("auto", "plain", "native", "pallas"),
    )
    batch_invariant: bool = option(
        False,
        "Compute bitwise equal results whether a token is prefilled, decoded or found in the prefix cache (CPUs with float32).",
        Group.KERNELS,
    )
    mla_prefill: str | None = advanced(
        None,
        "MLA form for prefills. Default: CC, or the value of --mla-decode with --batch-invariant.",
        Group.KERNELS,
        choices=MLA_FORMS,
        classes=True,
    )
    mla_decode: str = advanced("A_CC_ME", "MLA form for decodes.", Group.KERNELS, choices=MLA_FORMS, classes=True)
    index_scores: str = advanced(
        "float",
        "Precision of the sparse attention indexer's scores. float: --dtype, as in Transformers; else the format that DeepSeek's code has "
        "for the model, after a Hadamard rotation of queries and keys.",
        Group.KERNELS,
        choices=("float", *INDEX_FORMATS),
    )
    kernel_cache: str | None = advanced(
        None, "Directory from dsjax kernels build. Default: build at the first start.", Group.KERNELS
    )
    kernel_config: str | None = advanced(None, "Pallas tile sizes from dsjax tune. Default: computed.", Group.KERNELS)
    record_steps: str | None = advanced(
        None, "New file for a recording of all steps, with token ids, for dsjax replay.", Group.KERNELS, host_only=True
    )


@dataclass(frozen=True, kw_only=True)  # `--help` lists the last base first
class EngineArgs(GroupOptions, SideOptions, ExpertOptions, TierOptions, ApartOptions, BasicOptions):
    """The options of an engine, with vLLM's names where vLLM has the option. Validated at construction; sizes are per DP rank."""

    compile_ahead: int = advanced(
        1, "Number of lost processes for which to compile smaller meshes ahead. 0: none.", Group.HOSTS, least=0
    )
    wait_for_mesh_seconds: int = advanced(
        600, "Seconds that a request too long for a reduced mesh waits; 0: fail immediately.", Group.HOSTS, least=0
    )
    link_monitor_interval: int = advanced(
        10, "Seconds between measurements of network links for /metrics. 0: disabled.", Group.HOSTS, least=0
    )

    def __post_init__(self):
        if self.mla_prefill is None:
            object.__setattr__(self, "mla_prefill", self.mla_decode if self.batch_invariant else "CC")
        super().__post_init__()
        for parsed in ("speculation", "eplb", "num_redundant", "kv_events", "prefill"):
            getattr(self, parsed)  # parses an option, and raises if its value is invalid
        check_sizes(self)
        check_combinations(self)
        check_apart(self)
        if self.attention_mesh is not None:
            object.__setattr__(self, "mesh", self.attention_mesh)
        check_sides(self)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineArgs":
        """Create the options from keyword arguments such as `LLM`'s. Raises a `UserError` for an unknown option or an invalid value."""
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(options.keys() - set(names))
        if unknown:
            raise UserError(f"unknown engine option {', '.join(unknown)}; the options are {', '.join(names)}")
        return cls(**options)

    @property
    def num_devices(self) -> int:
        """Number of devices of this engine's meshes, without experts in other processes; of an expert process, its own devices."""
        from sharding.mesh import MeshSpec

        if self.separated:
            return sum(MeshSpec.parse(mesh).num_devices for mesh in (self.decode_mesh, self.prefill_mesh))
        if self.afd_role == "expert":
            return expert_share(self).devices
        num_devices = MeshSpec.parse(self.mesh).num_devices
        if self.expert_mesh is not None and self.afd_role != "attention":
            num_devices += expert_spec(self).num_devices
        return num_devices

    def page_size_of(self, config: ModelConfig) -> int:
        """Return the number of tokens per page."""
        return self.page_size or default_page(config)

    @property
    def executor_options(self) -> dict[str, Any]:
        """The options that an executor depends on. `EngineArgs` made from them produce an equal executor."""
        values = dataclasses.asdict(self)
        return {name: values[name] for name in EXECUTOR_OPTIONS}

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`; None without speculative decoding. Raises the errors of `JsonOption.parse`."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def chunk_tokens(self) -> int:
        """Maximum number of tokens of one prompt per step."""
        return self.prefill_chunk or min(PREFILL_CHUNK, self.max_num_batched_tokens)

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a request per step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    def scheduler_config(self, limits: ExecutorLimits) -> SchedulerConfig:
        """Return the scheduler config for an executor with these options."""
        return SchedulerConfig.from_limits(
            limits,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.scheduling_policy,
            prefix_caching=self.enable_prefix_caching,
            speculation=self.speculation,
            num_batches=limits.num_stages if self.async_scheduling else 1,
        )


EXECUTOR_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(EngineArgs)
    if not (field.metadata.get("host_only") or field.metadata["group"] is Group.HOSTS)
)
"""Names of the options that an executor depends on. A dry run has the same options."""
