"""Our logits equal those of transformers' DeepSeek classes, in random configurations of every switch.

The goldens are made by `tools/make_goldens.py`; weights follow from a seed, under Hugging Face's tensor names.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from goldens.configurations import CASES, MTP_CASE
from goldens.our_model import COMPILE_QUICKLY, bound, expected_shapes, hf_tensors, logits_of
from goldens.random_weights import RandomWeights, digest_of_shapes

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import parameter_table

GOLDENS = Path(__file__).parents[2] / "goldens"
ENTRIES = {entry["name"]: entry for entry in json.loads((GOLDENS / "cases.json").read_text())["cases"]}


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDENS / "logits.npz") as file:
        return dict(file)


# Half a CPU second each: every third case is not slow.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if place % 3 else []) for place, name in enumerate(ENTRIES)]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name, arrays):
    entry, reference = ENTRIES[name], arrays[f"{name}/logits"]
    config = ModelConfig.from_dict(entry["config"])
    assert digest_of_shapes(expected_shapes(config)) == entry["tensors"], "what transformers saves"
    tensors = hf_tensors(config, RandomWeights(entry["seed"], entry["bias_center"]))
    logits = logits_of(config, tensors, arrays[f"{name}/tokens"])
    assert logits.shape == reference.shape == (2, 20, config.vocab_size)
    assert np.abs(logits - reference).max() <= bound(reference)


def test_the_mtp_module_gives_the_logits_of_transformers(arrays):
    """From the model's state of a token and the token after it, for the one after that."""
    entry, tokens, reference = (ENTRIES[MTP_CASE], *(arrays[f"{MTP_CASE}/{name}"] for name in ("tokens", "mtp")))
    config = ModelConfig.from_dict(entry["config"] | {"num_nextn_predict_layers": 1})
    table = parameter_table(config, weights="f32")

    def further(params, tokens):
        model = table.bind(params)
        return model.predict_further(model(tokens[:, :-1]).hidden, tokens[:, 1:]).logits

    params = from_hf_tensors(config, hf_tensors(config, RandomWeights(entry["seed"], entry["bias_center"])))
    logits = jax.jit(further, compiler_options=COMPILE_QUICKLY)(params, tokens)
    assert np.abs(logits - reference).max() <= bound(reference)


def test_the_goldens_are_those_of_the_listed_cases():
    assert list(ENTRIES) == list(CASES)
