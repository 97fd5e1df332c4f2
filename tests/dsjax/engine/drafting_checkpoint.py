"""The worded checkpoint with an MTP module that often, but not always, guesses what the model says."""

from pathlib import Path

import numpy as np
from goldens.our_model import hf_tensors
from goldens.random_weights import RandomWeights
from layouts import write_model
from tiny_tokenizer import tiny_tokenizer, write_tokenizer
from worded_checkpoint import VOCABULARY, worded_fields

from dsjax.config import ModelConfig
from dsjax.engine.text.tokenizer import Tokenizer

CONTEXT = 0.15
"""By how much what the layers add is scaled down: the next token then depends mostly on the one before, which the module knows too."""
HEAD = 4.0
"""By how much the head is scaled up: sampled at temperature 1, the model still says mostly what is most probable."""


def write_drafting_checkpoint(directory: Path, **changed) -> Path:
    """``model.safetensors``, ``config.json`` and the tokenizer's files. changed: fields of ``TINY``.

    Its text is printable ASCII: the head of all other tokens is zero. The module's projection passes the embedding of the token on, as the
    model's first layer gets it, and its norm is the model's. So the module predicts what follows a token, and what it cannot know is what
    the model's layers take from the context.
    """
    tokenizer = tiny_tokenizer()
    # No dense layers: one kind of layer less to compile.
    fields = worded_fields(num_nextn_predict_layers=1, first_k_dense_replace=0, **changed)
    config = ModelConfig.from_dict(fields)
    tensors = hf_tensors(config, RandomWeights(7, bias_center=-0.2))
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = value * np.float32(CONTEXT)
    module = f"model.layers.{config.num_hidden_layers}."
    width = config.hidden_size
    projection = tensors[module + "eh_proj.weight"] * np.float32(CONTEXT)
    projection[:, :width] += np.eye(width, dtype=np.float32)
    tensors[module + "eh_proj.weight"] = projection
    tensors[module + "enorm.weight"] = np.ones(width, np.float32)
    tensors[module + "shared_head.norm.weight"] = tensors["model.norm.weight"]
    head = tensors["lm_head.weight"] * np.float32(HEAD)
    head[[token for token in range(VOCABULARY) if not _is_printable(tokenizer, token)]] = 0
    tensors["lm_head.weight"] = head
    write_tokenizer(directory)
    return write_model(directory, fields, tensors)


def _is_printable(tokenizer: Tokenizer, token: int) -> bool:
    if token >= tokenizer.vocab_size or tokenizer.is_special(token):
        return False
    return all(32 <= byte < 127 for byte in tokenizer.token_bytes(token))
