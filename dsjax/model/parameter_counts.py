"""Parameter counts of a model, by component, in total and active per token. Plain arithmetic on `ModelConfig`.

The planner and `dsjax info` use these without building a model; a test compares them with the model's own table.
Letters as in `docs/glossary.md`.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind


def attention_parameters(config: ModelConfig, attention: str = "mla") -> int:
    """Parameters of one layer's attention with biases and indexer (V3: 187,107,328; V3.2: 201,066,752). attention: see `LayerKind`."""
    matrices, others, _ = config.attention.weights(attention, config.num_attention_heads, config.hidden_size, tp=1)
    total = sum(rows * columns for rows, columns in matrices) + others
    if config.attention_bias:
        mla = config.mla
        total += (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim + config.hidden_size
    return total


def residual_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the hyper-connections: of one layer (both blocks), and after the last layer. 0 if the residual is a plain sum."""
    if not config.streams:
        return 0, 0
    (streams,) = config.streams
    weights, width = (2 + streams) * streams, streams * config.hidden_size
    return 2 * (width * weights + weights + 3), width * streams + streams + 1


def layer_parameters(config: ModelConfig, kind: LayerKind, active: bool = False) -> int:
    """Parameters of one layer. active: count only the routed experts that one token uses."""
    total = attention_parameters(config, kind.attention) + 2 * config.hidden_size + residual_parameters(config)[0]
    if not kind.routed:
        return total + mlp_parameters(config, config.intermediate_size)
    experts = (config.num_experts_per_tok if active else config.n_routed_experts) + config.n_shared_experts
    selection = config.vocab_size * config.num_experts_per_tok if kind.mlp == "hash" else router_bias_parameters(config)
    return total + experts * expert_parameters(config) + router_parameters(config) + selection


def attention_matrices(config: ModelConfig, tp: int = 1, attention: str = "mla") -> tuple[list[tuple[int, int]], int]:
    """One device's shard of an attention layer: shapes `[in, out]` of the quantisable matrices, and the number of other parameters.

    tp: devices that share the heads; everything else is replicated. Biases are not counted, and each parameter that is always float32
    counts as two. attention: see `LayerKind`.
    """
    heads, width = config.num_attention_heads, config.hidden_size
    matrices, others, in_float32 = config.attention.weights(attention, heads, width, tp)
    return matrices, others + in_float32


def compressor_columns(config: ModelConfig, attention: str) -> int:
    """Return the output width of one layer's compressor projections (gates and values). attention: see `LayerKind`."""
    return sum(2 * series * entry for entry, series, _ in config.attention.compressors(attention))


def mlp_parameters(config: ModelConfig, hidden: int) -> int:
    """Parameters of a SwiGLU MLP with inner width `hidden`: gate, up, down."""
    return 3 * config.hidden_size * hidden


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one routed expert (V3: 44,040,192); 0 for a model without experts."""
    return mlp_parameters(config, config.moe_intermediate_size) if config.is_moe else 0


def router_parameters(config: ModelConfig) -> int:
    """Parameters of one router's matrix, without the correction bias (V3: 1,835,008)."""
    return config.n_routed_experts * config.hidden_size


def router_bias_parameters(config: ModelConfig) -> int:
    """Parameters of one router's correction bias; only `noaux_tc` has one (V3: 256)."""
    return config.n_routed_experts if config.topk_method == "noaux_tc" else 0


@functools.cache
def parameter_counts(config: ModelConfig) -> Mapping[str, int]:
    """Return the parameters by component. Cached by configuration.

    Keys that count one instance: `embedding`, `head` (0 when tied to the embedding), `mla`, `dense_mlp`, `expert`,
    `shared_experts`, `router`, `router_bias`, `layer_norms`, `dense_layer`, `moe_layer`, `final_norm`, `mtp_module`.
    Keys of totals: `main_model`; `mtp` (all MTP modules, without the embedding and head that they share);
    `active` (`main_model` without the routed experts that a token does not use; the whole embedding counts, as in DeepSeek's
    figure; V3: 37,552,297,472). Models without MLA have their kinds of attention in place of `mla`. Models with several residual streams
    have `hyper_connections` (of a layer), `hyper_connections_end` and `hash_table` (expert choice of hash-routed layers), but no
    `dense_mlp`, `dense_layer`, `moe_layer`.
    """
    width, kinds = config.hidden_size, [kind for run in config.layer_runs for kind in run.kinds * run.count]
    embedding, residual = config.vocab_size * width, residual_parameters(config)
    expert, dense_mlp = expert_parameters(config), mlp_parameters(config, config.intermediate_size)
    ends = embedding + (0 if config.tie_word_embeddings else embedding) + width + residual[1]
    mtp_module = layer_parameters(config, config.mtp_kind) + 2 * width * width + 3 * width + residual[1]
    layer_counts = {name: attention_parameters(config, name) for name in config.attention.kinds}
    if config.streams:
        layer_counts |= {"hyper_connections": residual[0], "hyper_connections_end": residual[1]}
        layer_counts["hash_table"] = config.vocab_size * config.num_experts_per_tok
    else:
        dense, moe = LayerKind("", "dense"), LayerKind("", "moe")
        layer_counts |= {
            "dense_mlp": dense_mlp,
            "dense_layer": layer_parameters(config, dense),
            "moe_layer": layer_parameters(config, moe) if config.is_moe else 0,
        }
    counts = {
        "embedding": embedding,
        "head": 0 if config.tie_word_embeddings else embedding,
        **layer_counts,
        "expert": expert,
        "shared_experts": config.n_shared_experts * expert,
        "router": router_parameters(config),
        "router_bias": router_bias_parameters(config),
        "layer_norms": 2 * width,
        "final_norm": width,
        "mtp_module": mtp_module,
        "main_model": ends + sum(layer_parameters(config, kind) for kind in kinds),
        "mtp": config.num_nextn_predict_layers * mtp_module,
        "active": ends + sum(layer_parameters(config, kind, active=True) for kind in kinds),
    }
    return MappingProxyType(counts)
