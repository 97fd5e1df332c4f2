"""Times of sparse attention: they grow with the context far less than dense attention's, and stand on its weights and cache."""

from dataclasses import replace

import pytest
from step_models import step_model

from dsjax.config import load_config
from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token
from dsjax.plan.precision import FP8_CACHE, PRECISIONS
from dsjax.plan.sparse import mean_chosen
from dsjax.plan.step import StepModel

V3, V32 = load_config("deepseek-v3"), load_config("deepseek-v3.2")


def step(config, mesh="dp=8", **options) -> StepModel:
    return step_model(config, load_cluster("h200-8"), parse_layout(mesh, 0, config), PRECISIONS["fp8"], **options)


@pytest.mark.parametrize(("topk", "cached", "prompt"), [(8, 0, 5), (8, 0, 20), (8, 3, 20), (8, 30, 20), (8, 7, 1)])
def test_the_mean_chosen_is_the_mean_over_a_prompts_positions(topk, cached, prompt):
    seen = [min(topk, cached + position + 1) for position in range(prompt)]
    assert mean_chosen(topk, cached, prompt) == pytest.approx(sum(seen) / prompt)


def test_a_cached_token_has_its_index_key_in_the_caches_own_format():
    assert cache_bytes_per_token(V32, PRECISIONS["fp8"]) == 61 * (1152 + 256)
    assert cache_bytes_per_token(V32, replace(PRECISIONS["fp8"], cache=FP8_CACHE)) == 61 * (656 + 132)


@pytest.mark.parametrize("mesh", ["dp=8", "tp=8"])
def test_up_to_index_topk_a_step_takes_v3s_time_and_the_projections(mesh):
    dense, sparse = (step(config, mesh).attention(16, 16 * 2048.0, 2048.0, True) for config in (V3, V32))
    assert sparse == dense
    assert step(V32, mesh).decode(16, 2048) > step(V3, mesh).decode(16, 2048)


def test_a_long_context_costs_decode_a_fraction_of_dense_attention():
    def grown(config):
        return step(config).decode(16, 131_072) - step(config).decode(16, 4096)

    assert 0 < grown(V32) < 0.35 * grown(V3)


@pytest.mark.parametrize("decode", [True, False])
def test_times_grow_with_the_context(decode):
    model = step(V32, shared={})
    contexts = [2048, 2049, 4096, 8192, 32768, 131_072]
    if decode:
        times = [model.decode(16, context) for context in contexts]
    else:
        times = [model.prefill(2048, prompt=2048, cached=context) for context in contexts]
    assert times == sorted(times)


def test_a_prompt_takes_the_faster_of_masking_and_gathering():
    near, far = (step(V32).prefill(4096, prompt=4096, cached=cached) for cached in (0, 65_536))
    dense_near, dense_far = (step(V3).prefill(4096, prompt=4096, cached=cached) for cached in (0, 65_536))
    assert dense_near < near < 1.1 * dense_near
    assert far < 0.75 * dense_far
