"""Parts of a deployment that the planner prices, and parts that `dsjax serve` has: what only one side knows is named here.

`tests/dsjax/plan/test_engine_credits.py` holds the table to the code: a name in it is an option of that side, and every option of either
side stands in a part, or in `QUESTION` or `RUNNING`, which hold what is no part of a deployment.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part. planner: options of `dsjax plan`, engine: of `dsjax serve`, by their field's name; empty where that side lacks it.

    note: how it is priced, or what follows from the gap.
    """

    name: str
    planner: tuple[str, ...]
    engine: tuple[str, ...]
    note: str

    @property
    def side(self) -> str:
        """Who has it."""
        if self.planner and self.engine:
            return "both"
        return "planner only" if self.planner else "engine only" if self.engine else "neither"


PARTS = (
    Part("layout", ("mesh",), ("mesh",), "every `dp`, `tp`, `ep`; `etp` where it is given"),
    Part(
        "prefill apart from decode",
        ("prefill_mesh", "decode_mesh", "prefill_instances", "decode_instances"),
        (
            "prefill_mesh",
            "decode_mesh",
            "disaggregation_mode",
            "disaggregation_transfer_backend",
            "local_prefill_tokens",
        ),
        "several instances of either need Dynamo",
    ),
    Part(
        "chunks of prompts",
        ("prefill_tokens",),
        ("max_num_batched_tokens", "prefill_chunk", "prefill_config"),
        "the best size is searched",
    ),
    Part(
        "redundant experts, placed by load",
        ("redundant_experts", "expert_skew"),
        (
            "redundant_experts",
            "prefill_config",
            "enable_eplb",
            "eplb_config",
            "init_expert_location",
            "ep_dispatch_algorithm",
        ),
        "the engine's own balancer places them in both; `--ep-dispatch-algorithm static` is not priced",
    ),
    Part(
        "co-activation of experts",
        (),
        ("init_expert_location",),
        "a placement that looks at pairs ([balancing.md](balancing.md)) is not priced",
    ),
    Part(
        "shared expert as a routed one",
        ("enable_shared_experts_fusion",),
        ("enable_shared_experts_fusion",),
        "its weights and rows",
    ),
    Part("drafts", ("mtp", "mtp_acceptance"), ("speculative_config",), "acceptance is yours, or fades as published"),
    Part(
        "cache and weights in fewer bits",
        ("kv_cache_dtype", "precision"),
        ("kv_cache_dtype", "weights"),
        "experts in four bits at the speed of units for them with `--engine published`, of bf16 for dsjax, which widens them",
    ),
    Part(
        "rows in fewer bits",
        (),
        ("activation_scheme",),
        "products of quantised rows have no price: those in four bits do not pay yet",
    ),
    Part(
        "tiers of the cache",
        ("working_set", "host_cache_gb", "disk_cache_gb"),
        ("host_cache_bytes", "disk_cache", "disk_cache_bytes"),
        "what comes back of a working set",
    ),
    Part("prefixes that come back", ("prefix_hit",), ("enable_prefix_caching",), "their share is given"),
    Part("planning a step ahead", ("host_scheduling",), ("async_scheduling",), ""),
    Part(
        "exchanges",
        ("dispatch", "moe_a2a_backend"),
        ("dispatch", "dispatch_wire", "devices_per_host"),
        "`deepep` is of other engines, and none at all of SGLang's",
    ),
    Part(
        "embedding in host memory",
        (),
        ("embedding_location",),
        "a plan's devices hold it: with it they have room for 1.85 GB more cache of V3",
    ),
    Part(
        "two half batches",
        ("two_batch_overlap",),
        ("enable_dbo", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        "of dsjax by the windows of its own program, of other engines by the published kernels",
    ),
    Part(
        "dispatch in chunks of tokens",
        ("compiled",),
        ("moe_chunk_tokens",),
        "saves memory, which a dry run with it counts; a plan's own step is in one",
    ),
    Part(
        "form of MLA",
        ("recipe",),
        ("mla_prefill", "mla_decode"),
        "a plan takes the faster one by published kernels and writes it into the recipe; the engine does not choose by itself",
    ),
    Part(
        "dense MLP or head by data",
        (),
        ("moe_dense_tp_size", "enable_dp_lm_head"),
        "a plan leaves them cut over `tp`; their bytes are in a dry run",
    ),
    Part(
        "kernels",
        ("compiled", "fp8_gemm_backend"),
        ("kernels", "kernel_config", "kernel_cache"),
        "published ones, or a dry run's program",
    ),
    Part(
        "batch invariance",
        (),
        ("batch_invariant",),
        "the same bits whatever the batch: slower, by how much no plan says",
    ),
    Part(
        "recovery",
        ("recipe",),
        ("wait_for_mesh_seconds", "heartbeat_timeout", "compile_ahead"),
        "`recovery` of a recipe",
    ),
    Part(
        "front ends for a rate of tokens",
        ("recipe",),
        (),
        "by measured processor times; `--api-server-count` is of the server, and no option of the engine",
    ),
    Part(
        "whether it fits",
        ("fit", "memory_fraction"),
        ("gpu_memory_utilization", "cache_tokens", "prefill_config", "max_model_len", "page_size"),
        "a verdict for four engines; the engine ends at its start, and `dsjax dryrun --fit` counts to the byte",
    ),
    Part("requests at once", ("max_concurrency",), ("max_num_seqs", "prefill_config"), "the best batch is searched"),
    Part(
        "when prompts are taken in",
        ("scheduler_recv_interval",),
        (),
        "of SGLang, in a simulation; dsjax looks for prompts before every step",
    ),
    Part(
        "stages of layers",
        ("stages", "mesh"),
        ("mesh", "pp_layer_partition"),
        "`--mesh pp=2,tp=8`; aggregated alone ([pipeline.md](pipeline.md))",
    ),
    Part(
        "attention and experts on devices of their own",
        ("afd", "attention_mesh", "expert_mesh", "expert_device", "expert_hosts", "num_afd_stages"),
        ("attention_mesh", "expert_mesh", "afd_role", "afd_address", "afd_server_rank", "num_afd_stages"),
        "looked for with `--afd` ([below](#attention-and-experts-apart))",
    ),
)

SUBCOMMANDS = ("fit", "recipe")
"""Subcommands of `dsjax plan` that stand in the table as options do."""
QUESTION = (
    "model", "cluster", "hosts", "input_tokens", "output_tokens", "classes", "slo", "ttft_ms", "tpot_ms", "throughput", "measured",
    "network", "engine", "operators", "mode", "batch", "context", "max_devices", "max_devices_per_instance", "price_per_hour", "explain",
    "sweep", "num_prompts", "request_rate", "warmup", "random_range_ratio", "burstiness", "seed", "rows", "pareto",
    "plots", "json_file",
)  # fmt: skip
"""Options of `dsjax plan` that say what is asked, on which grounds, and how the answer is given."""
RUNNING = (
    "model", "revision", "dtype", "page_source", "kv_events_config", "scheduling_policy", "stream_interval", "seed", "record_steps",
    "record_steps_bytes", "transfer_timeout", "transfer_host", "coordinator_address", "num_processes", "process_id", "host_address",
    "start_timeout", "link_monitor_interval", "cluster_key_file", "encrypt_bulk",
)  # fmt: skip
"""Options of `dsjax serve` that say what is served, between whom, and what is recorded: no plan's figure hangs on them."""


def sides_table() -> str:
    """Markdown: each part, who has it, and by which options."""
    lines = ["| part | who | planner | engine | |", "|---|---|---|---|---|"]
    for part in PARTS:
        cells = (", ".join(f"`{_flag(name)}`" for name in names) or "–" for names in (part.planner, part.engine))
        lines.append(f"| {part.name} | {part.side} | {' | '.join(cells)} | {part.note} |")
    return "\n".join(lines)


def _flag(field: str) -> str:
    return f"plan {field}" if field in SUBCOMMANDS else f"--{field.replace('_', '-')}"
