import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.loading import read_eos_token_ids
from dsjax.engine.tokenizer import TokenizerError


def test_generation_config_adds_to_the_tokenizer_and_comes_before_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert read_eos_token_ids(tmp_path, tiny_tokenizer()) == (1, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_eos_token_ids(tmp_path, tiny_tokenizer()) == (1, 7, 8)
    assert read_eos_token_ids(tmp_path, None) == (7, 8)


def test_a_wrong_eos_token_id_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(TokenizerError, match="eos_token_id '</s>'"):
        read_eos_token_ids(tmp_path, None)
