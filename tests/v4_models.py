"""Tiny DeepSeek-V4 models: their `config.json`, and random tensors that reach both sides of the clip and sinks of either sign."""

import json
import shutil
from pathlib import Path

import numpy as np
from goldens.our_model import expected_shapes
from goldens.random_weights import RandomWeights
from layouts import write_model

from dsjax.config import ModelConfig
from dsjax.config.deepseek_v4 import KINDS

LETTERS = {"w": "window", "c": "csa", "h": "hca"}
TINY = {
    "model_type": "deepseek_v4", "vocab_size": 96, "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 8, "head_dim": 16,
    "num_key_value_heads": 1, "qk_rope_head_dim": 4, "partial_rotary_factor": 0.25, "q_lora_rank": 8, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "n_shared_experts": 1, "max_position_embeddings": 512, "o_groups": 4, "o_lora_rank": 8, "index_n_heads": 16,
    "index_head_dim": 8, "index_topk": 6, "sliding_window": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "dtype": "float32", "hidden_act": "silu",
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def v4_config(layers: str, *, hashed: int = 0, rates: tuple[int, int] = (4, 8), **changes) -> dict:
    """The `config.json` of a model with these layers: "w" a window alone, "c" entries of the first rate, "h" of the second."""
    return TINY | {
        "num_hidden_layers": len(layers),
        "layer_types": [KINDS[LETTERS[letter]] for letter in layers],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (len(layers) - hashed),
        "compress_rates": {KINDS["csa"]: rates[0], KINDS["hca"]: rates[1]},
        **changes,
    }


def v4_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a model under the names that the loader wants."""
    weights, rng, made = RandomWeights(seed), np.random.default_rng(seed), {}
    for name, shape in expected_shapes(config).items():
        made[name] = weights.tensor(name, shape)
        if name.endswith("tid2eid"):
            experts, chosen = config.n_routed_experts, shape[1]
            made[name] = np.stack([rng.permutation(experts)[:chosen] for _ in range(shape[0])]).astype(np.int64)
        elif name.endswith("sinks"):
            made[name] = np.linspace(-20, 20, *shape, dtype=np.float32)
        elif name.endswith("position_bias"):
            made[name] *= np.float32(8)
        elif name.endswith(("w1.weight", "w3.weight")):
            made[name] *= np.float32(6)
    return made


def guessing(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors changed so that the MTP module often, but not always, guesses what the model says.

    What layers add is scaled down, so that the next token depends mostly on the one before. The module's projection passes that one's
    embedding on, and its norm and its sum of streams are the model's.
    """
    module = f"model.layers.{config.num_hidden_layers}."
    small = ("o_b_proj.weight", "w2.weight", "shared_experts.down_proj.weight", "h_proj.weight")
    changed = tensors | {name: tensors[name] * np.float32(1 / 128) for name in tensors if name.endswith(small)}
    changed[f"{module}e_proj.weight"] = np.eye(config.hidden_size, dtype=np.float32)
    changed[f"{module}enorm.weight"] = np.ones(config.hidden_size, np.float32)
    changed[f"{module}shared_head.norm.weight"] = tensors["model.norm.weight"]
    for part in ("base", "scale", "fn"):
        changed[f"{module}hc_head.hc_{part}"] = tensors[f"model.hc_head.hc_{part}"]
    return changed


def write_v4_checkpoint(directory: Path, layers: str, **changes) -> Path:
    """A checkpoint of such a model in this directory, with the demo's tokenizer."""
    demo = Path(__file__).parents[1] / "configs" / "models" / "demo"
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = ModelConfig.from_dict(v4_config(layers, **{"vocab_size": vocabulary} | changes))
    tensors = v4_tensors(config)
    if config.num_nextn_predict_layers:
        tensors = guessing(config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory / name)
    return write_model(directory, config.to_dict(), tensors)
