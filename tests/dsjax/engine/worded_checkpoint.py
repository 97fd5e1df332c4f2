"""The tiny checkpoint of ``layouts.py`` with a larger vocabulary and a tokenizer, for what needs text."""

from pathlib import Path

from goldens.our_model import hf_tensors
from goldens.random_weights import RandomWeights
from layouts import TINY, write_model
from tiny_tokenizer import tiny_tokenizer, write_tokenizer

from dsjax.config import ModelConfig

VOCABULARY = 330
"""More than the tokenizer's, as real models have, and no multiple of 32."""


def write_worded_checkpoint(directory: Path, **changed) -> Path:
    """``model.safetensors``, ``config.json`` and the tokenizer's files. changed: fields of ``TINY``."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size < VOCABULARY
    fields = TINY | {"vocab_size": VOCABULARY, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    fields |= changed
    config = ModelConfig.from_dict(fields)
    write_tokenizer(directory)
    return write_model(directory, fields, hf_tensors(config, RandomWeights(7, bias_center=-0.2)))
