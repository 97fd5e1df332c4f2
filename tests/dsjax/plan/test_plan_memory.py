"""Weights are exact to the byte; the cache holds what is left."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import pytest

from dsjax.config.weights import PACKED
from dsjax.model.parameter_counts import parameter_counts
from dsjax.model.transformer import abstract_parameters
from dsjax.plan.engine import dsjax_engine
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token, memory, weight_bytes
from dsjax.plan.precision import PRECISIONS

REFERENCE = Path(__file__).parents[3] / ".." / "shared" / "reference" / "deepseek-r1.tensors.json.gz"
_ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def test_bf16_weights_of_one_device_are_two_bytes_for_each_parameter(v3):
    found = weight_bytes(v3, parse_layout("dp=1", 0, v3), PRECISIONS["bf16"])
    biases = v3.num_moe_layers * v3.n_routed_experts
    assert sum(found.values()) == 2 * parameter_counts(v3)["main_model"] + 2 * biases  # float32 biases


def test_dp_32_holds_the_active_parameters_and_nothing_else(v3):
    found = weight_bytes(v3, parse_layout("dp=32", 0, v3), PRECISIONS["bf16"])
    biases = v3.num_moe_layers * v3.n_routed_experts
    assert sum(found.values()) == 2 * parameter_counts(v3)["active"] + 2 * biases == 75_104_624_640


def test_the_circulating_42_1_gb_are_fp8_with_32_redundant_experts(v3):
    found = weight_bytes(v3, parse_layout("dp=32", 32, v3), PRECISIONS["fp8"])
    assert round(sum(found.values()) / 1e9, 1) == 42.1


def test_heads_widths_and_vocabulary_are_divided_over_tp_and_nothing_else(v3):
    whole = weight_bytes(v3, parse_layout("dp=8", 0, v3), PRECISIONS["bf16"])
    split = weight_bytes(v3, parse_layout("tp=8", 0, v3), PRECISIONS["bf16"])
    norm = 2 * v3.hidden_size
    assert (whole["embedding and head"] - norm) == 8 * (split["embedding and head"] - norm)
    assert whole["dense MLP"] == 8 * split["dense MLP"]
    assert whole["shared experts"] == 8 * split["shared experts"]
    assert whole["experts"] == split["experts"]
    assert whole["router"] == split["router"]
    assert whole["attention"] / 8 < split["attention"] < whole["attention"] / 4


def test_a_fused_shared_expert_is_whole_on_each_device_that_holds_whole_experts(v3):
    def shared(mesh, fused):
        layout = dataclasses.replace(parse_layout(mesh, None, v3), fused=fused)
        return weight_bytes(v3, layout, PRECISIONS["fp8"])["shared experts"]

    assert shared("dp=8", True) == shared("dp=8", False)
    assert shared("tp=8", True) == shared("dp=8", False) > 7.9 * shared("tp=8", False)
    assert shared("tp=8,ep=1", True) == shared("tp=8,ep=1", False)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the real tensor list is not here")
def test_fp8_weights_of_one_device_are_those_of_the_real_checkpoint_to_the_byte(v3):
    listed = json.loads(gzip.decompress(REFERENCE.read_bytes()))
    tensors = listed.get("tensors", listed) if isinstance(listed, dict) else listed
    rows = tensors.items() if isinstance(tensors, dict) else ((t[0], t[1:]) for t in tensors)
    total = 0
    for name, facts in rows:
        dtype, shape = (facts["dtype"], facts["shape"]) if isinstance(facts, dict) else facts[:2]
        if name.startswith("model.layers.61."):
            continue  # the MTP module
        total += _ITEMSIZE[dtype] * math.prod(shape)
    found = weight_bytes(v3, parse_layout("dp=1", 0, v3), PRECISIONS["fp8"])
    assert sum(found.values()) == total


@pytest.mark.parametrize("weights", PACKED)
def test_fp4_weights_of_one_device_are_those_of_the_programs_parameters_to_the_byte(v3, weights):
    kept = dsjax_engine().precision(PRECISIONS[weights])
    found = weight_bytes(v3, parse_layout("dp=1", 0, v3), kept)
    infos = abstract_parameters(v3, weights=weights, platform="any", mtp=False)
    assert sum(found.values()) == sum(info.nbytes for info in infos.values())


def test_the_cache_takes_1152_bytes_a_token_and_layer(v3):
    assert cache_bytes_per_token(v3, PRECISIONS["fp8"]) == 61 * 1152


def test_the_largest_batch_fills_what_weights_and_reserve_leave(v3):
    found = memory(v3, parse_layout("dp=32", 0, v3), PRECISIONS["fp8"], 96_000_000_000)
    each = 32_768
    held = found.max_batch(each)
    left = 96e9 - found.weights_total - found.reserve.value
    assert held * each * 61 * 1152 <= left < (held + 1) * each * 61 * 1152
    assert found.cache_tokens.low < found.cache_tokens.value < found.cache_tokens.high
