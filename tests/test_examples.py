"""What the pages show how to add works as it stands there: each example is one file, and touches no other."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from dispatch_cases import D, K, coded_rows, compiled, expected, routings, weights_of
from goldens.our_model import logits_of
from goldens.random_weights import RandomWeights
from layouts import TINY, answer, hf_tensors, prompts, write_checkpoint

from dsjax.config import ModelConfig
from sharding import MeshError
from sharding.dispatch import DispatchConfig, dispatch_collectives

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
MOST_LINES = 80


def example(name: str):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def plain():
    """Logits of the longest prompt from the model's plain forward pass."""
    config = ModelConfig.from_dict(TINY | {"num_nextn_predict_layers": 0})
    tensors = hf_tensors(config, RandomWeights(7, bias_center=-0.2))
    return logits_of(config, tensors, np.array([prompts()[-1]["prompt_token_ids"]]))[0]


def test_every_example_is_a_short_file():
    files = list(EXAMPLES.glob("*.py"))
    assert files
    for file in files:
        assert len(file.read_text().splitlines()) <= MOST_LINES, file.name


@pytest.mark.parametrize("by_choice", [False, True])
@pytest.mark.parametrize("layout", ["dp=8", "dp=2,tp=4", "dp=8,tp=2,ep=4,etp=4"])
def test_a_dispatch_method_of_ones_own_gives_the_sums_of_one_device(layout, by_choice):
    ring = example("ring_dispatch").Ring
    config = DispatchConfig(ring, report=True, by_choice=by_choice)
    spec, call = compiled(layout, config, experts=32)
    tokens = 3 * spec.num_devices
    x, weights = coded_rows(tokens), weights_of(tokens)
    for name, slots in routings(tokens, 32, spec.num_devices).items():
        y, report = call(x, slots, weights)
        np.testing.assert_array_equal(y, expected(x, slots, weights), err_msg=name)
        assert np.sum(report["tokens_per_expert"]) == spec.expert_width_shards * np.sum(slots >= 0)
    shape = {"tokens": 3, "width": D, "top_k": K, "experts": 32, "dtype": np.dtype(np.float32), "platform": "cpu"}
    kinds = {one.kind for one in dispatch_collectives(spec, config, **shape)}
    pooled = {"all_gather", "all_to_all" if by_choice else "reduce_scatter"} if spec.expert_width_shards > 1 else set()
    assert kinds == {"collective_permute"} | pooled


@pytest.mark.slow
def test_an_engine_serves_with_it_and_has_one_devices_bits(checkpoint, plain):
    ring = example("ring_dispatch").Ring
    found, one = (answer(checkpoint, mesh, way, "CC", "A_CC_ME") for mesh, way in (("dp=8", ring), ("dp=1", "auto")))
    np.testing.assert_allclose(found.logits, plain, atol=1e-4 * max(1, np.abs(plain).max()))
    assert found.tokens == one.tokens
    assert found.logprobs == one.logprobs


@pytest.mark.parametrize("wrong", [int, "ring"])
def test_what_is_no_method_is_refused_with_what_a_method_is(wrong):
    with pytest.raises(MeshError, match=r"expected one of .* or a class that inherits sharding\.dispatch\.Method"):
        DispatchConfig(method=wrong)
