"""`EngineArgs`: all engine options, shared by `LLM(...)`, `dsjax serve` and `dsjax generate`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.config import ModelConfig
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
from dsjax.model.sparse.precision import INDEX_SCORES
from dsjax.options import Group, advanced, option

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
MLA_FORMS = tuple(FORMS)
PREFILL_CHUNK = 256
"""Default of `--prefill-chunk`, in tokens."""


@dataclass(frozen=True, kw_only=True)
class BasicOptions:
    """Options of every engine: the model, its numerics and kernels, and batch and cache sizes."""

    model: str = option("demo", "Bundled name, Hugging Face repository, or folder with weights.", Group.MODEL)
    revision: str | None = option(None, "Branch, tag or commit to download.", Group.MODEL)
    tokenizer: str | None = advanced(None, "Folder of another tokenizer than the model's.", Group.MODEL, of_host=True)
    tokenizer_mode: str = advanced(
        "auto",
        "How conversations become prompts. hf: by the chat template; deepseek_v32, deepseek_v4: by that model's own encoder; auto: by the "
        "template, or else by the encoder of the model's type.",
        Group.MODEL,
        choices=TOKENIZER_MODES,
        of_host=True,
    )
    chat_template: str | None = option(None, "Jinja template in place of the model's.", Group.MODEL, of_host=True)
    max_model_len: int | None = option(None, "Longest prompt + output; default: the model's.", Group.MODEL, least=1)
    dtype: str = option(
        "auto", "auto: the checkpoint's, float32 on CPU.", Group.MODEL, choices=("auto", "float32", "bfloat16")
    )
    seed: int = advanced(0, "For requests without a seed of their own.", Group.MODEL, least=0, of_host=True)
    weights: str = option(
        "auto",
        "auto: in --dtype; fp8: keep FP8 weights in FP8; others: keep routed experts in that format, other matrices in FP8 (-bf16: in "
        "bfloat16).",
        Group.QUANTIZATION,
        choices=("auto", *SERVED),
    )
    activation_scheme: str = advanced(
        "auto",
        "For quantised weights. dynamic: quantise activations to FP8 in blocks of 1 × 128; a format of experts: quantise rows of routed "
        "experts to it, others as dynamic; none: widen weights to --dtype; auto: dynamic for FP8 weights on GPUs that multiply FP8, else "
        "none.",
        Group.QUANTIZATION,
        choices=("auto", "dynamic", *ROW_FORMATS, "none"),
    )
    mesh: str = option(
        "dp=1",
        "Devices by axis, such as dp=4,tp=8. dp: DP ranks; tp: devices of each; pp: stages of dp × tp devices; ep: groups that experts are "
        "spread over (default dp × tp ÷ etp); etp: devices that split each expert (default 1, or tp where ep is no multiple of it).",
        Group.MESH,
    )
    pp_layer_partition: str | None = advanced(
        None, "Layers of each stage, such as 31,30; default: balanced.", Group.MESH
    )
    moe_dense_tp_size: int | None = advanced(
        None, "1: dense MLPs whole on each tp device, split by tokens.", Group.MESH, least=1
    )
    enable_dp_lm_head: bool = advanced(False, "The LM head whole on each tp device, split by positions.", Group.MESH)
    dispatch: str = option(
        "auto",
        "How tokens reach their experts.",
        Group.EXPERTS,
        choices=("auto", "gather", "padded", "ragged", "hierarchical"),
        classes=True,
    )
    router: type | None = option(None, "class of the routers, an ExpertRouter; default: the model's", classes=True)
    devices_per_host: int | None = advanced(
        None,
        "Neighbours in the mesh that fast links join, for --dispatch auto and hierarchical and --ep-dispatch-algorithm static; default: a "
        "slice as JAX reports it (GPUs of a host or NVLink domain, chips joined by ICI), on a CPU a process, in a dry run what its "
        "target's links join.",
        Group.EXPERTS,
        least=1,
    )
    dispatch_wire: str = advanced(
        "compute", "Send tokens in --dtype (compute) or FP8.", Group.EXPERTS, choices=("compute", "fp8")
    )
    moe_chunk_tokens: int | None = advanced(None, "Most tokens of a rank dispatched at once.", Group.EXPERTS, least=1)
    ep_dispatch_algorithm: str = advanced(
        "dynamic",
        "Which copy of an expert gets a token. dynamic: all in turn; static: those on its DP rank, else on its host, in turn.",
        Group.EXPERTS,
        choices=("dynamic", "static"),
    )
    enable_shared_experts_fusion: bool = advanced(
        False, "Compute the shared expert as a routed one, with a copy on each device.", Group.EXPERTS
    )
    enable_dbo: bool = option(
        False, "Two-batch overlap: send one half of a step while the other is computed.", Group.EXPERTS
    )
    dbo_decode_token_threshold: int = advanced(
        32, "Least tokens of a rank's decode step, for --enable-dbo.", Group.EXPERTS, least=1
    )
    dbo_prefill_token_threshold: int = advanced(512, "The same, of a step with prompts.", Group.EXPERTS, least=1)
    gpu_memory_utilization: float = option(
        0.9, "Share of an accelerator's memory to use.", Group.CACHE, above=0, most=1
    )
    kv_cache_dtype: str = option("auto", "auto: as --dtype; fp8: with scales.", Group.CACHE, choices=KV_CACHE_DTYPES)
    cache_tokens: int | None = option(
        None, "Tokens of a DP rank's KV cache; default: by --max-num-seqs and memory.", Group.CACHE, least=1
    )
    page_size: int | None = option(
        None, "Tokens of a page (block) of the KV cache; default: 16, or 128 of a DeepSeek-V4.", Group.CACHE, least=1
    )
    enable_prefix_caching: bool = option(True, "Share pages of equal prefixes.", Group.CACHE, of_host=True)
    embedding_location: str = advanced(
        "device",
        "host: keep the embedding in host memory and fetch the rows of each step's tokens, which leaves devices more cache.",
        Group.CACHE,
        choices=("device", "host"),
    )
    max_num_seqs: int | None = option(
        None, "Running requests of a DP rank; default: 256 ÷ ranks, at least 8.", Group.SCHEDULING, least=1
    )
    max_num_batched_tokens: int = option(2048, "Most tokens of a DP rank in one step.", Group.SCHEDULING, least=1)
    prefill_chunk: int | None = option(
        None,
        f"Most tokens of one prompt in one step; default: {PREFILL_CHUNK}, or --max-num-batched-tokens if that is less.",
        Group.SCHEDULING,
        least=1,
    )
    scheduling_policy: str = option(
        "fcfs", "Order of waiting requests.", Group.SCHEDULING, choices=("fcfs", "priority"), of_host=True
    )
    async_scheduling: bool = advanced(True, "Plan a step while the previous one runs.", Group.SCHEDULING, of_host=True)
    stream_interval: int = advanced(
        1,
        "Tokens in each piece of a stream; the first token and the end are sent at once. More takes less processor time.",
        Group.SCHEDULING,
        least=1,
        of_host=True,
    )
    speculative_config: str | dict[str, Any] | None = option(
        None, """Draft with the MTP module: '{"method": "mtp", "num_speculative_tokens": 2}'.""", Group.SPECULATION
    )
    kernels: str = option(
        "auto",
        "auto: the platform's fastest; plain: JAX alone; native: C++ on CPU; pallas: Triton on GPU, Mosaic on TPU.",
        Group.KERNELS,
        choices=("auto", "plain", "native", "pallas"),
    )
    batch_invariant: bool = option(
        False,
        "Give a token the same bits as prompt and as answer, also where the prefix cache has an earlier answer (CPUs, float32).",
        Group.KERNELS,
    )
    mla_prefill: str | None = advanced(
        None,
        "MLA form of prompts; default: CC, and with --batch-invariant that of decodes.",
        Group.KERNELS,
        choices=MLA_FORMS,
        classes=True,
    )
    mla_decode: str = advanced("A_CC_ME", "MLA form of decodes.", Group.KERNELS, choices=MLA_FORMS, classes=True)
    index_scores: str = advanced(
        "float",
        "Sparse attention's scores. float: in --dtype, as Transformers; else rotate queries and keys, then round them to the format that "
        "DeepSeek's code has for the model.",
        Group.KERNELS,
        choices=INDEX_SCORES,
    )
    kernel_cache: str | None = advanced(
        None, "From dsjax kernels build; default: built at the first start.", Group.KERNELS
    )
    kernel_config: str | None = advanced(None, "Pallas tile sizes from dsjax tune; default: by formula.", Group.KERNELS)
    record_steps: str | None = advanced(
        None, "New file for every step, for dsjax replay; it holds token ids.", Group.KERNELS, of_host=True
    )


@dataclass(frozen=True, kw_only=True)
class EngineArgs(
    GroupOptions, SideOptions, ExpertOptions, TierOptions, ApartOptions, BasicOptions
):  # `--help` lists the last base first
    """The options of an engine, with vLLM's names where vLLM has the option. Validated at construction; sizes are per DP rank."""

    compile_ahead: int = advanced(
        1, "Lost processes whose smaller meshes are compiled beforehand; 0: none.", Group.HOSTS, least=0
    )
    wait_for_mesh_seconds: int = advanced(
        600, "Seconds that a request too long for a reduced mesh waits; 0: fail it at once.", Group.HOSTS, least=0
    )
    link_monitor_interval: int = advanced(
        10, "Seconds between probes of links, for /metrics; 0: none.", Group.HOSTS, least=0
    )

    def __post_init__(self):
        if self.mla_prefill is None:
            object.__setattr__(self, "mla_prefill", self.mla_decode if self.batch_invariant else "CC")
        super().__post_init__()
        for name in ("speculation", "eplb", "num_redundant", "kv_events", "prefill"):
            getattr(self, name)  # raises if the value is invalid
        check_sizes(self)
        check_combinations(self)
        check_apart(self)
        if self.attention_mesh is not None:
            object.__setattr__(self, "mesh", self.attention_mesh)
        check_sides(self)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineArgs":
        """Create the options from keyword arguments such as `LLM`'s. Raises a `UserError` for an unknown option or an invalid value."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise UserError(f"unknown engine option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**options)

    @property
    def num_devices(self) -> int:
        """Total number of devices of all meshes."""
        from sharding.mesh import MeshSpec

        if not self.separated:
            if self.afd_role == "expert":
                return expert_share(self).devices
            experts = expert_spec(self)
            beside = experts.num_devices if experts and self.afd_role != "attention" else 0
            return beside + MeshSpec.parse(self.mesh).num_devices
        return sum(MeshSpec.parse(mesh).num_devices for mesh in (self.decode_mesh, self.prefill_mesh))

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
    if not (field.metadata.get("of_host") or field.metadata["group"] is Group.HOSTS)
)
"""Names of the options that an executor depends on. A dry run has the same options."""
