"""Routing against a reference that works through one token at a time."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from layouts import TINY

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from dsjax.kernels.table import Kernels
from dsjax.model.native_router import native_choice
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import Declaration, ParameterTable
from dsjax.model.router import ExpertRouter

E, GROUPS = 24, 6

ROUTED = {"n_routed_experts": E, "num_experts_per_tok": 5, "n_group": GROUPS, "topk_group": 2}
BASE = ModelConfig.from_dict(TINY | ROUTED)
OF_V2 = {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "group_limited_greedy"}
V2 = dataclasses.replace(BASE, **OF_V2, norm_topk_prob=False, topk_group=3)
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
        ids.append(chosen)
        weights.append(own / (own.sum() if config.norm_topk_prob else 1) * config.routed_scaling_factor)
    return np.array(ids), np.array(weights)


def bound(config, bias):
    """The router with this correction bias, and a weight that nobody reads."""
    table = ParameterTable.of(ExpertRouter(Declaration("f32", "cpu"), config))
    return table.bind({"weight": np.zeros(()), "bias": bias})


@functools.cache
def program(config, kernels=None):
    def choose(logits, bias):
        router = bound(config, bias)
        return (native_choice(kernels, router) if kernels else router.choose)(logits, None)

    return jax.jit(choose)


def routed(logits, bias, config):
    return jax.device_get(program(config)(logits, bias))


def logits_and_bias(config, seed, bias_center=0.0, rows=200):
    rng = np.random.default_rng(seed)
    logits, bias = rng.normal(size=(rows, E)).astype(np.float32), rng.uniform(-0.5, 0.5, E).astype(np.float32)
    return logits, None if config.scoring_func == "softmax" else bias + np.float32(bias_center)


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


def test_masked_groups_never_win_with_negative_bias():
    # Every choice score is below 0: masking with 0 would let the experts of masked groups win.
    logits, bias = logits_and_bias(BASE, 1, bias_center=-3.0)
    found = routed(logits, bias, BASE)
    assert np.all(found.scores + bias < 0)
    groups = found.ids // (E // GROUPS)
    assert max(len(set(row)) for row in groups) <= BASE.topk_group
    assert all(len(set(row)) == BASE.num_experts_per_tok for row in found.ids)


def test_of_equals_the_lower_index_is_taken_first_and_weights_stay_finite_where_all_scores_underflow():
    logits = np.zeros((1, E), np.float32)
    found = routed(logits, np.zeros(E, np.float32), BASE)
    assert found.ids[0].tolist() == [0, 1, 2, 3, 4]  # the first two groups of four, in order
    np.testing.assert_allclose(found.weights[0], 0.5, rtol=1e-6)
    logits[0, [9, 17]] = 1.0  # groups 2 and 4
    assert routed(logits, np.zeros(E, np.float32), BASE).ids[0].tolist() == [9, 17, 8, 10, 11]
    found = routed(np.full((1, E), -200.0, np.float32), np.zeros(E, np.float32), BASE)
    assert np.all(np.isfinite(found.weights))


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (3000, 3)])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_kernel_chooses_the_same_to_the_bit(kernels, name, rows, threads):
    config, native = CONFIGS[name], Kernels(dataclasses.replace(kernels.native, threads=threads))
    logits, bias = logits_and_bias(config, 4, rows=3000)
    logits[::3] = np.round(logits[::3])  # ties
    logits[7] = -200.0  # all scores underflow
    chosen = program(config, native)(logits[:rows, None], bias)
    for found, expected in zip(chosen, routed(logits[:rows, None], bias, config), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_method_or_a_router_that_the_native_kernel_does_not_have_is_left_to_xla(kernels):
    class Another(ExpertRouter):
        def choose(self, logits, tokens):
            return None

    declare, unknown = Declaration("f32", "cpu"), dataclasses.replace(BASE)
    object.__setattr__(unknown, "topk_method", "hash")
    known = ExpertRouter(declare, BASE)
    assert native_choice(kernels, known) is not None
    for router in (ExpertRouter(declare, unknown), Another(declare, BASE)):
        assert native_choice(kernels, router) is None
    assert native_choice(Kernels(), known) is None


def test_a_router_of_ones_own_is_limited_to_no_groups_and_what_is_none_is_refused():
    assert BASE.routed_groups == (GROUPS, 2)
    assert dataclasses.replace(BASE, router=ExpertRouter).routed_groups is None
    with pytest.raises(ConfigError, match="router is 'hash', expected a class that inherits"):
        parameter_table(dataclasses.replace(BASE, router="hash"))
