"""`EngineArgs`: every option of an engine, once, for `LLM(...)`, `dsjax serve` and `dsjax generate` alike."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.config.weights import ROW_FORMATS, SERVED
from dsjax.engine.afd.options import check_apart, expert_share, expert_spec
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.engine.pipeline.options import check_stages
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.side_options import PREFILLS_OWN, check_sides, check_sizes
from dsjax.engine.tiers.event_publisher import KvEventsConfig
from dsjax.engine.transfer.messages import TRANSFER_SECONDS
from dsjax.engine.transfer.transport import BACKENDS
from dsjax.errors import UserError
from dsjax.hosts.credentials import CredentialOptions

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8")
INDEX_SCORES = ("float", "hadamard", "fp8", "hadamard_fp8")
MLA_FORMS = ("CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME")


_OF_THE_HOST = (
    "scheduling_policy",
    "async_scheduling",
    "enable_prefix_caching",
    "seed",
    "stream_interval",
    "record_steps",
    "record_steps_bytes",
    "coordinator_address",
    "num_processes",
    "process_id",
    "host_address",
    "start_timeout",
    "heartbeat_timeout",
    "link_monitor_interval",
    "cluster_key_file",
    "cluster_tls_cert",
    "cluster_tls_key",
    "cluster_tls_ca",
    "compile_ahead",
    "wait_for_mesh_seconds",
    "kv_events_config",
    "prefill_mesh",
    "decode_mesh",
    *(f"prefill_{name}" for name in PREFILLS_OWN),
    "local_prefill_tokens",
    "transfer_timeout",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "transfer_host",
    "afd_role",
    "afd_address",
    "afd_server_rank",
)
"""Options that change which commands an executor gets, and not what it makes of them; or that are another engine's."""


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    least: int | None = None,
    alias: str | None = None,
) -> Any:
    """Declare a field that the command line shows with this help, and that `EngineArgs` checks against choices or least value.

    alias: another flag for it on the command line.
    """
    metadata = {"help": help, "choices": choices, "least": least, "alias": alias}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The options of an engine, named as vLLM names them where it has them. Checked when made; sizes are per DP rank."""

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
    attention_mesh: str | None = option(
        None,
        "devices that have everything but the routed experts, such as dp=8 or dp=4,tp=2; with --expert-mesh, in place of --mesh",
    )
    expert_mesh: str | None = option(
        None, "devices beside these that have the routed experts and nothing else, such as ep=24; with --attention-mesh"
    )
    afd_role: str = option(
        "both",
        "with --expert-mesh; both: both sides are in this process; attention: this one calls the experts at --afd-address; expert: it has "
        "the experts, and answers at --afd-address",
        ("both", "attention", "expert"),
    )
    afd_address: str | None = option(
        None,
        "HOST:PORT at which the process with --afd-role expert listens; several, separated by commas: of processes that share the expert "
        "devices, in equal parts and in this order",
    )
    afd_server_rank: int | None = option(
        None, "with --afd-role expert and several addresses: which of them is this process's, from 0 on", least=0
    )
    revision: str | None = option(None, "branch, tag or commit of a model that is downloaded")
    dtype: str = option(
        "auto", "of computation; auto: the checkpoint's, float32 on CPU", ("auto", "float32", "bfloat16")
    )
    weights: str = option(
        "auto",
        "auto: in dtype; fp8: FP8 weights stay FP8 in memory; others: routed experts are kept in the format of that name, beside other "
        "matrices in FP8, or with -bf16 in bfloat16",
        ("auto", *SERVED),
    )
    activation_scheme: str = option(
        "auto",
        "for quantised weights; dynamic: activations are quantised to FP8, 1 × 128, and multiplied so; a format of experts: rows of routed "
        "experts to that, and with other matrices in FP8 theirs as dynamic; none: weights are widened to dtype; auto: dynamic with FP8 "
        "weights on GPUs that multiply FP8, else none",
        ("auto", "dynamic", *ROW_FORMATS, "none"),
    )
    kv_cache_dtype: str = option(
        "auto", "of the latent cache; auto: as dtype; fp8: latents in FP8 with scales", KV_CACHE_DTYPES
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
    host_cache_bytes: int = option(
        0,
        "host memory of all DP ranks together that evicted pages of the prefix cache go to, and come back from; 0: none",
        least=0,
    )
    disk_cache: str | None = option(
        None,
        "folder for pages that leave the cache, which survive a restart: empty, or not there yet, or of an earlier run; nobody else may "
        "write in it; one server at a time; with --disk-cache-bytes",
    )
    disk_cache_bytes: int = option(
        0, "most bytes of all pages in that folder, those of earlier runs and other models included", least=0
    )
    page_source: str | None = option(
        None,
        "module of a further page source, such as my_package.kept_pages: a place where pages of the cache exist beside the devices",
    )
    kv_events_config: str | dict[str, Any] | None = option(
        None,
        "publish which pages are stored and removed, as vLLM does: JSON such as "
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}\'; needs pyzmq',
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of an accelerator's memory for weights, cache and what a step needs beside them, from above 0 to 1",
        alias="--mem-fraction-static",
    )
    scheduling_policy: str = option("fcfs", "order of waiting requests", ("fcfs", "priority"))
    async_scheduling: bool = option(True, "plan a step while the one before computes")
    enable_prefix_caching: bool = option(True, "share the cache's pages between requests that begin alike")
    dispatch: str = option(
        "auto", "how tokens reach their experts", ("auto", "gather", "padded", "ragged", "hierarchical")
    )
    devices_per_host: int | None = option(
        None,
        "neighbours in the mesh that fast links join, for --dispatch auto and hierarchical and --ep-dispatch-algorithm static; default: "
        "those of a slice as JAX tells it (GPUs of a host or of one NVLink domain, chips that ICI joins), on a CPU those of a process, of "
        "a dry run those that its target's links join",
        least=1,
    )
    dispatch_wire: str = option(
        "compute", "what tokens are sent as: in dtype, or FP8 with a scale per 128 values", ("compute", "fp8")
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
        None, "MLA form of prompts; default: CC, and with --batch-invariant that of decodes", MLA_FORMS
    )
    mla_decode: str = option("A_CC_ME", "MLA form of decodes", MLA_FORMS)
    index_scores: str = option(
        "float",
        "of models with sparse attention, what index queries and keys go through before they are multiplied: a Hadamard rotation, rounding "
        "to FP8, both as DeepSeek's own code has it, or nothing",
        INDEX_SCORES,
    )
    kernels: str = option(
        "auto",
        "auto: the fastest that the platform has; plain: the JAX forms that define them; native: C++ on CPU; "
        "pallas: Triton on GPU, Mosaic on TPU",
        ("auto", "plain", "native", "pallas"),
    )
    batch_invariant: bool = option(
        False,
        "a token's numbers are the same to the bit in a prompt and in a decode, in every batch, chunk and mesh: prompts are computed in "
        "the form of decodes. On CPUs in float32 with native kernels; on GPUs and TPUs with kernels whose tiles are the same for every "
        "shape, but for what the start names",
    )
    kernel_cache: str | None = option(
        None,
        "folder of native kernels that dsjax kernels build made; default: built at first start, kept with compiled programs",
    )
    kernel_config: str | None = option(
        None, "file of tile sizes of the Pallas kernels that dsjax tune made; default: reckoned from shapes"
    )
    redundant_experts: int = option(0, "physical experts beside the logical ones", least=0)
    ep_dispatch_algorithm: str = option(
        "dynamic",
        "to which copy of an expert a token goes; dynamic: to all in turn; static: to those on its own DP rank, else on its host, in turn",
        ("dynamic", "static"),
    )
    enable_shared_experts_fusion: bool = option(
        False, "the shared expert is one more routed expert, with a copy on each device: one grouped product"
    )
    enable_eplb: bool = option(False, "move and copy experts after their load while serving")
    eplb_config: str | dict[str, Any] | None = option(
        None,
        'how, with vLLM\'s names: JSON such as \'{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000, '
        '"log_balancedness": true, "max_bytes_per_step": 134217728, "payback": 1, "policy": "auto"}\'; with --enable-eplb',
    )
    init_expert_location: str | None = option(
        None,
        "file of experts' loads or places, as /dump_expert_distribution_record gives it: a start with experts already balanced",
    )
    moe_dense_tp_size: int | None = option(None, "1: dense MLPs whole on each of tp devices, by tokens", least=1)
    enable_dp_lm_head: bool = option(False, "the head whole on each of tp devices, by positions, not by vocabulary")
    embedding_location: str = option(
        "device",
        "where the embedding lies; host: in host memory, from which a step fetches its tokens' rows, so that devices have more cache",
        ("device", "host"),
    )
    stream_interval: int = option(
        1,
        "tokens after which a stream is sent its next piece; its first token and its end are sent at once. More costs less of the "
        "processor, and comes in larger pieces",
        least=1,
    )
    seed: int = option(0, "from which requests without a seed draw theirs", least=0)
    speculative_config: str | dict[str, Any] | None = option(
        None,
        'draft tokens with the model\'s MTP module: JSON such as \'{"method": "mtp", "num_speculative_tokens": 2}\'; '
        "default: no drafts",
    )
    record_steps: str | None = option(
        None,
        "new file to which every step's command and results are written, for tools/replay_steps.py; it holds token ids",
    )
    record_steps_bytes: int = option(256 * 2**20, "most bytes of that file; the recording ends there", least=1)
    prefill_mesh: str | None = option(
        None, "devices that compute prompts for those of --decode-mesh, which make the tokens; both in place of --mesh"
    )
    decode_mesh: str | None = option(None, "devices that make tokens; with --prefill-mesh")
    prefill_max_num_seqs: int | None = option(
        None,
        "most prompts under way on a DP rank of --prefill-mesh; default: as --max-num-seqs, or 256 over all ranks of that mesh, at least 8 "
        "on each",
        least=1,
    )
    prefill_max_num_batched_tokens: int | None = option(
        None, "most tokens of a DP rank of --prefill-mesh in one step; default: as --max-num-batched-tokens", least=1
    )
    prefill_prefill_chunk: int | None = option(
        None, "most tokens of one prompt in one step of --prefill-mesh; default: as --prefill-chunk", least=1
    )
    prefill_cache_tokens: int | None = option(
        None, "token slots of the cache of a DP rank of --prefill-mesh; default: as --cache-tokens", least=1
    )
    prefill_redundant_experts: int | None = option(
        None,
        "physical experts beside the logical ones on --prefill-mesh; default: as --redundant-experts, or as --eplb-config says",
        least=0,
    )
    local_prefill_tokens: int = option(
        64, "a prompt of which the decode side lacks fewer tokens is computed there", least=1
    )
    transfer_timeout: int = option(
        TRANSFER_SECONDS,
        "seconds after which the decode side computes pages itself that it has asked for and hears nothing of, and the prefill side drops "
        "pages that nobody takes",
        least=1,
    )
    disaggregation_mode: str = option(
        "agg",
        "agg: prompts are computed here; decode: in other processes, whose addresses come with the requests; prefill: for other processes",
        ("agg", "prefill", "decode"),
    )
    disaggregation_transfer_backend: str = option(
        "jax",
        "what moves pages between processes: JAX's transfer server, or NVIDIA's NIXL (pip install 'dsjax[nixl]'); the same on both sides",
        tuple(BACKENDS),
    )
    transfer_host: str | None = option(
        None,
        "address of this host at which the other side's engines reach it, and from which they pull pages; default: that of the group, or "
        "127.0.0.1",
    )
    coordinator_address: str | None = option(
        None,
        "HOST:PORT of process 0, for a mesh of several processes; default: what Slurm, Open MPI, GKE or LeaderWorkerSet say",
    )
    num_processes: int | None = option(None, "processes that the mesh's devices belong to", least=1)
    process_id: int | None = option(
        None, "which of them this is, from 0; process 0 has HTTP and the scheduler", least=0
    )
    host_address: str | None = option(
        None, "address that others reach this host at; default: that of the way to the coordinator"
    )
    start_timeout: int = option(300, "seconds in which all processes must have come", least=1)
    heartbeat_timeout: int = option(
        10, "seconds after which a process that gives no sign of life is taken for dead; the rest goes on", least=1
    )
    link_monitor_interval: int = option(
        10, "seconds between two looks at the links to the other processes, for /metrics; 0: none", least=0
    )
    cluster_key_file: str | None = option(
        None,
        "file with the secret that all processes of a deployment share, at least 32 characters; or the environment variable "
        "DSJAX_CLUSTER_KEY. Default: one made for this user, which serves the loopback interface alone",
    )
    cluster_tls_cert: str | None = option(
        None, "certificate of this process in PEM: connections between processes are encrypted, with TLS 1.3"
    )
    cluster_tls_key: str | None = option(None, "private key of that certificate")
    cluster_tls_ca: str | None = option(
        None, "certificate of the authority that those of all processes of the deployment come from"
    )
    compile_ahead: int = option(
        1,
        "compile in the background, while serving, for the meshes that are left when up to so many processes are gone; 0: for none",
        least=0,
    )
    wait_for_mesh_seconds: int = option(
        600,
        "seconds that an accepted request which a smaller mesh cannot hold waits for a larger one; 0: it ends at once with an error",
        least=0,
    )

    def __post_init__(self):
        if self.mla_prefill is None:
            object.__setattr__(self, "mla_prefill", self.mla_decode if self.batch_invariant else "CC")
        for field in dataclasses.fields(self):
            if field.name not in ("speculative_config", "eplb_config", "kv_events_config"):
                _check(field, getattr(self, field.name))
        _ = (
            self.speculation,
            self.eplb,
            self.num_redundant,
            self.kv_events,
            self.credentials,
        )  # wrong ones are refused here
        check_sizes(self)
        check_apart(self)
        if self.attention_mesh is not None:
            object.__setattr__(self, "mesh", self.attention_mesh)
        self._check_disk_cache()
        from sharding.mesh import MeshSpec  # brings JAX in, which importing this module must not

        meshes = (self.mesh, self.prefill_mesh, self.decode_mesh)
        check_stages(self, max(MeshSpec.parse(mesh).pp_size for mesh in meshes if mesh))
        check_sides(self)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineArgs":
        """Make the options from keyword arguments such as `LLM`'s.

        Raises:
            UserError: an unknown option, or a value that cannot be.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise UserError(f"unknown engine option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**options)

    @property
    def separated(self) -> bool:
        """Whether prompts are computed on other devices than tokens are made on."""
        return self.prefill_mesh is not None

    @property
    def is_side(self) -> bool:
        """Whether this engine is one side of two that hand pages over."""
        return self.disaggregation_mode != "agg"

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
    def credentials(self) -> CredentialOptions:
        """Where the cluster key and the certificates are."""
        return CredentialOptions(
            self.cluster_key_file, self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca
        )

    @property
    def executor_options(self) -> dict[str, Any]:
        """The options that an executor depends on, from which `EngineArgs` makes an equal one."""
        options = dataclasses.asdict(self)
        return {name: value for name, value in options.items() if name not in _OF_THE_HOST}

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, read; None where nothing is drafted.

        Raises:
            UserError: it is not JSON, or has fields or values that cannot be.
        """
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def eplb(self) -> EplbConfig | None:
        """`eplb_config`, read, or its defaults with `enable_eplb`; None where experts stay where they are.

        Raises:
            UserError: it is not JSON, or has fields or values that cannot be.
        """
        if not self.enable_eplb:
            if self.eplb_config is not None:
                raise UserError(
                    "--eplb-config is given without --enable-eplb; add it, or for experts that stay where they are use --redundant-experts"
                )
            return None
        return EplbConfig() if self.eplb_config is None else EplbConfig.parse(self.eplb_config)

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """`kv_events_config`, read; None where it is not given.

        Raises:
            UserError: it is not JSON, or has fields or values that cannot be.
        """
        if self.kv_events_config is None:
            return None
        config = KvEventsConfig.parse(self.kv_events_config)
        if config.publishes and not self.enable_prefix_caching:
            raise UserError(
                "--kv-events-config tells of the prefix cache's pages, and --no-enable-prefix-caching turns it off; leave one of them out"
            )
        return config

    @property
    def num_redundant(self) -> int:
        """Physical experts beside the logical ones, from whichever of the two options has them.

        Raises:
            UserError: both have, and they differ.
        """
        balanced = self.eplb.num_redundant_experts if self.eplb else None
        if balanced is not None and self.redundant_experts not in (0, balanced):
            raise UserError(
                f"--redundant-experts is {self.redundant_experts}, and num_redundant_experts in --eplb-config is {balanced}; "
                "give one of them"
            )
        return self.redundant_experts if balanced is None else balanced

    def _check_disk_cache(self) -> None:
        if self.disk_cache is None:
            if self.disk_cache_bytes:
                raise UserError("--disk-cache-bytes is given without --disk-cache; give the folder too")
            return
        if not self.disk_cache_bytes:
            raise UserError(
                "--disk-cache is given without --disk-cache-bytes; say how many bytes the pages in it may take"
            )
        if not self.enable_prefix_caching:
            raise UserError("--disk-cache keeps pages of the prefix cache, which --no-enable-prefix-caching turns off")
        if self.record_steps is not None:
            raise UserError(
                "--record-steps does not go with --disk-cache: a recording would lack what pages from the disk held; leave one of them out"
            )

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
    flag = f"--{field.name.replace('_', '-')}"
    choices, least = field.metadata["choices"], field.metadata["least"]
    if isinstance(field.default, bool):
        if not isinstance(value, bool):
            raise UserError(f"{flag} is {value!r}, expected True or False")
        return
    if isinstance(field.default, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise UserError(f"{flag} is {value!r}, expected a number above 0 and at most 1")
        return
    if choices is not None and value not in choices:
        raise UserError(f"{flag} is {value!r}, expected one of {', '.join(choices)}")
    if least is None:
        if choices is None and not (isinstance(value, str) or (value is None and field.default is None)):
            raise UserError(f"{flag} is {value!r}, expected text")
    elif value is None:
        if field.default is not None:
            raise UserError(f"{flag} is None, expected an integer of at least {least}")
    elif isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{flag} is {value!r}, expected an integer of at least {least}")
