"""Parameter counts of a model, by component, in total and active per token. Plain arithmetic on `ModelConfig`.

The planner and `dsjax info` use these without building a model; a test compares them with the model's own table.
Letters as in `docs/glossary.md`.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind


def mla_parameters(config: ModelConfig) -> int:
    """Parameters of one MLA layer: projections, biases, the norms on the latents, and the indexer (V3: 187,107,328; V3.2: 201,066,752)."""
    matrices, others = attention_matrices(config)
    mla = config.mla
    widths = (mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_rope_head_dim, config.hidden_size)
    biases = sum(widths) if config.attention_bias else 0
    return sum(rows * columns for rows, columns in matrices) + others + biases


def compressed_parameters(config: ModelConfig, attention: str) -> int:
    """Parameters of one attention layer of a DeepSeek-V4. attention: see `LayerKind`."""
    matrices, others = _compressed_matrices(config, 1, attention)
    in_float32 = config.num_attention_heads
    in_float32 += sum(config.v4.rate(attention) * series * entry for entry, series in _compressors(config, attention))
    return sum(rows * columns for rows, columns in matrices) + others - in_float32


def residual_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the hyper-connections: of one layer (both blocks), and after the last layer. 0 if the residual is a plain sum."""
    if config.v4 is None:
        return 0, 0
    streams, weights = config.v4.hc_mult, (2 + config.v4.hc_mult) * config.v4.hc_mult
    width = streams * config.hidden_size
    return 2 * (width * weights + weights + 3), width * streams + streams + 1


def layer_parameters(config: ModelConfig, kind: LayerKind, active: bool = False) -> int:
    """Parameters of one layer. active: count only the routed experts that one token uses."""
    attention = mla_parameters(config) if kind.attention == "mla" else compressed_parameters(config, kind.attention)
    total = attention + 2 * config.hidden_size + residual_parameters(config)[0]
    if not kind.routed:
        return total + mlp_parameters(config, config.intermediate_size)
    experts = (config.num_experts_per_tok if active else config.n_routed_experts) + config.n_shared_experts
    selection = config.vocab_size * config.num_experts_per_tok if kind.mlp == "hash" else router_bias_parameters(config)
    return total + experts * expert_parameters(config) + router_parameters(config) + selection


def attention_matrices(config: ModelConfig, tp: int = 1, attention: str = "mla") -> tuple[list[tuple[int, int]], int]:
    """One device's shard of an attention layer: shapes `[in, out]` of the quantisable matrices, and the number of other parameters.

    tp: devices that share the heads; everything else is replicated. Biases are not counted. attention: see `LayerKind`. In V4's
    layers each float32 parameter counts as two.
    """
    if attention != "mla":
        return _compressed_matrices(config, tp, attention)
    mla, heads, width = config.mla, config.num_attention_heads // tp, config.hidden_size
    rank, query = mla.kv_lora_rank, mla.q_lora_rank or width
    matrices = [(rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)), (heads * mla.v_head_dim, width)]
    matrices += [(query, heads * mla.qk_head_dim), (width, rank + mla.qk_rope_head_dim)]
    matrices += [(width, query)] if mla.q_lora_rank is not None else []
    others = rank + (mla.q_lora_rank or 0)
    if mla.indexer is not None:
        index = mla.indexer.head_dim
        matrices += [(query, mla.indexer.n_heads * index), (width, index)]
        others += 2 * index + width * mla.indexer.n_heads
    return matrices, others


def _compressed_matrices(config: ModelConfig, tp: int, attention: str) -> tuple[list[tuple[int, int]], int]:
    v4, width = config.v4, config.hidden_size
    query, head, groups = v4.q_lora_rank, v4.head_dim, v4.o_groups
    heads, inner = config.num_attention_heads * head, groups * v4.o_lora_rank // tp
    matrices = [(width, query), (query, heads // tp), (width, head), (heads // groups, inner), (inner, width)]
    others = query + head + 2 * config.num_attention_heads // tp
    for entry, series in _compressors(config, attention):
        others += 2 * (width + v4.rate(attention)) * series * entry + entry
    if attention == "csa":
        matrices.append((query, v4.indexer.n_heads * v4.indexer.head_dim))
        others += width * v4.indexer.n_heads
    return matrices, others


def compressor_columns(config: ModelConfig, attention: str) -> int:
    """Return the output width of one layer's compressor projections (gates and values). attention: see `LayerKind`."""
    return sum(2 * series * entry for entry, series in _compressors(config, attention))


def _compressors(config: ModelConfig, attention: str) -> list[tuple[int, int]]:
    """Return (entry width, number of series) of each compressor of a V4 layer."""
    if attention in ("mla", "window"):
        return []
    head = config.v4.head_dim
    return [(head, 1)] if attention == "hca" else [(head, 2), (config.v4.indexer.head_dim, 2)]


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
    figure; V3: 37,552,297,472). DeepSeek-V4 has attention kinds `window`, `csa` and `hca`, `hyper_connections` (of a layer),
    `hyper_connections_end` and `hash_table` (expert choice of the first layers), but no `mla`, `dense_mlp`, `dense_layer`, `moe_layer`.
    """
    width, kinds = config.hidden_size, [kind for run in config.layer_runs for kind in run.kinds * run.count]
    embedding, residual = config.vocab_size * width, residual_parameters(config)
    expert, dense_mlp = expert_parameters(config), mlp_parameters(config, config.intermediate_size)
    ends = embedding + (0 if config.tie_word_embeddings else embedding) + width + residual[1]
    mtp_module = layer_parameters(config, config.mtp_kind) + 2 * width * width + 3 * width + residual[1]
    if config.v4 is None:
        dense, moe = LayerKind("", "dense"), LayerKind("", "moe")
        layer_counts = {
            "mla": mla_parameters(config),
            "dense_mlp": dense_mlp,
            "dense_layer": layer_parameters(config, dense),
            "moe_layer": layer_parameters(config, moe) if config.is_moe else 0,
        }
    else:
        layer_counts = {name: compressed_parameters(config, name) for name in ("window", "csa", "hca")}
        layer_counts |= {"hyper_connections": residual[0], "hyper_connections_end": residual[1]}
        layer_counts["hash_table"] = config.vocab_size * config.num_experts_per_tok
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
