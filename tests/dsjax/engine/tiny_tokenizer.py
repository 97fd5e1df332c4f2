"""A byte-level BPE tokenizer made in milliseconds, with DeepSeek's special tokens."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dsjax.engine.text.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
CONFIG = {
    "add_bos_token": True,
    "bos_token": {"__type": "AddedToken", "content": BOS},
    "eos_token": EOS,
    "chat_template": TEMPLATE,
}


@functools.cache
def tiny_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    start = {"special_tokens": [BOS, EOS], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=296, show_progress=False, **start)
    backend.train_from_iterator(["def main(): return 'héllo wörld 你好 🙂'", "import numpy as np"] * 4, trainer)
    backend.add_tokens(["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"])
    return backend


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_backend(), CONFIG)


def write_tokenizer(directory: Path) -> None:
    """The files that a model directory holds."""
    tiny_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
