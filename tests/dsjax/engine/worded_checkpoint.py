"""The tiny checkpoint of ``layouts.py`` with a larger vocabulary and a tokenizer, for what needs text."""

import json
from pathlib import Path

import numpy as np
from goldens.our_model import expected_shapes
from goldens.random_weights import RandomWeights
from layouts import TINY
from tiny_tokenizer import tiny_tokenizer, write_tokenizer

from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.config import ModelConfig

VOCABULARY = 330
"""More than the tokenizer's, as real models have, and no multiple of 32."""


def write_worded_checkpoint(directory: Path, **changed) -> Path:
    """``model.safetensors``, ``config.json`` and the tokenizer's files. changed: fields of ``TINY``."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size < VOCABULARY
    fields = TINY | {"vocab_size": VOCABULARY, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    fields |= changed
    config, weights = ModelConfig.from_dict(fields), RandomWeights(7, bias_center=-0.2)
    write_model(
        directory, fields, {name: weights.tensor(name, shape) for name, shape in expected_shapes(config).items()}
    )
    return directory


def write_model(directory: Path, fields: dict, tensors: dict[str, np.ndarray]) -> None:
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_file(directory / "model.safetensors", specs, tensors.__getitem__)
    (directory / "config.json").write_text(json.dumps(fields))
    write_tokenizer(directory)
