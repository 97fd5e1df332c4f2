"""Costs of DeepSeek-V4's attention: the report's claims, what a query sees position by position, and the model's own shapes."""

import math
from dataclasses import replace

import pytest

from dsjax.config import load_config
from dsjax.config.layers import kinds_of
from dsjax.model.compressed.costs import compressed_cost, seen
from dsjax.model.layer_costs import attention_cost, values_beside
from dsjax.model.parameter_counts import expert_parameters
from dsjax.model.parameter_table import abstract_parameters
from dsjax.plan.memory import cache_bytes_per_token
from dsjax.plan.precision import FP8_CACHE, PRECISIONS
from sharding import fp8

V32, FLASH, PRO = map(load_config, ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro"))
MILLION = 1 << 20
# Bytes as the reports have them: 448 FP8 values with 8 of scales and 64 in bf16, index keys of 128 values in FP4 with 4 of scales; of V3.2
# 512 FP8 values with 4 float32 scales and 64 in bf16, index keys of 128 FP8 values with one. Window pages do not grow.
ENTRY, KEY, V32_TOKEN = 448 + 8 + 128, 64 + 4, 61 * (512 + 16 + 128 + 128 + 4)


@pytest.mark.parametrize(
    ("config", "first", "second", "claimed"), [(FLASH, 21, 20, 0.07), (PRO, 30, 31, 0.10)], ids=["flash", "pro"]
)
def test_a_cached_token_takes_the_share_of_v32s_that_the_report_claims(config, first, second, claimed):
    token = first * (ENTRY + KEY) / 4 + second * ENTRY / 128
    assert token / V32_TOKEN == pytest.approx(claimed, abs=0.005)
    in_fp8 = replace(PRECISIONS["bf16"], cache=FP8_CACHE)
    assert cache_bytes_per_token(config, in_fp8) == int(token)
    assert cache_bytes_per_token(V32, in_fp8) == V32_TOKEN


def fp8_operations(config, context, index):
    """Operations of a decoded token as of FP8 products: attention in bf16 takes twice as long; index: of index scores."""
    total = config.hidden_size * config.vocab_size * 2
    for kind, count in kinds_of(config.layer_runs):
        cost = attention_cost(config, kind.attention, "A_CC_ME", rows=1, chunk=1, context=context)
        experts = config.num_experts_per_tok * expert_parameters(config) if kind.routed else 0
        total += count * (cost.linear_flops + 2 * cost.attention_flops + index * cost.index_flops)
        total += count * 2 * (values_beside(config, kind) + experts)
    return total


@pytest.mark.parametrize(("config", "claimed"), [(FLASH, 0.10), (PRO, 0.27)], ids=["flash", "pro"])
def test_a_token_at_a_million_takes_the_share_of_v32s_operations_that_the_report_claims(config, claimed):
    """The report counts in FP8, in which V3.2 scores; V4 scores in FP4."""
    share = fp8_operations(config, MILLION, index=0.5) / fp8_operations(V32, MILLION, index=1)
    assert share == pytest.approx(claimed, abs=0.01)


@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
@pytest.mark.parametrize(
    ("before", "chunk"), [(0, 1), (0, 7), (126, 3), (127, 1), (4000, 1), (2040, 300), (10**5, 513)]
)
def test_the_mean_query_sees_what_each_of_them_does(kind, before, chunk):
    ends = range(before + 1, before + chunk + 1)
    entries = [end // {"window": MILLION, "csa": 4, "hca": 128}[kind] for end in ends]
    scored = kind == "csa" and entries[-1] > 512
    expected = (
        sum(min(end, 128) for end in ends) / chunk,
        sum(min(each, 512) if kind == "csa" else each for each in entries) / chunk,
        sum(entries) / chunk if scored else 0,
    )
    assert seen(FLASH, kind, before, chunk) == pytest.approx(expected)


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_a_token_is_multiplied_once_by_each_matrix(config):
    infos = abstract_parameters(config, weights="f32", mtp=False)
    for kind, count in kinds_of(config.layer_runs):
        sizes = {path: math.prod(info.shape) for path, info in infos.items() if path.startswith(f"{kind.stack}.attn.")}
        matrices = sum(size for path, size in sizes.items() if path.endswith("weight")) // count
        cost = compressed_cost(config, kind.attention, rows=2, chunk=3, context=9)
        assert (cost.linear_flops, cost.weight_bytes) == (2 * 6 * matrices, 2 * matrices)


def test_heads_and_their_groups_are_divided_over_tp_and_compressors_are_not():
    alone, shared = (compressed_cost(PRO, "csa", rows=1, chunk=1, context=65_536, tp=tp) for tp in (1, 8))
    assert shared.attention_flops * 8 == alone.attention_flops
    assert shared.index_flops == alone.index_flops == 2 * 16_384 * 64 * 129
    assert shared.cache_read_bytes == alone.cache_read_bytes
    whole = 7168 * (1536 + 512 + 2 * 2 * (512 + 128) + 64) + 1536 * 64 * 128
    assert shared.linear_flops - 2 * whole == (alone.linear_flops - 2 * whole) / 8


def test_a_decode_reads_its_window_its_entries_and_the_keys_that_choose_them():
    def read(kind, context, dtype=fp8.E4M3):
        return compressed_cost(FLASH, kind, rows=1, chunk=1, context=context, cache_dtype=dtype).cache_read_bytes

    first, second = 4 * 6 * (512 + 128), 4 * 3 * 512  # states of unfinished windows
    assert read("window", 100) == 100 * ENTRY
    assert read("hca", 12_800) == (128 + 100) * ENTRY + second
    assert read("csa", 2048) == (128 + 512) * ENTRY + first, "all entries are read in order: no key"
    assert read("csa", 4096) == (128 + 512) * ENTRY + 1024 * KEY + first
