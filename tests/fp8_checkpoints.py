"""Small FP8 checkpoints, and their dequantised twins, for the tests on CPU and on a GPU.

Every matrix is wider than a 128 × 128 block, most with a ragged last one, and the blocks of each are of unlike sizes, so
that a scale applied to the wrong elements moves the logits by much.
"""

import dataclasses
from pathlib import Path

import numpy as np
from goldens.random_weights import RandomWeights
from layouts import write_model
from odd_checkpoints import tensors_of

from dsjax.checkpoint.names import SCALE_SUFFIX
from dsjax.config import MlaConfig, ModelConfig, QuantizationConfig
from dsjax.model.parameters import BLOCK

RAGGED = ModelConfig(
    model_type="deepseek_v3", vocab_size=72, hidden_size=160, intermediate_size=272, num_hidden_layers=2, num_attention_heads=8,
    mla=MlaConfig(q_lora_rank=136, kv_lora_rank=132, qk_nope_head_dim=20, qk_rope_head_dim=8, v_head_dim=18),
    moe_intermediate_size=136, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
    n_group=2, topk_group=1, max_position_embeddings=64, torch_dtype="float32", quantization=QuantizationConfig(),
)  # fmt: skip
_HEADS = dataclasses.replace(RAGGED.mla, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
# Widths that tp splits are whole blocks on two devices; those that it does not split stay ragged.
WHOLE = dataclasses.replace(
    RAGGED, num_attention_heads=16, mla=_HEADS, intermediate_size=256, moe_intermediate_size=256
)


def uneven(values: np.ndarray) -> np.ndarray:
    """The blocks of a matrix at different sizes, a power of two apart."""
    rows, columns = (np.arange(size) // BLOCK for size in values.shape)
    return values * np.float32(2.0) ** -(rows[:, None] + 2 * columns[None, :]).astype(np.float32)


def fp8_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    def values(name: str, shape: tuple[int, ...], quantised: bool) -> np.ndarray:
        drawn = weights.tensor(name, shape)
        return uneven(drawn) if quantised else drawn

    weights = RandomWeights(1)
    return tensors_of(config, "fp8", values)


def dequantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Float32 tensors without scales, by repeating each scale over its block."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if name + SCALE_SUFFIX in tensors:
            scale = np.kron(tensors[name + SCALE_SUFFIX], np.ones((BLOCK, BLOCK), np.float32))
            value = value.astype(np.float32) * scale[: value.shape[0], : value.shape[1]]
        plain[name] = value.astype(np.float32)
    return plain


def write_fp8_model(folder: Path, config: ModelConfig, tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face directory of these tensors; it says that it is FP8 where it has scales."""
    has_scales = any(name.endswith(SCALE_SUFFIX) for name in tensors)
    written = dataclasses.replace(config, quantization=QuantizationConfig() if has_scales else None)
    return write_model(folder, written.to_dict(), tensors)
