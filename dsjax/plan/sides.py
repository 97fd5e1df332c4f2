"""Parts of a deployment that the planner prices, and parts that `dsjax serve` has: what only one side knows is named here.

`tests/dsjax/plan/test_engine_credits.py` holds both columns to the options that there are.
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
    Part("layout", ("mesh",), ("mesh",), "every `dp`, `tp`, `ep`"),
    Part(
        "prefill apart from decode",
        ("prefill_mesh", "decode_mesh", "prefill_instances", "decode_instances"),
        ("prefill_mesh", "decode_mesh", "disaggregation_mode", "disaggregation_transfer_backend"),
        "several instances of either need Dynamo",
    ),
    Part(
        "chunks of prompts",
        ("prefill_tokens",),
        ("max_num_batched_tokens", "prefill_chunk"),
        "the best size is searched",
    ),
    Part(
        "redundant experts, placed by load",
        ("redundant_experts", "expert_skew"),
        ("redundant_experts", "enable_eplb", "eplb_config", "init_expert_location"),
        "the engine's own balancer places them in both",
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
    Part("cache and weights in fewer bits", ("kv_cache_dtype", "precision"), ("kv_cache_dtype", "weights"), ""),
    Part(
        "tiers of the cache",
        ("working_set", "host_cache_gb", "disk_cache_gb"),
        ("host_cache_bytes", "disk_cache", "disk_cache_bytes"),
        "what comes back of a working set",
    ),
    Part("prefixes that come back", ("prefix_hit",), ("enable_prefix_caching",), "their share is given"),
    Part("planning a step ahead", ("host_scheduling",), ("async_scheduling",), ""),
    Part("exchanges", ("dispatch",), ("dispatch", "dispatch_wire", "devices_per_host"), "`deepep` is of other engines"),
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
        "priced with the published kernels; dsjax's own halves are not, and are no credit of it",
    ),
    Part("dispatch in chunks of tokens", (), ("moe_chunk_tokens",), "bounds a step's memory; a plan's step is in one"),
    Part(
        "form of MLA",
        (),
        ("mla_prefill", "mla_decode"),
        "a plan prices expanded prompts and absorbed decodes, the default",
    ),
    Part(
        "kernels",
        ("compiled",),
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
        ("recipe_file",),
        ("wait_for_mesh_seconds", "heartbeat_timeout", "compile_ahead"),
        "`recovery` of a recipe",
    ),
    Part("front ends for a rate", ("recipe_file",), (), "`--api-server-count` of the server, not of the engine"),
    Part(
        "stages of layers",
        ("stages", "mesh"),
        ("mesh", "pp_layer_partition"),
        "`--mesh pp=2,tp=8`; aggregated alone ([pipeline.md](pipeline.md))",
    ),
    Part(
        "attention and experts on devices of their own",
        (),
        ("attention_mesh", "expert_mesh"),
        "no plan has them apart ([attention-ffn-disaggregation.md](attention-ffn-disaggregation.md))",
    ),
)


def sides_table() -> str:
    """Markdown: each part, who has it, and by which options."""
    lines = ["| part | who | planner | engine | |", "|---|---|---|---|---|"]
    for part in PARTS:
        cells = (", ".join("`--" + _flag(name) + "`" for name in names) or "–" for names in (part.planner, part.engine))
        lines.append(f"| {part.name} | {part.side} | {' | '.join(cells)} | {part.note} |")
    return "\n".join(lines)


def _flag(field: str) -> str:
    return {"recipe_file": "recipe"}.get(field, field.replace("_", "-"))
