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
    fields = worded_fields(**changed)
    write_tokenizer(directory)
    return write_model(directory, fields, hf_tensors(ModelConfig.from_dict(fields), RandomWeights(7, bias_center=-0.2)))


def worded_fields(**changed) -> dict:
    """``TINY`` with the vocabulary and the tokenizer's ends."""
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return TINY | {"vocab_size": VOCABULARY} | ends | changed
