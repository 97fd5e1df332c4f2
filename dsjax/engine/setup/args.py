"""`EngineArgs`: every option of an engine, once, for `LLM(...)`, `dsjax serve` and `dsjax generate` alike."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.config.weights import ROW_FORMATS, SERVED
from dsjax.engine.afd.options import ApartOptions, check_apart, expert_share, expert_spec
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.experts.eplb import ExpertOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.combinations import check_combinations
from dsjax.engine.setup.side_options import SideOptions, check_sides, check_sizes
from dsjax.engine.text.prompt_encoder import TOKENIZER_MODES
from dsjax.engine.tiers.options import TierOptions
from dsjax.errors import UserError
from dsjax.hosts.options import GroupOptions
from dsjax.model.forms import FORMS
from dsjax.options import flag_of, option

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
INDEX_SCORES = ("float", "hadamard", "fp8", "hadamard_fp8")
MLA_FORMS = tuple(FORMS)


@dataclass(frozen=True, kw_only=True)
class BasicOptions:
    """What is asked of every engine: the model, how it is computed, and how much of it at once."""

    model: str = option(
        "demo",
        "bundled name, directory with config.json and weights, Orbax directory of ours, or Hugging Face repository id",
    )
    mesh: str = option(
        "dp=1",
        "devices as axis=size pairs: dp (replicas), tp (devices of each), ep (groups that experts are spread over; default dp × tp ÷ etp), "
        "etp (devices of a group, which share its experts' widths; default 1, or tp where ep is no multiple of it), pp (stages, each with "
        "a run of the layers on dp × tp devices of its own; default 1)",
    )
    pp_layer_partition: str | None = option(
        None,
        "layers of each stage of a --mesh with pp, such as 31,30; default: so that the fullest stage has as little work as can be",
    )
    revision: str | None = option(None, "branch, tag or commit of a model that is downloaded")
    tokenizer: str | None = option(
        None, "directory of another tokenizer than the model's; default: the model's own", of_host=True
    )
    tokenizer_mode: str = option(
        "auto",
        "how conversations become prompts; hf: by the chat template; deepseek_v32, deepseek_v4: as those models' own encoders do; auto: by "
        "the template, and without one by the encoder of the model's type",
        choices=TOKENIZER_MODES,
        of_host=True,
    )
    chat_template: str | None = option(None, "file of a Jinja template to use instead of the model's", of_host=True)
    dtype: str = option(
        "auto", "of computation; auto: the checkpoint's, float32 on CPU", choices=("auto", "float32", "bfloat16")
    )
    weights: str = option(
        "auto",
        "auto: in dtype; fp8: FP8 weights stay FP8 in memory; others: routed experts are kept in the format of that name, beside other "
        "matrices in FP8, or with -bf16 in bfloat16",
        choices=("auto", *SERVED),
    )
    activation_scheme: str = option(
        "auto",
        "for quantised weights; dynamic: activations are quantised to FP8, 1 × 128, and multiplied so; a format of experts: rows of routed "
        "experts to that, and with other matrices in FP8 theirs as dynamic; none: weights are widened to dtype; auto: dynamic with FP8 "
        "weights on GPUs that multiply FP8, else none",
        choices=("auto", "dynamic", *ROW_FORMATS, "none"),
    )
    kv_cache_dtype: str = option(
        "auto", "of the latent cache; auto: as dtype; fp8: latents in FP8 with scales", choices=KV_CACHE_DTYPES
    )
    max_model_len: int | None = option(None, "longest prompt + output; default: the model's maximum", least=1)
    max_num_seqs: int | None = option(
        None, "most running requests of a DP rank; default: 256 over all ranks, at least 8 on each", least=1
    )
    max_num_batched_tokens: int = option(2048, "most tokens of a DP rank in one step", least=1)
    prefill_chunk: int = option(256, "most tokens of one prompt in one step", least=1)
    page_size: int = option(16, "token slots of a page of the latent cache", least=1)
    cache_tokens: int | None = option(
        None,
        "token slots of a DP rank's cache, in whole pages; default: all that --max-num-seqs can use, if memory allows",
        least=1,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of an accelerator's memory for weights, cache and what a step needs beside them, from above 0 to 1",
        alias="--mem-fraction-static",
    )
    scheduling_policy: str = option("fcfs", "order of waiting requests", choices=("fcfs", "priority"), of_host=True)
    async_scheduling: bool = option(True, "plan a step while the one before computes", of_host=True)
    enable_prefix_caching: bool = option(
        True, "share the cache's pages between requests that begin alike", of_host=True
    )
    dispatch: str = option(
        "auto",
        "how tokens reach their experts",
        choices=("auto", "gather", "padded", "ragged", "hierarchical"),
        classes=True,
    )
    router: type | None = option(
        None,
        "class of the routers, which inherits dsjax.model.router.ExpertRouter; default: the model's",
        classes=True,
    )
    devices_per_host: int | None = option(
        None,
        "neighbours in the mesh that fast links join, for --dispatch auto and hierarchical and --ep-dispatch-algorithm static; default: "
        "those of a slice as JAX tells it (GPUs of a host or of one NVLink domain, chips that ICI joins), on a CPU those of a process, of "
        "a dry run those that its target's links join",
        least=1,
    )
    dispatch_wire: str = option(
        "compute", "what tokens are sent as: in dtype, or FP8 with a scale per 128 values", choices=("compute", "fp8")
    )
    moe_chunk_tokens: int | None = option(None, "most tokens of a rank dispatched at once; bounds buffers", least=1)
    enable_dbo: bool = option(
        False,
        "compute a large step in two halves (dual-batch overlap), so that one half's rows travel while the other computes; for "
        "accelerators, where exchanges run beside computation",
        alias="--enable-two-batch-overlap",
    )
    dbo_decode_token_threshold: int = option(
        32, "least tokens of a rank, of a step of decodes, for --enable-dbo", least=1
    )
    dbo_prefill_token_threshold: int = option(512, "the same, of a step with prompts", least=1)
    mla_prefill: str | None = option(
        None,
        "MLA form of prompts; default: CC, and with --batch-invariant that of decodes",
        choices=MLA_FORMS,
        classes=True,
    )
    mla_decode: str = option("A_CC_ME", "MLA form of decodes", choices=MLA_FORMS, classes=True)
    index_scores: str = option(
        "float",
        "of models with sparse attention, what index queries and keys go through before they are multiplied: a Hadamard rotation, rounding "
        "to FP8, both as DeepSeek's own code has it, or nothing",
        choices=INDEX_SCORES,
    )
    kernels: str = option(
        "auto",
        "auto: the fastest that the platform has; plain: the JAX forms that define them; native: C++ on CPU; "
        "pallas: Triton on GPU, Mosaic on TPU",
        choices=("auto", "plain", "native", "pallas"),
    )
    batch_invariant: bool = option(
        False,
        "compute prompts in the MLA form of decodes, so that a token has the same bits as prompt and as answer, also where a prompt finds "
        "earlier answers in the prefix cache; prompts take longer. On CPUs, in float32 with native kernels, batches, chunks and meshes "
        "change no bit without it; on GPUs and TPUs it takes kernels with the same tiles for every shape; the start names exceptions",
    )
    kernel_cache: str | None = option(
        None,
        "folder of native kernels that dsjax kernels build made; default: built at first start, kept with compiled programs",
    )
    kernel_config: str | None = option(
        None, "file of tile sizes of the Pallas kernels that dsjax tune made; default: reckoned from shapes"
    )
    ep_dispatch_algorithm: str = option(
        "dynamic",
        "to which copy of an expert a token goes; dynamic: to all in turn; static: to those on its own DP rank, else on its host, in turn",
        choices=("dynamic", "static"),
    )
    enable_shared_experts_fusion: bool = option(
        False, "the shared expert is one more routed expert, with a copy on each device: one grouped product"
    )
    moe_dense_tp_size: int | None = option(None, "1: dense MLPs whole on each of tp devices, by tokens", least=1)
    enable_dp_lm_head: bool = option(False, "the head whole on each of tp devices, by positions, not by vocabulary")
    embedding_location: str = option(
        "device",
        "where the embedding lies; host: in host memory, from which a step fetches its tokens' rows, so that devices have more cache",
        choices=("device", "host"),
    )
    stream_interval: int = option(
        1,
        "tokens after which a stream is sent its next piece; its first token and its end are sent at once. More costs less of the "
        "processor, and comes in larger pieces",
        least=1,
        of_host=True,
    )
    seed: int = option(0, "from which requests without a seed draw theirs", least=0, of_host=True)
    speculative_config: str | dict[str, Any] | None = option(
        None,
        'draft tokens with the model\'s MTP module: JSON such as \'{"method": "mtp", "num_speculative_tokens": 2}\'; '
        "default: no drafts",
    )
    record_steps: str | None = option(
        None,
        "new file to which every step's command and results are written, for dsjax replay; it holds token ids",
        of_host=True,
    )
    record_steps_bytes: int = option(
        256 * 2**20, "most bytes of that file; the recording ends there", least=1, of_host=True
    )


@dataclass(frozen=True, kw_only=True)
class EngineArgs(
    GroupOptions, SideOptions, ExpertOptions, TierOptions, ApartOptions, BasicOptions
):  # `--help` lists the last base first
    """The options of an engine, named as vLLM names them where it has them. Checked when made; sizes are per DP rank."""

    compile_ahead: int = option(
        1,
        "compile in the background, while serving, for the meshes that are left when up to so many processes are gone; 0: for none",
        least=0,
        of_host=True,
    )
    wait_for_mesh_seconds: int = option(
        600,
        "seconds that an accepted request which a smaller mesh cannot hold waits for a larger one; 0: it ends at once with an error",
        least=0,
        of_host=True,
    )
    link_monitor_interval: int = option(
        10,
        "seconds between two looks at the links to the other processes, for /metrics; 0: none",
        least=0,
        of_host=True,
    )

    def __post_init__(self):
        if self.mla_prefill is None:
            object.__setattr__(self, "mla_prefill", self.mla_decode if self.batch_invariant else "CC")
        for field in dataclasses.fields(self):
            if field.name not in ("speculative_config", "eplb_config", "kv_events_config", "prefill_config"):
                _check(field, getattr(self, field.name))
        for name in ("speculation", "eplb", "num_redundant", "kv_events", "prefill"):
            getattr(self, name)  # a wrong one is refused here
        check_sizes(self)
        check_combinations(self)
        check_apart(self)
        if self.attention_mesh is not None:
            object.__setattr__(self, "mesh", self.attention_mesh)
        check_sides(self)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineArgs":
        """Make the options from keyword arguments such as `LLM`'s; a `UserError` for an unknown option or a wrong value."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise UserError(f"unknown engine option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**options)

    @property
    def num_devices(self) -> int:
        """Devices of all meshes together."""
        from sharding.mesh import MeshSpec

        if not self.separated:
            if self.afd_role == "expert":
                return expert_share(self).devices
            experts = expert_spec(self)
            beside = experts.num_devices if experts and self.afd_role != "attention" else 0
            return beside + MeshSpec.parse(self.mesh).num_devices
        return sum(MeshSpec.parse(mesh).num_devices for mesh in (self.decode_mesh, self.prefill_mesh))

    @property
    def executor_options(self) -> dict[str, Any]:
        """The options that an executor depends on, from which `EngineArgs` makes an equal one."""
        of_host = {field.name for field in dataclasses.fields(self) if field.metadata.get("of_host")}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in of_host}

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, read; None where nothing is drafted. Raises as `JsonOption.parse`."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in one step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    def scheduler_config(self, limits: ExecutorLimits) -> SchedulerConfig:
        """Give the scheduler's sizes for an executor made from these options."""
        return SchedulerConfig.from_limits(
            limits,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.scheduling_policy,
            prefix_caching=self.enable_prefix_caching,
            speculation=self.speculation,
            num_batches=limits.num_stages if self.async_scheduling else 1,
        )


def _check(field: dataclasses.Field, value: Any) -> None:
    choices, least = field.metadata.get("choices"), field.metadata.get("least")
    if field.metadata.get("classes") and isinstance(value, type):
        return  # what it must inherit is checked where it is used
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    left_out = value is None and field.default is None
    if isinstance(field.default, bool):
        is_right, expected = isinstance(value, bool), "True or False"
    elif isinstance(field.default, float):
        is_right, expected = is_number and 0 < value <= 1, "a number above 0 and at most 1"
    elif choices is not None:
        is_right, expected = value in choices, f"one of {', '.join(choices)}"
    elif least is not None:
        is_right = left_out or (is_number and isinstance(value, int) and value >= least)
        expected = f"an integer of at least {least}"
    elif field.metadata.get("classes"):
        is_right, expected = left_out, "a class"
    else:
        is_right, expected = left_out or isinstance(value, str), "text"
    if not is_right:
        raise UserError(f"{flag_of(field)} is {value!r}, expected {expected}")
