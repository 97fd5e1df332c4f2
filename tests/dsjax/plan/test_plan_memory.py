"""Weights are exact to the byte; the cache holds what is left."""

import dataclasses

import pytest
from step_models import options_for

from dsjax.config import load_config
from dsjax.config.weights import PACKED
from dsjax.model.parameter_counts import parameter_counts
from dsjax.model.parameter_table import abstract_parameters
from dsjax.plan.engine import ENGINES, find_engine
from dsjax.plan.figure import assumed, spread
from dsjax.plan.fit import fit_mesh
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import memory, weight_bytes
from dsjax.plan.precision import PRECISIONS


def test_dp_32_holds_the_active_parameters_and_nothing_else(v3):
    found = weight_bytes(v3, parse_layout("dp=32", 0, v3), PRECISIONS["bf16"])
    biases = v3.num_moe_layers * v3.n_routed_experts
    assert sum(found.values()) == 2 * parameter_counts(v3)["active"] + 2 * biases == 75_104_624_640  # float32 biases


def test_heads_widths_and_vocabulary_are_divided_over_tp_and_nothing_else(v3):
    whole = weight_bytes(v3, parse_layout("dp=8", 0, v3), PRECISIONS["bf16"])
    split = weight_bytes(v3, parse_layout("tp=8", 0, v3), PRECISIONS["bf16"])
    norm = 2 * v3.hidden_size
    assert (whole["embedding and head"] - norm) == 8 * (split["embedding and head"] - norm)
    for part, divided in (("dense MLP", 8), ("shared experts", 8), ("experts", 1), ("router", 1)):
        assert whole[part] == divided * split[part]
    assert whole["attention"] / 8 < split["attention"] < whole["attention"] / 4


def test_a_fused_shared_expert_is_whole_on_each_device_that_holds_whole_experts(v3):
    def shared(mesh, fused):
        layout = dataclasses.replace(parse_layout(mesh, None, v3), fused=fused)
        return weight_bytes(v3, layout, PRECISIONS["fp8"])["shared experts"]

    assert shared("dp=8", True) == shared("dp=8", False)
    assert shared("tp=8", True) == shared("dp=8", False) > 7.9 * shared("tp=8", False)
    assert shared("tp=8,ep=1", True) == shared("tp=8,ep=1", False)


@pytest.mark.parametrize(
    ("model", "weights"),
    [*(("deepseek-v3", one) for one in (*PACKED, "fp8", "bf16")), ("deepseek-v3.2", "bf16"), ("deepseek-v3.2", "fp8")],
)
def test_weights_of_one_device_are_those_of_the_programs_parameters_to_the_byte(model, weights):
    config, kept = load_config(model), find_engine("dsjax").precision(PRECISIONS[weights])
    found = weight_bytes(config, parse_layout("dp=1", 0, config), kept)
    infos = abstract_parameters(config, weights=weights, platform="any", mtp=False)
    assert sum(found.values()) == sum(info.nbytes for info in infos.values())


def test_the_largest_batch_fills_what_weights_and_reserve_leave(v3):
    def found():
        aside = assumed(7e9, 5e9, 9e9, "set aside", "a test's")
        return memory(v3, parse_layout("dp=32", 0, v3), PRECISIONS["fp8"], 96_000_000_000, aside)

    each = 32_768
    held = found().max_batch(each)
    left = 96e9 - found().weights_total - found().reserve
    assert held * each * 61 * 1152 <= left < (held + 1) * each * 61 * 1152
    [tokens] = spread(lambda: [found().cache_tokens])
    assert tokens.low < tokens == found().cache_tokens < tokens.high


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("cluster", "mesh"), [("h20-32", "tp=8"), ("h20-32", "dp=32"), ("h200-8", "dp=8")])
def test_a_plan_has_the_cache_that_fit_gives_at_the_greatest_fraction_that_fits(ask, engine, cluster, mesh):
    """Fractions are tried in hundredths of a device."""
    question = ask(cluster, options=options_for(engine))
    instance = question.instance(parse_layout(mesh, 0, question.config), {})
    greatest = fit_mesh(question, mesh, fit_mesh(question, mesh).fractions[1])
    apart = instance.memory.cache_tokens - greatest.cache_tokens
    assert 0 <= apart * instance.memory.cache_per_token <= 0.0101 * question.cluster.hardware.visible_bytes
