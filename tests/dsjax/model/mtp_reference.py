"""The MTP module of the DeepSeek-V3 technical report (arXiv 2412.19437 §2.2, equations 21 to 23), in plain NumPy.

Written from the equations, one token, head and expert at a time, in float64, from tensors under Hugging Face's names:

    h'_i = M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]         (21; the report writes the halves the other way round)
    h^1  = TransformerBlock(h')                             (22)
    P_{i+2} = Head(RMSNorm(h^1_i))                          (23; Emb and Head are the main model's)

Two things that the report leaves open are as the released weights need them, and as transformers (`MtpLayer`), vLLM
(`deepseek_mtp`) and SGLang (`deepseek_nextn`) have them: `eh_proj` takes the embedding's half first, and `h_i` is the
main model's state after its final norm.
"""

import math
from collections.abc import Container, Mapping

import numpy as np

from dsjax.config import ModelConfig

Tensors = Mapping[str, np.ndarray]
# Of the norms on latents, whatever the configuration says: transformers' and DeepSeek's classes leave it at this default.
LATENT_EPS = 1e-6


def mtp_states(
    config: ModelConfig, tensors: Tensors, hidden: np.ndarray, next_tokens: np.ndarray, holes: Container[int] = ()
) -> np.ndarray:
    """What the head multiplies, `[S, D]`. No position but itself attends to one of the `holes`."""
    layer = f"model.layers.{config.num_hidden_layers}."
    own = {name.removeprefix(layer): value.astype(np.float64) for name, value in tensors.items() if layer in name}
    embedding = tensors["model.embed_tokens.weight"].astype(np.float64)
    eps = config.rms_norm_eps
    combined = []
    for h, token in zip(hidden.astype(np.float64), next_tokens, strict=True):
        halves = [rms_norm(embedding[token], own["enorm.weight"], eps), rms_norm(h, own["hnorm.weight"], eps)]
        combined.append(own["eh_proj.weight"] @ np.concatenate(halves))
    states = transformer_block(config, own, np.array(combined), holes)
    return np.array([rms_norm(state, own["shared_head.norm.weight"], eps) for state in states])


def transformer_block(config: ModelConfig, own: Tensors, x: np.ndarray, holes: Container[int]) -> np.ndarray:
    """One pre-norm decoder layer with experts, over the positions 0, 1, … of a sequence `[S, D]`."""
    eps = config.rms_norm_eps
    normed = np.array([rms_norm(state, own["input_layernorm.weight"], eps) for state in x])
    x = x + attention(config, own, normed, holes)
    return x + np.array([experts(config, own, rms_norm(s, own["post_attention_layernorm.weight"], eps)) for s in x])


def attention(config: ModelConfig, own: Tensors, x: np.ndarray, holes: Container[int]) -> np.ndarray:
    """Causal MLA (arXiv 2412.19437 §2.1.1, equations 1 to 11), every key and value written out."""
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    queries, keys, values = [], [], []
    for position, state in enumerate(x):
        query_latent = rms_norm(
            own["self_attn.q_a_proj.weight"] @ state, own["self_attn.q_a_layernorm.weight"], LATENT_EPS
        )
        compressed = own["self_attn.kv_a_proj_with_mqa.weight"] @ state
        latent = rms_norm(compressed[: config.kv_lora_rank], own["self_attn.kv_a_layernorm.weight"], LATENT_EPS)
        shared_key = turn(compressed[config.kv_lora_rank :], position, config.rope.theta)
        q = (own["self_attn.q_b_proj.weight"] @ query_latent).reshape(-1, nope + rope)
        kv = (own["self_attn.kv_b_proj.weight"] @ latent).reshape(-1, nope + value)
        queries.append([np.concatenate([head[:nope], turn(head[nope:], position, config.rope.theta)]) for head in q])
        keys.append([np.concatenate([head[:nope], shared_key]) for head in kv])
        values.append([head[nope:] for head in kv])
    out = []
    for i in range(len(x)):
        heads, seen = [], [j for j in range(i + 1) if j == i or j not in holes]
        for head in range(config.num_attention_heads):
            scores = [queries[i][head] @ keys[j][head] / math.sqrt(nope + rope) for j in seen]
            shares = np.exp(np.array(scores) - max(scores))
            shares /= shares.sum()
            heads.append(sum(share * values[j][head] for j, share in zip(seen, shares, strict=True)))
        out.append(own["self_attn.o_proj.weight"] @ np.concatenate(heads))
    return np.array(out)


def turn(pairs: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Plain rotary embedding of the interleaved pairs (x0, x1), (x2, x3), …, in place."""
    turned = pairs.copy()
    for i in range(0, len(pairs), 2):
        angle = position * theta ** (-i / len(pairs))
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i], turned[i + 1] = pairs[i] * cos - pairs[i + 1] * sin, pairs[i + 1] * cos + pairs[i] * sin
    return turned


def experts(config: ModelConfig, own: Tensors, x: np.ndarray) -> np.ndarray:
    """Shared and routed experts of one token (§2.1.2, equations 12 to 16), chosen from the best groups (`noaux_tc`)."""
    scores = 1 / (1 + np.exp(-own["mlp.gate.weight"] @ x))
    biased = scores + own["mlp.gate.e_score_correction_bias"]
    groups = biased.reshape(config.n_group, -1)
    group_scores = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    best_groups = np.argsort(group_scores)[-config.topk_group :]
    size = groups.shape[1]
    allowed = [group * size + i for group in best_groups for i in range(size)]
    chosen = sorted(allowed, key=lambda expert: biased[expert])[-config.num_experts_per_tok :]
    total = sum(scores[expert] for expert in chosen) if config.norm_topk_prob else 1.0
    out = swiglu(own, "mlp.shared_experts.", x)
    for expert in chosen:
        weight = scores[expert] / total * config.routed_scaling_factor
        out = out + weight * swiglu(own, f"mlp.experts.{expert}.", x)
    return out


def swiglu(own: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    gate, up = own[prefix + "gate_proj.weight"] @ x, own[prefix + "up_proj.weight"] @ x
    return own[prefix + "down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps) * weight
