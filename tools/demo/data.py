"""The training text as batches of token rows, in an order that the step number alone decides."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.demo.corpus import SourceFile
from tools.demo.dialogues import load_template, make_dialogues

UNIT = 512
"""Rows are cut from runs of this many tokens (or longer ones where rows are longer), whatever their length."""


def encode_training_text(files: list[SourceFile], folder: Path) -> np.ndarray:
    """All documents in one `uint16` stream: `BOS` file `EOS`, and the dialogues, in the order of their hashes.

    folder: of the tokenizer. Documents are packed without a mask between them, as DeepSeek-V3 does (report §4.1).
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = load_template(folder)
    bos, eos = template.globals["bos_token"], template.globals["eos_token"]
    documents = [f"{bos}{file.content.decode()}{eos}" for file in files] + make_dialogues(files, template)
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in encodings])


@dataclass(frozen=True)
class Batches:
    """Batches of rows for a stream of tokens; `bos` opens every row, so that the model knows beginnings in mid-file."""

    stream: np.ndarray
    batch_tokens: int
    bos: int
    seed: int = 0

    def __call__(self, first_token: int, length: int) -> np.ndarray:
        """The batch after `first_token` tokens of training, as `int32 [rows, length + 2]`.

        A row is `BOS` and `length + 1` tokens of the stream: inputs `[:, :-2]`, the next tokens `[:, 1:-1]`, the MTP
        module's targets `[:, 2:]`. Every epoch has its own order, and its cuts a quarter of a unit further on.
        """
        unit = max(length, UNIT)
        units = (len(self.stream) - 2 * unit) // unit
        wanted = np.arange(first_token // unit, (first_token + self.batch_tokens) // unit)
        starts = [self._start(index // units, index % units, unit, units) for index in wanted]
        starts = (np.array(starts)[:, None] + np.arange(0, unit, length)).reshape(-1)
        rows = self.stream[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        return np.concatenate([np.full((len(rows), 1), self.bos, np.int32), rows], axis=1)

    def _start(self, epoch: int, index: int, unit: int, units: int) -> int:
        return int(_order(self.seed, epoch, unit, units)[index]) * unit + (epoch * unit // 4) % unit


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, unit: int, units: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, unit]).permutation(units)
