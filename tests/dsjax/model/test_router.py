"""Routing against a reference that works through one token at a time."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsjax.config import ModelConfig
from dsjax.model.router import route

E, GROUPS = 24, 6

BASE = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    kv_lora_rank=4,
    qk_nope_head_dim=2,
    qk_rope_head_dim=2,
    v_head_dim=2,
    moe_intermediate_size=4,
    n_routed_experts=E,
    num_experts_per_tok=5,
    n_group=GROUPS,
    topk_group=2,
    routed_scaling_factor=2.5,
)
V2 = dataclasses.replace(
    BASE,
    model_type="deepseek_v2",
    scoring_func="softmax",
    topk_method="group_limited_greedy",
    norm_topk_prob=False,
    topk_group=3,
)
CONFIGS = {
    "noaux_tc": BASE,
    "noaux_tc, one group": dataclasses.replace(BASE, n_group=1, topk_group=1),
    "noaux_tc, all groups": dataclasses.replace(BASE, topk_group=GROUPS),
    "noaux_tc, not normalised": dataclasses.replace(BASE, norm_topk_prob=False),
    "noaux_tc, one expert": dataclasses.replace(BASE, num_experts_per_tok=1),
    "noaux_tc, every expert of the groups": dataclasses.replace(BASE, num_experts_per_tok=8),
    "greedy": dataclasses.replace(V2, topk_method="greedy"),
    "group_limited_greedy": V2,
    "group_limited_greedy, one group": dataclasses.replace(V2, topk_group=1, num_experts_per_tok=4),
}


def by_token(logits, bias, config):
    """(ids, weights) of each token in float64: the best come first, the lower index of equals."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        if config.scoring_func == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        choice = scores + (0 if bias is None else bias)
        candidates = list(range(E))
        if config.topk_method != "greedy":
            members = np.arange(E).reshape(config.n_group, -1)
            best = 2 if config.topk_method == "noaux_tc" else 1
            group_scores = [np.sort(choice[own])[::-1][:best].sum() for own in members]
            kept = sorted(range(config.n_group), key=lambda g: (-group_scores[g], g))[: config.topk_group]
            candidates = [int(e) for g in sorted(kept) for e in members[g]]
        chosen = sorted(candidates, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
        own = scores[chosen]
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            own = own / own.sum()
        ids.append(chosen)
        weights.append(own * config.routed_scaling_factor)
    return np.array(ids), np.array(weights)


@functools.cache
def program(config):
    return jax.jit(lambda logits, bias: route(logits, bias, config))


def routed(logits, bias, config):
    return jax.device_get(program(config)(logits, bias))


def logits_and_bias(config, seed, bias_center=0.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(200, E)).astype(np.float32)
    bias = None if config.scoring_func == "softmax" else rng.uniform(-0.5, 0.5, E).astype(np.float32) + bias_center
    return logits, None if bias is None else bias.astype(np.float32)


@pytest.mark.parametrize("bias_center", [0.0, -0.3, -5.0, 5.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_and_weights_are_those_of_the_reference(name, bias_center):
    config = CONFIGS[name]
    logits, bias = logits_and_bias(config, 0, bias_center)
    ids, weights = by_token(logits, bias, config)
    found = routed(logits, bias, config)
    np.testing.assert_array_equal(found.ids, ids)
    # float32 sigmoid or softmax against float64, times 2.5
    np.testing.assert_allclose(found.weights, weights, rtol=3e-6)


def test_the_groups_matter_in_these_cases():
    for name in ("noaux_tc", "group_limited_greedy"):
        config = CONFIGS[name]
        logits, bias = logits_and_bias(config, 0)
        free = dataclasses.replace(config, n_group=1, topk_group=1)
        assert np.any(np.sort(by_token(logits, bias, config)[0]) != np.sort(by_token(logits, bias, free)[0]))


def test_masked_groups_never_win_with_negative_bias():
    # Every choice score is below 0: masking with 0 would let the experts of masked groups win.
    logits, bias = logits_and_bias(BASE, 1, bias_center=-3.0)
    found = routed(logits, bias, BASE)
    assert np.all(found.scores + bias < 0)
    groups = found.ids // (E // GROUPS)
    assert max(len(set(row)) for row in groups) <= BASE.topk_group
    assert all(len(set(row)) == BASE.num_experts_per_tok for row in found.ids)


def test_the_bias_chooses_experts_but_is_never_in_their_weights():
    config = CONFIGS["noaux_tc, one group"]
    logits = np.zeros((1, E), np.float32)
    logits[0, :6] = [5, 4, 3, 2, 1, 0.5]
    bias = np.zeros(E, np.float32)
    bias[20:] = 9.0  # four experts that the scores alone would not choose
    found = routed(logits, bias, config)
    assert set(found.ids[0]) == {20, 21, 22, 23, 0}
    scores = 1 / (1 + np.exp(-logits[0, found.ids[0]].astype(np.float64)))
    np.testing.assert_allclose(found.weights[0], 2.5 * scores / scores.sum(), rtol=1e-6)
    # A bias that is the same for all changes nothing at all.
    for same in (-7.0, 7.0):
        moved = routed(logits, bias + np.float32(same), config)
        np.testing.assert_array_equal(moved.weights, found.weights)


def test_of_equals_the_lower_index_is_taken_first():
    logits = np.zeros((1, E), np.float32)
    found = routed(logits, np.zeros(E, np.float32), BASE)
    assert found.ids[0].tolist() == [0, 1, 2, 3, 4]  # the first two groups of four, in order
    np.testing.assert_allclose(found.weights[0], 0.5, rtol=1e-6)
    logits[0, [9, 17]] = 1.0  # groups 2 and 4
    assert routed(logits, np.zeros(E, np.float32), BASE).ids[0].tolist() == [9, 17, 8, 10, 11]


def test_a_group_is_scored_by_its_two_best_or_by_its_best():
    scores = np.full((1, E), -4.0, np.float32)
    scores[0, 0] = 2.0  # group 0 has the single best expert,
    scores[0, [4, 5, 8, 9]] = 1.0  # groups 1 and 2 have the best pairs
    pairs = routed(scores, np.zeros(E, np.float32), dataclasses.replace(BASE, num_experts_per_tok=4))
    assert set(pairs.ids[0]) == {4, 5, 8, 9}
    single = routed(scores, None, dataclasses.replace(V2, topk_group=2, num_experts_per_tok=3))
    assert set(single.ids[0]) == {0, 4, 5}


def test_weights_stay_finite_where_all_scores_underflow():
    found = routed(np.full((1, E), -200.0, np.float32), np.zeros(E, np.float32), BASE)
    assert np.all(np.isfinite(found.weights))


def test_leading_dimensions_are_kept():
    logits, bias = logits_and_bias(BASE, 2)
    flat, shaped = routed(logits, bias, BASE), routed(logits.reshape(4, 10, 5, E), bias, BASE)
    assert shaped.ids.shape == (4, 10, 5, 5)
    np.testing.assert_array_equal(shaped.ids.reshape(flat.ids.shape), flat.ids)
    np.testing.assert_array_equal(shaped.weights.reshape(flat.weights.shape), flat.weights)


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_kernel_chooses_the_same_to_the_bit(kernels, name, rows):
    config = CONFIGS[name]
    logits, bias = logits_and_bias(config, 4)
    logits[::3] = np.round(logits[::3])  # ties
    logits[7] = -200.0  # all scores underflow
    chosen = jax.jit(lambda logits, bias: route(logits, bias, config, kernels.native))(logits[:rows, None], bias)
    for found, expected in zip(chosen, routed(logits[:rows, None], bias, config), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_native_kernel_takes_more_rows_than_one_thread(kernels, threads):
    logits = np.random.default_rng(5).normal(size=(3000, E)).astype(np.float32)
    native = dataclasses.replace(kernels.native, threads=threads)
    chosen = jax.jit(lambda logits, bias: route(logits, bias, BASE, native))(logits, np.zeros(E, np.float32))
    for found, expected in zip(chosen, routed(logits, np.zeros(E, np.float32), BASE), strict=True):
        np.testing.assert_array_equal(found, expected)
