"""The numbers of a configuration that a module's time hangs on: what the planner compares before it uses a file. No JAX."""

from __future__ import annotations

from dsjax.config import ModelConfig

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)


def widths(config: ModelConfig) -> dict[str, int | None]:
    """Hugging Face's names and values. Layers are not among them: they are counted, not timed."""
    return {name: getattr(config, name) for name in _FIELDS}
