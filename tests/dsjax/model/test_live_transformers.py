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

from goldens.configurations import case_configuration, draw
from goldens.our_model import (
    COMPILE_QUICKLY,
    bound,
    hf_tensors,
    logits_of,
    logits_of_parameters,
)
from goldens.random_weights import RandomWeights

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.load import load as load_checkpoint
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import ModelConfig
from dsjax.model.dense import forward, predict_further
from dsjax.model.rope import inverse_frequencies
from dsjax.model.transformer import parameter_table
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


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", "deepseek_v32"])
@pytest.mark.parametrize("draw_number", range(6))
def test_logits_equal_those_of_transformers(model_type, draw_number):
    rng = np.random.Generator(np.random.PCG64(FIRST_SEED + draw_number))
    raw, bias_center = draw(rng, {"model_type": model_type})
    tokens = random_tokens(raw, draw_number)
    weights, model = their().settled_weights(raw, bias_center, tokens, FIRST_SEED + 1000 * draw_number)
    reference = their().reference_logits(model, tokens)
    config = ModelConfig.from_dict(raw)
    logits = logits_of(config, hf_tensors(config, weights), tokens)
    assert np.abs(logits - reference).max() <= bound(reference), raw


@pytest.mark.parametrize(
    "name", ["v3-yarn", "v3-no-shared", "v3-tied", "v3-attention-bias", "v2-greedy-yarn", "v32-groups-yarn"]
)
def test_a_checkpoint_saved_by_transformers_gives_its_logits(name, tmp_path):
    raw, bias_center = case_configuration(name)
    # As transformers' V3 configuration has it unless told otherwise: it announces an MTP module and saves none.
    del raw["num_nextn_predict_layers"]
    tokens = random_tokens(raw, 7)
    _, model = their().settled_weights(raw, bias_center, tokens, FIRST_SEED)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.rope == ModelConfig.from_dict(raw).rope
    spec = MeshSpec.parse("dp=1")
    params = load_checkpoint(checkpoint.config, checkpoint, spec.build(jax.devices()[:1]), Rules.for_mesh(spec))
    reference = their().reference_logits(model, tokens)
    logits = logits_of_parameters(checkpoint.config, params, tokens)
    assert np.abs(logits - reference).max() <= bound(reference)


@pytest.mark.parametrize("name", ["v3-yarn-two-mscales", "v32-groups-yarn"])
def test_a_config_written_by_us_is_read_by_transformers_as_the_same_model(name):
    raw, _ = case_configuration(name)
    written = ModelConfig.from_dict(raw).to_dict()
    weights, tokens = RandomWeights(FIRST_SEED), random_tokens(raw, 8)
    ours, theirs = (
        their().reference_logits(their().reference_model(config, weights), tokens) for config in (written, raw)
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["v3-plain", "v3-yarn", "v3-yarn-not-truncated", "v3-yarn-step", "kimi-k2-like"])
def test_inverse_frequencies_are_those_of_transformers_to_the_bit(name):
    raw, _ = case_configuration(name)
    # Of V3's width, so that there are 32 of them.
    raw["qk_rope_head_dim"] = 64
    theirs = their().reference_model(raw, RandomWeights(FIRST_SEED)).model.rotary_emb
    rope = ModelConfig.from_dict(raw).rope
    ours = inverse_frequencies(rope, 64)
    # One unit in the last place is left where a product is rounded once or twice (1 of 160 values seen).
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1.2e-7)
    assert (ours == theirs.inv_freq.numpy()).mean() > 0.9
    assert rope.cos_sin_scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


# Of a module with sparse attention transformers has none (5.23).
@pytest.mark.parametrize("name", ["v3-groups"])
def test_the_mtp_module_equals_that_of_transformers(name):
    raw, bias_center = case_configuration(name)
    raw["num_nextn_predict_layers"] = 1
    tokens = random_tokens(raw, 9)
    weights, model = their().settled_weights(raw, bias_center, tokens, FIRST_SEED)
    reference = their().reference_mtp_logits(model, weights, tokens)
    config = ModelConfig.from_dict(raw)
    table = parameter_table(config, weights="f32")

    def further(params, tokens):
        states = forward(params, table, config, tokens[:, :-1]).hidden
        return predict_further(params, table, config, states, tokens[:, 1:]).logits

    params = from_hf_tensors(config, hf_tensors(config, weights))
    logits = jax.jit(further, compiler_options=COMPILE_QUICKLY)(params, tokens)
    assert np.abs(logits - reference).max() <= bound(reference)
