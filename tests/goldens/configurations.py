"""Random tiny configurations, drawn so that together they cover every switch of the family, at odd sizes."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_V3, _V2, _V32, _K2 = ({"model_type": name} for name in ("deepseek_v3", "deepseek_v2", "deepseek_v32", "kimi_k2"))
_YARN, _NEGATIVE = {"rope": "yarn"}, {"bias_center": -1.5}

# What is fixed in each case; everything else is drawn. The names of the drawn settings are in `draw`.
CASES: dict[str, Mapping[str, Any]] = {
    "v3-plain": {**_V3, "rope": "default", "n_group": 1, "query_compressed": True},
    "v3-groups": {**_V3, "n_group": 4, "topk_group": 2},
    "v3-one-group-of-four": {**_V3, "n_group": 4, "topk_group": 1},
    "v3-all-groups": {**_V3, "n_group": 2, "topk_group": 2},
    "v3-one-expert": {**_V3, "num_experts_per_tok": 1, "norm_topk_prob": True},
    "v3-every-selectable-expert": {**_V3, "n_group": 2, "topk_group": 1, "num_experts_per_tok": "all"},
    "v3-negative-bias": {**_V3, **_NEGATIVE, "n_group": 4, "topk_group": 2},
    "v3-negative-bias-few-left": {**_V3, **_NEGATIVE, "n_group": 4, "topk_group": 1, "num_experts_per_tok": "all"},
    "v3-positive-bias": {**_V3, "bias_center": 1.0, "n_group": 2, "topk_group": 1},
    "v3-no-norm": {**_V3, "norm_topk_prob": False},
    "v3-scaled": {**_V3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "v3-no-query-compression": {**_V3, "query_compressed": False},
    "v3-yarn": {**_V3, **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "v3-yarn-two-mscales": {**_V3, **_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "v3-yarn-no-mscale": {**_V3, **_YARN, "mscale": None, "mscale_all_dim": None},
    "v3-yarn-mscale-alone": {**_V3, **_YARN, "mscale": 0.7, "mscale_all_dim": None},
    "v3-yarn-all-dim-alone": {**_V3, **_YARN, "mscale": None, "mscale_all_dim": 0.8},
    "v3-yarn-attention-factor": {**_V3, **_YARN, "attention_factor": 1.3},
    "v3-yarn-not-truncated": {**_V3, **_YARN, "truncate": False},
    "v3-yarn-step": {**_V3, **_YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "v3-half-split": {**_V3, "rope_interleave": False},
    "v3-half-split-yarn": {**_V3, **_YARN, "rope_interleave": False},
    "v3-no-shared": {**_V3, "n_shared_experts": 0},
    "v3-two-shared": {**_V3, "n_shared_experts": 2},
    "v3-no-dense": {**_V3, "first_k_dense_replace": 0},
    "v3-two-dense": {**_V3, "first_k_dense_replace": 2, "num_hidden_layers": 4},
    "v3-all-dense": {**_V3, "first_k_dense_replace": 3, "num_hidden_layers": 3},
    "v3-attention-bias": {**_V3, "attention_bias": True, "query_compressed": True},
    "v3-attention-bias-no-query-compression": {**_V3, "attention_bias": True, "query_compressed": False},
    "v3-tied": {**_V3, "tie_word_embeddings": True},
    "v3-large-eps": {**_V3, "rms_norm_eps": 0.1, "query_compressed": True},
    "kimi-k2-like": {**_K2, **_YARN, "n_group": 1, "query_compressed": True, "first_k_dense_replace": 1},
    "moonlight-like": {**_V3, "rope": "default", "n_group": 1, "query_compressed": False, "n_shared_experts": 2},
    "v2-greedy": {**_V2, "topk_method": "greedy", "query_compressed": False, "rope": "default"},
    "v2-greedy-yarn": {**_V2, **_YARN, "topk_method": "greedy", "mscale": 0.707, "mscale_all_dim": 0.707},
    "v2-group-limited": {**_V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "v2-group-limited-yarn": {**_V2, **_YARN, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "v2-scaled": {**_V2, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy", "n_group": 2},
    "v2-attention-bias": {**_V2, "attention_bias": True, "query_compressed": True},
    "v2-no-shared": {**_V2, "n_shared_experts": 0},
    "v2-tied-all-dense": {**_V2, "tie_word_embeddings": True, "first_k_dense_replace": 2, "num_hidden_layers": 2},
    # The goldens' contexts are 20 tokens long.
    "v32-plain": {**_V32, "rope": "default", "n_group": 1, "index_topk": 6},
    "v32-groups-yarn": {**_V32, **_YARN, "n_group": 4, "topk_group": 2, "index_topk": 5, "num_attention_heads": 3},
    "v32-one-index-head": {**_V32, "index_n_heads": 1, "index_topk": 7},
    "v32-one-token": {**_V32, "index_topk": 1},
    "v32-topk-of-the-context": {**_V32, "index_topk": 20},
    "v32-topk-above-the-context": {**_V32, "index_topk": 64},
    "v32-one-head-biases": {**_V32, **_NEGATIVE, "num_attention_heads": 1, "attention_bias": True, "index_topk": 9},
}
MTP_CASE = "v3-groups"
"""The case with the logits of an MTP module too; transformers 5.24 has no such module with sparse attention."""


def case_configuration(name: str) -> tuple[dict[str, Any], float]:
    """The `config.json` of a case of `CASES`, always the same, and the center of its correction bias."""
    return draw(np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))), CASES[name])


def draw(rng: np.random.Generator, fixed: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Draw a configuration that transformers accepts; settings in `fixed` are as given there.

    Returns `config.json`'s content, in one of the two spellings at random, and `bias_center` for `RandomWeights`.
    """

    def pick(name: str, *options: Any) -> Any:
        chosen = options[rng.integers(len(options))]  # Drawn even if fixed, so that fixing one setting moves no other.
        return fixed.get(name, chosen)

    model_type = fixed["model_type"]
    heads = pick("num_attention_heads", 1, 2, 3, 5)
    v2, v32 = model_type == "deepseek_v2", model_type == "deepseek_v32"
    # Transformers' V2 class wants a width that the heads divide, and rotary parts that begin at an even place (it views them as complex
    # numbers). Nothing in the architecture does.
    width = heads * pick("head_multiple", 9, 13) if v2 else pick("hidden_size", 31, 37, 45, 48)
    layers = pick("num_hidden_layers", 2, 3)
    raw: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": pick("vocab_size", 53, 64, 71),
        "hidden_size": width,
        "intermediate_size": pick("intermediate_size", 33, 40, 51),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": pick("q_lora_rank", 7, 12, 19) if pick("query_compressed", True, v32) else None,
        "kv_lora_rank": pick("kv_lora_rank", 6, 12 if v2 else 11, 16),
        "qk_nope_head_dim": pick("qk_nope_head_dim", *((4, 6, 8) if v2 else (3, 7, 8))),
        "qk_rope_head_dim": pick("qk_rope_head_dim", 4, 6, 10),
        "v_head_dim": pick("v_head_dim", 5, 8, 9),
        "rms_norm_eps": pick("rms_norm_eps", 1e-6, 1e-5),
        "max_position_embeddings": 256,
        "attention_bias": pick("attention_bias", False, False, True),
        "tie_word_embeddings": pick("tie_word_embeddings", *(False,) * 5, True),
        "first_k_dense_replace": pick("first_k_dense_replace", 0, 1, 1),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    raw |= _experts(pick, model_type)
    raw |= _rope(pick, model_type)
    if v32:
        raw |= {
            "index_topk": pick("index_topk", 3, 6, 11),
            "index_n_heads": pick("index_n_heads", 1, 2, 5),
            "index_head_dim": raw["qk_rope_head_dim"] + pick("index_unrotated", 0, 3, 6),
        }
    return raw, float(pick("bias_center", 0.0))


def _experts(pick, model_type: str) -> dict[str, Any]:
    method = pick("topk_method", "greedy", "group_limited_greedy") if model_type == "deepseek_v2" else "noaux_tc"
    groups = pick("n_group", 1, 2, 4)
    per_group = pick("experts_per_group", 3, 4, 5) * (2 if groups == 1 else 1)
    chosen_groups = min(pick("topk_group", 1, 2), groups)
    selectable = groups * per_group if method == "greedy" else chosen_groups * per_group
    per_token = pick("num_experts_per_tok", 2, 3, 4)
    return {
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": chosen_groups,
        "topk_method": method,
        "scoring_func": "softmax" if model_type == "deepseek_v2" else "sigmoid",
        "num_experts_per_tok": selectable if per_token == "all" else min(per_token, selectable),
        "norm_topk_prob": pick("norm_topk_prob", True, False) and model_type != "deepseek_v2",
        "routed_scaling_factor": pick("routed_scaling_factor", 1.0, 1.7),
        "n_shared_experts": pick("n_shared_experts", 1, 1, 2),
        "moe_intermediate_size": pick("moe_intermediate_size", 9, 16, 21),
        "moe_layer_freq": 1,
    }


def _rope(pick, model_type: str) -> dict[str, Any]:
    theta = pick("rope_theta", 100.0, 10000.0, 50000.0)
    kind = pick("rope", "default", "yarn")
    yarn = {
        "factor": pick("factor", 4.0, 40.0, 1.5),
        # So short that a golden's few positions lie on both sides of it.
        "original_max_position_embeddings": pick("original_max_position_embeddings", 8, 16),
        "beta_fast": pick("beta_fast", 32.0, 2.0),
        "beta_slow": pick("beta_slow", 1.0, 0.1),
        "mscale": pick("mscale", 1.0, 0.707),
        "mscale_all_dim": pick("mscale_all_dim", 1.0, 0.707),
        "attention_factor": pick("attention_factor", None),
        "truncate": pick("truncate", True),
    }
    scaling = {} if kind == "default" else {key: value for key, value in yarn.items() if value is not None}
    fixed = model_type in ("deepseek_v2", "deepseek_v32")
    interleave = {} if fixed else {"rope_interleave": pick("rope_interleave", True, True, False)}
    if pick("spelling", "original", "transformers-5") == "original":
        scaling = {"type": kind, **scaling} if scaling else None
        return {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float32", **interleave}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling}, "dtype": "float32", **interleave}
