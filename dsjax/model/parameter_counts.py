"""How many parameters a model has, by component, and how many act on a token. Plain arithmetic on `ModelConfig`.

The planner and `dsjax info` use these without building a model; a test holds them equal to the model's own table.
Letters as in `docs/glossary.md`.
"""

from dsjax.config import ModelConfig


def mla_parameters(config: ModelConfig) -> int:
    """One attention layer: projections, biases, the norms on the latents, and the indexer (V3: 187,107,328; V3.2: 201,066,752)."""
    matrices, others = attention_matrices(config)
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    biases = (config.q_lora_rank or 0) + rank + rotated + config.hidden_size if config.attention_bias else 0
    return sum(rows * columns for rows, columns in matrices) + others + biases


def indexer_parameters(config: ModelConfig) -> int:
    """One layer's indexer: queries, key with its norm, weights of the heads (V3.2: 13,959,424); 0 without sparse attention."""
    if config.index_topk is None:
        return 0
    heads, width = config.index_n_heads, config.index_head_dim
    return config.q_lora_rank * heads * width + config.hidden_size * (width + heads) + 2 * width


def attention_matrices(config: ModelConfig, tp: int = 1) -> tuple[list[tuple[int, int]], int]:
    """A device's part of one attention layer: shapes `[in, out]` of the matrices that can be quantised, and the number of all other values.

    tp: devices that share the heads; all else is whole on each of them. Biases are left out.
    """
    heads, width, rank = config.num_attention_heads // tp, config.hidden_size, config.kv_lora_rank
    query = config.q_lora_rank or width
    matrices = [(rank, heads * (config.qk_nope_head_dim + config.v_head_dim)), (heads * config.v_head_dim, width)]
    matrices += [(query, heads * config.qk_head_dim), (width, rank + config.qk_rope_head_dim)]
    matrices += [(width, query)] if config.query_compressed else []
    others = rank + (config.q_lora_rank or 0)
    if config.index_topk is not None:
        index = config.index_head_dim
        matrices += [(query, config.index_n_heads * index), (width, index)]
        others += 2 * index + width * config.index_n_heads
    return matrices, others


def mlp_parameters(config: ModelConfig, hidden: int) -> int:
    """A SwiGLU MLP of inner width `hidden`: gate, up, down."""
    return 3 * config.hidden_size * hidden


def expert_parameters(config: ModelConfig) -> int:
    """One routed expert (V3: 44,040,192); 0 for a model without experts."""
    return mlp_parameters(config, config.moe_intermediate_size) if config.is_moe else 0


def router_parameters(config: ModelConfig) -> int:
    """One router's matrix, without the correction bias (V3: 1,835,008)."""
    return config.n_routed_experts * config.hidden_size


def router_bias_parameters(config: ModelConfig) -> int:
    """One router's correction bias, which only `noaux_tc` has (V3: 256)."""
    return config.n_routed_experts if config.topk_method == "noaux_tc" else 0


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by component.

    Keys for one of its kind: `embedding`, `head` (0 when tied to the embedding), `mla`, `dense_mlp`, `expert`,
    `shared_experts`, `router`, `router_bias`, `layer_norms`, `dense_layer`, `moe_layer`, `final_norm`, `mtp_module`.
    Totals: `main_model`; `mtp` (all MTP modules' own, without the embedding and head that they share);
    `active`: `main_model` less the routed experts that a token does not use; the whole embedding counts, as in
    DeepSeek's own figure (V3: 37,552,297,472).
    """
    width = config.hidden_size
    mla = mla_parameters(config)
    dense_mlp = mlp_parameters(config, config.intermediate_size)
    expert = expert_parameters(config)
    shared = config.n_shared_experts * expert
    router, router_bias = router_parameters(config), router_bias_parameters(config)
    norms = 2 * width
    embedding = config.vocab_size * width
    head = 0 if config.tie_word_embeddings else embedding
    dense_layer = mla + dense_mlp + norms
    moe_layer = mla + config.n_routed_experts * expert + shared + router + router_bias + norms if config.is_moe else 0
    # An MTP layer comes after the dense ones, so it has experts if the model has any.
    mtp_layer = moe_layer if config.is_moe else dense_layer
    mtp_module = mtp_layer + 2 * width * width + 3 * width
    dense, moe = config.num_dense_layers, config.num_moe_layers
    main = embedding + dense * dense_layer + moe * moe_layer + width + head
    idle = moe * (config.n_routed_experts - config.num_experts_per_tok) * expert
    return {
        "embedding": embedding,
        "head": head,
        "mla": mla,
        "dense_mlp": dense_mlp,
        "expert": expert,
        "shared_experts": shared,
        "router": router,
        "router_bias": router_bias,
        "layer_norms": norms,
        "dense_layer": dense_layer,
        "moe_layer": moe_layer,
        "final_norm": width,
        "mtp_module": mtp_module,
        "main_model": main,
        "mtp": config.num_nextn_predict_layers * mtp_module,
        "active": main - idle,
    }
