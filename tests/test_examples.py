"""What the pages show how to add works as it stands there: each example is one file, and touches no other."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from goldens.our_model import bound, logits_of
from goldens.random_weights import RandomWeights
from layouts import TINY, answer, hf_tensors, prompts, write_checkpoint
from step_model import Model, tensors

from dsjax.config import ModelConfig, load_config
from dsjax.model.mla_costs import mla_cost
from sharding import MeshError
from sharding.dispatch import DispatchConfig, dispatch_collectives

sys.path.insert(0, str(Path(__file__).parent / "sharding"))
from dispatch_cases import D, K, coded_rows, compiled, expected, routings, weights_of

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


@pytest.mark.parametrize("layout", ["dp=2", "dp=1,tp=2"])
def test_a_form_of_ones_own_gives_the_logits_of_the_plain_forward_pass(layout):
    form, config = example("half_absorbed_form").HalfAbsorbed, ModelConfig.from_dict(TINY)
    one = Model(layout, config, mla_prefill=form, mla_decode=form)
    assert one.step.implementations["decode attention"] == "plain"
    prompt, answer = [5, 17, 2, 60, 33, 8], [7, 41]
    found, cache = one.run(one.empty_cache(), [one.prefill([(prompt, 0, [1, 2])])])
    logits = [found[0, 0]]
    for position, token in enumerate(answer, len(prompt)):
        found, cache = one.run(cache, [one.decode([([token], position, [1, 2])])])
        logits.append(found[0, 0])
    expected = logits_of(config, tensors(config), np.array([prompt + answer]))[0, len(prompt) - 1 :]
    assert np.abs(np.stack(logits) - expected).max() <= bound(expected)


def test_its_costs_lie_between_those_of_expanded_and_of_absorbed_attention():
    own, config = example("half_absorbed_form").HalfAbsorbed(), load_config("deepseek-v3")
    expanded, half, absorbed = (
        mla_cost(config, form, rows=1, chunk=1, context=4096) for form in ("CC", own, "A_CC_ME")
    )
    assert expanded.attention_flops < half.attention_flops < absorbed.attention_flops
    assert expanded.expansion_flops == 2 * half.expansion_flops, "W^UK and W^UV are as wide as one another"
    assert expanded.flops > half.flops > absorbed.flops


@pytest.mark.slow
def test_an_engine_serves_with_such_a_form_and_names_it(checkpoint, plain):
    form = example("half_absorbed_form").HalfAbsorbed
    found = answer(checkpoint, "dp=2", "auto", "CC", form)
    assert not found.exact
    np.testing.assert_allclose(found.logits, plain, atol=1e-4 * max(1, np.abs(plain).max()))


@pytest.mark.parametrize("wrong", [int, "ring"])
def test_what_is_no_method_is_refused_with_what_a_method_is(wrong):
    with pytest.raises(MeshError, match=r"expected one of .* or a class that inherits sharding\.dispatch\.Method"):
        DispatchConfig(method=wrong)
