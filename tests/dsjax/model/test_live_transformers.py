"""The same comparison as the goldens', live: other configurations, and through a checkpoint that transformers saved."""

import importlib
import importlib.util
from importlib.metadata import version

import jax
import numpy as np
import pytest

# Not imported here: every process that shares the suite collects this file, and one of them runs it.
if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("compares with torch and transformers, which dsjax itself never needs", allow_module_level=True)
if int(version("transformers").split(".")[0]) < 5:
    pytest.skip("compares with transformers 5's DeepSeek classes", allow_module_level=True)

from goldens.configurations import case_configuration
from goldens.our_model import bound, hf_tensors, logits_of_parameters
from goldens.random_weights import RandomWeights

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.load import load as load_checkpoint
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import ModelConfig
from sharding import MeshSpec
from sharding.rules import Rules

pytestmark = [
    pytest.mark.slow,  # all together
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore::dsjax.checkpoint.errors.CheckpointWarning"),
]


def their():
    """`goldens.reference_model`, which imports torch and transformers: five seconds of processor time, when a test needs them.

    Not an object with attributes of its own: pytest asks every object of a module for some while it collects.
    """
    return importlib.import_module("goldens.reference_model")


# Seeds that no golden has: those count up from 0 in thousands, one thousand a case.
FIRST_SEED = 10_000_000


def random_tokens(raw: dict, seed: int, length: int = 20) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, raw["vocab_size"], (2, length))


@pytest.mark.parametrize("name", ["v3-no-shared", "v3-tied", "v3-attention-bias", "v2-greedy-yarn", "v32-groups-yarn"])
def test_a_checkpoint_saved_by_transformers_gives_its_weights(name, tmp_path):
    raw, bias_center = case_configuration(name)
    # As transformers' V3 configuration has it unless told otherwise: it announces an MTP module and saves none.
    del raw["num_nextn_predict_layers"]
    weights = RandomWeights(FIRST_SEED, bias_center)
    model = their().reference_model(raw, weights)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config, spec = checkpoint.config, MeshSpec.parse("dp=1")
    assert config.rope == ModelConfig.from_dict(raw).rope
    params = load_checkpoint(config, checkpoint, spec.build(jax.devices()[:1]), Rules.for_mesh(spec))
    expected = from_hf_tensors(config, hf_tensors(config, weights))
    assert params.keys() == expected.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
    if name == "v32-groups-yarn":
        tokens = random_tokens(raw, 7)
        reference = their().reference_logits(model, tokens)
        logits = logits_of_parameters(config, params, tokens)
        assert np.abs(logits - reference).max() <= bound(reference)


def test_a_config_written_by_us_is_read_by_transformers_as_the_same_model():
    raw, _ = case_configuration("v32-groups-yarn")
    written = ModelConfig.from_dict(raw).to_dict()
    weights, tokens = RandomWeights(FIRST_SEED), random_tokens(raw, 8)
    models = (their().reference_model(config, weights) for config in (written, raw))
    np.testing.assert_array_equal(*(their().reference_logits(model, tokens) for model in models))
