"""What the pages show how to add works as it stands there: each example is one file, and touches no other."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from dispatch_cases import D, K, coded_rows, compiled, expected, routings, weights_of
from goldens.our_model import COMPILE_QUICKLY, bound, logits_of
from goldens.random_weights import RandomWeights
from layouts import TINY, answer, hf_tensors, prompts, write_checkpoint
from step_model import Model, tensors

from dsjax import LLM
from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig, load_config
from dsjax.errors import UserError
from dsjax.model.mla_costs import mla_cost
from dsjax.model.parameter_table import parameter_table
from sharding import MeshError
from sharding.dispatch import DispatchConfig, Method, dispatch_collectives

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
MOST_LINES = {"half_absorbed_form": 80, "hash_router": 40, "kept_pages": 120, "ring_dispatch": 80}


def example(name: str):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_is_a_short_file():
    lines = {file.stem: len(file.read_text().splitlines()) for file in EXAMPLES.glob("*.py")}
    assert lines.keys() == MOST_LINES.keys()
    assert all(count <= MOST_LINES[name] for name, count in lines.items())


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


def test_a_dispatch_method_with_a_member_that_nothing_calls_or_without_a_needed_one_is_refused():
    ring = example("ring_dispatch").Ring
    own = {name: vars(ring)[name] for name in ("name", "of", "prepare", "add", "collectives")}
    old = type("Old", (Method,), own | {"there": ring.send, "back": ring.answer, "_own": 1})
    needed = "name, of, collectives, prepare, compute, add, optionally .*dispatch_stages, combine_stages"
    with pytest.raises(MeshError, match=f"method Old lacks compute and has back, there; expected {needed}"):
        DispatchConfig(method=old)
    with pytest.raises(MeshError, match="a class that inherits sharding"):
        DispatchConfig(method=type("Other", (), {"keeps_choices": False}))


def hashed(tokens):
    """What a token's experts are, reckoned apart from the example."""
    experts, choices = TINY["n_routed_experts"], TINY["num_experts_per_tok"]
    first = [(int(token) * 2654435761 % 2**32 >> 16) % experts for token in tokens]
    return [[(one + k * (experts // choices)) % experts for k in range(choices)] for one in first]


def test_a_router_of_ones_own_routes_the_plain_forward_pass_by_token_ids():
    config = ModelConfig.from_dict(TINY | {"num_nextn_predict_layers": 1})
    config = dataclasses.replace(config, router=example("hash_router").HashRouter)
    table = parameter_table(config, weights="f32")
    params = from_hf_tensors(config, hf_tensors(config, RandomWeights(7)))
    tokens = np.array([[5, 90, 17, 17, 2]])
    main = jax.jit(lambda p: table.bind(p)(tokens), compiler_options=COMPILE_QUICKLY)(params)
    assert main.routing.ids[:, 0].tolist() == [hashed(tokens[0])] * config.num_moe_layers
    np.testing.assert_allclose(main.routing.weights.sum(-1), config.routed_scaling_factor, rtol=1e-6)
    further = jax.jit(lambda p: table.bind(p).predict_further(main.hidden[:, :-1], tokens[:, 1:]))(params)
    assert further.routing.ids[0].tolist() == hashed(tokens[0, 1:])


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2,tp=2", {}), ("dp=2", {}), ("dp=4", {"kernels": "plain"})], ids=str
)
def test_a_step_routes_with_it_as_the_plain_forward_pass_does(mesh, options):
    config = dataclasses.replace(ModelConfig.from_dict(TINY), router=example("hash_router").HashRouter)
    table, one = parameter_table(config, weights="f32", mtp=False), Model(mesh, config, report=True, **options)
    tokens = np.array([5, 90, 17, 17, 2, 44])
    plain = jax.jit(lambda p: table.bind(p)(tokens[None]))(from_hf_tensors(config, tensors(config), mtp=False))
    logits, _ = one.run(one.empty_cache(), [one.prefill([(tokens.tolist(), 0, [1, 2])], [])])
    np.testing.assert_allclose(logits[0, 0], plain.logits[0, -1], atol=1e-4 * np.abs(plain.logits).max())
    counts = np.asarray(one.reports["tokens_per_expert"]).reshape(config.num_moe_layers, -1, config.n_routed_experts)
    np.testing.assert_array_equal(counts.sum(1), [np.bincount(np.ravel(hashed(tokens)), minlength=32)] * len(counts))


@pytest.mark.slow
def test_an_engine_serves_with_a_router_and_a_dispatch_of_ones_own_and_drafts_by_them(tmp_path):
    router, ring = example("hash_router").HashRouter, example("ring_dispatch").Ring
    checkpoint = write_checkpoint(tmp_path, mtp=True)
    with pytest.raises(UserError, match="router does not go with --record-steps"):
        LLM(model=str(checkpoint), router=router, record_steps=str(tmp_path / "steps"))
    config = dataclasses.replace(ModelConfig.from_dict(TINY | {"num_nextn_predict_layers": 1}), router=router)
    tokens = np.array([prompts()[-1]["prompt_token_ids"]])
    plain = logits_of(config, hf_tensors(config, RandomWeights(7, bias_center=-0.2)), tokens)[0]
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    one = answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", router=router)
    found = answer(checkpoint, "dp=8", ring, "CC", "A_CC_ME", router=router, speculative_config=drafts)
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
    sizes = {"rows": 1, "chunk": 1, "context": 4096}
    expanded, half, absorbed = (mla_cost(config, form, **sizes) for form in ("CC", own, "A_CC_ME"))
    assert expanded.attention_flops < half.attention_flops < absorbed.attention_flops
    assert expanded.expansion_flops == 2 * half.expansion_flops, "W^UK and W^UV are as wide as one another"
    assert expanded.flops > half.flops > absorbed.flops


def test_what_is_no_method_or_no_router_is_refused_with_what_one_is():
    for wrong in (int, "ring"):
        with pytest.raises(MeshError, match=r"expected one of .* or a class that inherits sharding\.dispatch\.Method"):
            DispatchConfig(method=wrong)
    with pytest.raises(UserError, match=r"router is int; expected a class that inherits .*\.ExpertRouter"):
        Model("dp=1", ModelConfig.from_dict(TINY), router=int)
