"""A tiny model with odd sizes (no dimension a multiple of the FP8 block), and checkpoints of it."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from layouts import TINY

from dsjax.checkpoint.names import SCALE_SUFFIX, TensorNames
from dsjax.checkpoint.quantise import quantise
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import write_folder
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import abstract_parameters

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Two MoE layers behind a dense one, eight experts, query compression, one MTP module."""
    sizes = {"vocab_size": 72, "hidden_size": 152, "intermediate_size": 272, "moe_intermediate_size": 136}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return ModelConfig.from_dict(TINY | sizes | experts | {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"})


def hf_tensors(config: ModelConfig, weights: str = "bf16", seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint's tensors with random values, MTP copies included; ``weights`` is bf16, f32 or fp8."""
    rng = np.random.default_rng(seed)
    tensors = {}
    fp8 = TensorNames(config, abstract_parameters(config, weights="fp8"))
    places = {name: place for name, place in fp8.places().items() if not name.endswith(SCALE_SUFFIX)}
    for name, (path, piece) in places.items():
        info = fp8.parameters[path]
        values = rng.standard_normal(piece.shape(info.shape)).astype(np.float32)
        if weights == "fp8" and info.quantised:
            # One outlier a tensor, so that its blocks' scales differ.
            values[0, 0] = 30
            tensors[name], tensors[name + SCALE_SUFFIX] = quantise(values)
        else:
            is_f32 = weights == "f32" or name.endswith("e_score_correction_bias")
            tensors[name] = values if is_f32 else values.astype(BF16)
    for name, original in fp8.copies().items():
        tensors[name] = tensors[original]
    return tensors


def write_checkpoint(
    folder: Path, config: ModelConfig, tensors: dict[str, np.ndarray], max_shard_bytes: int = 1 << 40
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_folder(folder, specs, tensors.__getitem__, max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "tokenizer.json").write_text('{"stand-in": true}')
    return folder


@pytest.fixture(scope="session")
def checkpoints(tiny_config, tmp_path_factory):
    """``checkpoints("bf16" | "f32" | "fp8")`` → (directory, tensors), made once."""
    made = {}

    def of(weights: str):
        if weights not in made:
            from dsjax.config import QuantizationConfig

            config = dataclasses.replace(tiny_config, quantization=QuantizationConfig() if weights == "fp8" else None)
            tensors = hf_tensors(tiny_config, weights)
            folder = tmp_path_factory.mktemp(weights) / "model"
            made[weights] = write_checkpoint(folder, config, tensors), tensors
        return made[weights]

    return of


@pytest.fixture(scope="session")
def make_tensors():
    return hf_tensors


@pytest.fixture(scope="session")
def make_checkpoint():
    return write_checkpoint
