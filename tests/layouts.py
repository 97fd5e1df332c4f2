"""A tiny checkpoint, and what layouts answer of it."""

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from goldens.our_model import expected_shapes, hf_tensors
from goldens.random_weights import RandomWeights

from dsjax import LLM
from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.cli import exact
from dsjax.config import ModelConfig
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.engine.experts.expert_balancer import ExpertBalancer

YARN = {
    "type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1,
}  # fmt: skip
TINY = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000, "rope_scaling": YARN,
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
INDEXER = {"index_topk": 12, "index_n_heads": 4, "index_head_dim": 8}  # contexts have up to 105 tokens
MODELS = {"v3": {}, "v3.2": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"} | INDEXER}
"""What each model of the sweeps changes in ``TINY``."""
CHANGES_NUMBERS = (*exact.CHANGES_NUMBERS, "index_scores")
"""Options of a layout's run that one device must have too, to give the same bits."""
BLOCK = 128
"""Side of the square blocks of FP8 weights that share a scale."""


def wide(tp: int) -> dict:
    """What to change in ``TINY`` for FP8 weights: every width that ``tp`` devices share is whole blocks on each of them."""
    if tp == 1:
        return {}
    of_head = BLOCK * tp // TINY["num_attention_heads"]
    heads = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), of_head)
    return heads | dict.fromkeys(("intermediate_size", "moe_intermediate_size"), BLOCK * tp)


def widths(weights: str, tp: int) -> dict:
    """What to change in ``TINY`` for these weights: as ``wide`` for FP8, and experts of whole blocks of FP4 on each of ``tp`` devices.

    weights: as of ``--weights``; ``auto`` keeps those of the checkpoint, which no block limits.
    """
    if weights == "auto":
        return {}
    row = WEIGHT_FORMATS[weights]
    changed = wide(tp) if row.keeps_fp8 else {}
    if row.expert_block is not None:
        changed["moe_intermediate_size"] = max(changed.get("moe_intermediate_size", 0), row.expert_block * tp)
    return changed


def write_checkpoint(directory: Path, seed: int = 7, *, mtp: bool = False, **changed) -> Path:
    """A float32 checkpoint of ``TINY`` in Hugging Face's form, its correction bias partly negative.

    mtp: with an MTP module. changed: fields of ``TINY``.
    """
    fields = TINY | {"num_nextn_predict_layers": int(mtp)} | changed
    config = ModelConfig.from_dict(fields)
    tensors = hf_tensors(config, RandomWeights(seed, bias_center=-0.2))
    assert tensors.keys() == expected_shapes(config).keys()
    return write_model(directory, fields, tensors)


def write_model(directory: Path, fields: dict, tensors: dict[str, np.ndarray]) -> Path:
    """``model.safetensors`` of these tensors, and ``config.json`` of these fields."""
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_file(directory / "model.safetensors", specs, tensors.__getitem__)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def prompts() -> list[dict]:
    """Eight prompts of unequal length."""
    return exact.prompts(TINY["vocab_size"])


class InlinePool:
    def submit(self, function) -> Future:
        done = Future()
        done.set_result(function())
        return done


def decide_at_once(llm: LLM) -> None:
    """Have an engine decide at once where experts should be, so that a rebalance begins at the same step each time."""
    balancer = llm.engine.core.part(ExpertBalancer)
    if balancer is not None:
        balancer._pool = InlinePool()


def answer(directory: Path, *run: str, **options) -> exact.Answer:
    """As of `dsjax.cli.exact`, with experts that are moved at the same step each time."""
    return exact.answer(str(directory), *run, prepare=decide_at_once, **options)
