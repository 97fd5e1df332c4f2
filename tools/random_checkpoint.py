"""Write a random checkpoint of a DeepSeek-V3-like model, of several GB within seconds, for tools that look at bytes and not at answers.

    python tools/random_checkpoint.py /tmp/random --layers 9 --experts 32 --width 1024

Values are finite bfloat16 numbers of either sign between 2⁻⁷ and 2⁻⁶.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import write_folder
from dsjax.config import ModelConfig, load_config
from dsjax.model.parameter_table import abstract_parameters

_SHARD_BYTES = 1 << 29
_SIGN_AND_FRACTION, _EXPONENT = np.uint16(0x807F), np.uint16(0x3C00)


def write_random_checkpoint(folder: Path, *, layers: int, experts: int, width: int, seed: int = 0) -> int:
    """Write the checkpoint, a dense layer and MoE layers behind it, with the demo's tokenizer; give the bytes of its tensors."""
    demo = resolve("demo")
    config = ModelConfig(
        model_type="deepseek_v3",
        vocab_size=load_config(demo).vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        q_lora_rank=width // 4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=4096,
    )
    names = TensorNames(config, abstract_parameters(config, weights="bf16", mtp=False))
    specs = {}
    for name, (path, piece) in names.places().items():
        kind = np.dtype(np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16)
        specs[name] = TensorSpec(kind, piece.shape(names.parameters[path].shape))
    rng = np.random.default_rng(seed)
    largest = max(spec.nbytes for spec in specs.values()) // 2
    noise = (rng.integers(0, 1 << 16, 2 * largest, np.uint16) & _SIGN_AND_FRACTION) | _EXPONENT

    def values(name: str) -> np.ndarray:
        """A run of the noise, which begins elsewhere for each tensor."""
        spec = specs[name]
        if spec.dtype == np.float32:
            return np.zeros(spec.shape, np.float32)
        if "norm" in name:
            return np.ones(spec.shape, ml_dtypes.bfloat16)
        size = spec.nbytes // 2
        start = int(rng.integers(0, len(noise) - size + 1))
        return noise[start : start + size].view(ml_dtypes.bfloat16).reshape(spec.shape)

    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, specs, values, _SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    for file in demo.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return sum(spec.nbytes for spec in specs.values())


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, value in (("layers", 9), ("experts", 32), ("width", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    print(f"{write_random_checkpoint(given.pop('folder'), **given):,} bytes of tensors")


if __name__ == "__main__":
    main()
