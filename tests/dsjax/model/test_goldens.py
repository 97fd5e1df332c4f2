"""Our logits equal those of transformers' DeepSeek classes, over random configurations that cover every switch.

The goldens are made by `tools/make_goldens.py`; weights follow from a seed, under Hugging Face's tensor names.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from goldens.configurations import CASES
from goldens.our_model import bound, expected_shapes, hf_tensors, logits_of
from goldens.random_weights import RandomWeights, digest_of_shapes

from dsjax.config import ModelConfig

GOLDENS = Path(__file__).parents[2] / "goldens"
ENTRIES = {entry["name"]: entry for entry in json.loads((GOLDENS / "cases.json").read_text())["cases"]}


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDENS / "logits.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ENTRIES)
def test_logits_equal_those_of_transformers(name, arrays):
    entry, reference = ENTRIES[name], arrays[f"{name}/logits"]
    config = ModelConfig.from_dict(entry["config"])
    tensors = hf_tensors(config, RandomWeights(entry["seed"], entry["bias_center"]))
    logits = logits_of(config, tensors, arrays[f"{name}/tokens"])
    assert logits.shape == reference.shape == (2, 20, config.vocab_size)
    assert np.abs(logits - reference).max() <= bound(reference)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_checkpoint_has_the_tensors_that_transformers_saves(name):
    entry = ENTRIES[name]
    config = ModelConfig.from_dict(entry["config"])
    assert digest_of_shapes(expected_shapes(config)) == entry["tensors"]


def test_the_goldens_are_those_of_the_listed_cases():
    assert list(ENTRIES) == list(CASES)


def test_the_goldens_cover_every_switch():
    configs = [ModelConfig.from_dict(entry["config"]) for entry in ENTRIES.values()]

    def values(read) -> set:
        return {read(config) for config in configs}

    moe = [config for config in configs if config.num_moe_layers]
    assert values(lambda c: c.model_type) == {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"}
    assert values(lambda c: c.index_topk) >= {None, 1, 6, 20, 64}
    assert values(lambda c: c.index_n_heads) >= {None, 1}
    assert {c.topk_method for c in moe} == {"noaux_tc", "greedy", "group_limited_greedy"}
    assert {c.norm_topk_prob for c in moe} == {True, False}
    assert {c.n_shared_experts for c in moe} == {0, 1, 2}
    assert {c.n_group for c in moe} >= {1, 2, 4}
    assert {c.topk_group < c.n_group for c in moe} == {True, False}
    assert {c.num_experts_per_tok for c in moe} >= {1, 2, 3, 4}
    assert len({c.routed_scaling_factor for c in moe}) >= 3
    assert values(lambda c: c.query_compressed) == {True, False}
    assert values(lambda c: c.attention_bias) == {True, False}
    assert values(lambda c: c.tie_word_embeddings) == {True, False}
    assert values(lambda c: c.rope.interleave) == {True, False}
    assert values(lambda c: c.rope.truncate) == {True, False}
    assert values(lambda c: c.rope.type) == {"default", "yarn"}
    assert values(lambda c: c.rope.cos_sin_scale != 1.0) == {True, False}
    assert values(lambda c: c.rope.softmax_correction != 1.0) == {True, False}
    assert values(lambda c: c.rms_norm_eps) >= {1e-6, 1e-5, 0.1}
    assert {(min(c.num_dense_layers, 2), c.num_moe_layers > 0) for c in configs} >= {
        (0, True),
        (1, True),
        (2, True),
        (2, False),
    }
    assert any(c.hidden_size % 2 and c.vocab_size % 2 and c.num_attention_heads % 2 for c in configs)
    spellings = [entry["config"] for entry in ENTRIES.values()]
    assert any("rope_parameters" in raw for raw in spellings)
    assert any("rope_theta" in raw for raw in spellings)


# A change of one switch, on a case that has it: the comparison would be empty if it went unnoticed.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v3-groups", {"topk_group": 4}),
        ("v3-scaled", {"norm_topk_prob": False}),
        ("v3-scaled", {"routed_scaling_factor": 2.4}),
        ("v3-half-split", {"rope_interleave": True}),
        ("v3-large-eps", {"rms_norm_eps": 0.09}),
        ("v3-plain", {"num_experts_per_tok": 1}),
        ("v3-plain", {"rope_theta": 90.0}),
        ("v2-group-limited", {"topk_method": "greedy"}),
        ("v32-plain", {"index_topk": 7}),
    ],
)
def test_the_comparison_would_notice_a_switch_read_wrongly(name, change, arrays):
    entry, reference = ENTRIES[name], arrays[f"{name}/logits"]
    raw = entry["config"] | change
    if "rope_theta" in change and "rope_parameters" in raw:
        raw = raw | {"rope_parameters": raw["rope_parameters"] | change}
    config = ModelConfig.from_dict(raw)
    assert config != ModelConfig.from_dict(entry["config"])
    tensors = hf_tensors(config, RandomWeights(entry["seed"], entry["bias_center"]))
    logits = logits_of(config, tensors, arrays[f"{name}/tokens"])
    assert np.abs(logits - reference).max() > 10 * bound(reference)
