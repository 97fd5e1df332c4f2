"""The tokenizer of DeepSeek-R1, where it is at hand."""

import gzip
import json
from pathlib import Path

import pytest
import tokenizers

from dsjax.engine.text.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[4] / ".." / "shared" / "reference"


@pytest.fixture(scope="module")
def r1() -> Tokenizer:
    packed = REFERENCE / "deepseek-r1.tokenizer.json.gz"
    if not packed.exists():
        pytest.skip("the real tokenizer is not at hand")
    backend = tokenizers.Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())
    return Tokenizer(backend, json.loads((REFERENCE / "deepseek-r1.tokenizer_config.json").read_text()))
