"""Every implementation of the grouped expert product gives what a plain loop over experts gives."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.model.experts import ROUND_ROWS, ExpertProduct, choose_implementation, default_capacity, sort_pairs
from sharding import MeshSpec
from sharding.dispatch import DispatchConfig, dispatch

N, K, X, D, F = 24, 3, 5, 16, 8
IMPLEMENTATIONS = ("tiles", "einsum", "ragged_dot")


def expert_weights(rng, experts=X, width=D, hidden=F):
    return {
        "gate_up.weight": rng.normal(size=(experts, width, 2, hidden)).astype(np.float32) / width**0.5,
        "down.weight": rng.normal(size=(experts, hidden, width)).astype(np.float32) / hidden**0.5,
    }


def by_loop(params, rows, ids, weights):
    """Float64 reference: one row and one expert at a time."""
    out = np.zeros(rows.shape)
    for n, k in np.argwhere(ids >= 0):
        gate, up = np.einsum("d,dgf->gf", rows[n].astype(np.float64), params["gate_up.weight"][ids[n, k]])
        out[n] += weights[n, k] * (gate / (1 + np.exp(-gate)) * up) @ params["down.weight"][ids[n, k]]
    return out


def routings(rng):
    """Ids of the shapes that matter, by name; distinct within a row."""
    spread = np.stack([rng.permutation(X)[:K] for _ in range(N)])
    some = np.where(rng.random((N, K)) < 0.6, -1, spread)
    one_expert = np.full((N, K), -1)
    one_expert[:, 1] = 4
    one_row = np.full((N, K), -1)
    one_row[7] = [2, 0, 3]
    return {"spread": spread, "some": some, "all to one": one_expert, "one row": one_row, "none": np.full((N, K), -1)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [1, 4, 80])
def test_equals_the_loop_for_every_routing_and_tile_size(implementation, size):
    rng = np.random.default_rng(0)
    params, rows, weights = (
        expert_weights(rng),
        rng.normal(size=(N, D)).astype(np.float32),
        rng.random((N, K), np.float32),
    )
    product = jax.jit(ExpertProduct(implementation, tile=size, capacity=size, block=size))
    for name, ids in routings(rng).items():
        expected = by_loop(params, rows, ids, weights)
        # float32 sums of D and F products: a few units in the last place of values around 1
        np.testing.assert_allclose(product(params, rows, ids, weights), expected, atol=3e-6, err_msg=name)
        assert np.any(expected) == (name != "none")


def test_pairs_are_sorted_by_expert_then_row_and_those_without_expert_come_last():
    pairs = sort_pairs(jnp.array([[2, 0], [-1, 2], [1, -1]]), jnp.array([[20.0, 0.5], [9, 12], [1, 9]]), 3)
    np.testing.assert_array_equal(pairs.row_P[:4], [0, 2, 0, 1])
    np.testing.assert_array_equal(pairs.weight_P[:4], [0.5, 1, 20, 12])
    np.testing.assert_array_equal(pairs.start_X, [0, 1, 2])
    np.testing.assert_array_equal(pairs.count_X, [1, 1, 2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unused_rows_with_nan_do_not_spread(implementation):
    rng = np.random.default_rng(1)
    params, rows = expert_weights(rng), rng.normal(size=(N, D)).astype(np.float32)
    ids = routings(rng)["one row"]
    clean = np.asarray(jax.jit(ExpertProduct(implementation))(params, rows, ids, np.ones((N, K), np.float32)))
    rows[np.arange(N) != 7] = np.nan
    np.testing.assert_array_equal(
        jax.jit(ExpertProduct(implementation))(params, rows, ids, np.ones((N, K), np.float32)), clean
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_weights_may_be_stored_as_integers_of_their_bits(implementation):
    rng = np.random.default_rng(2)
    params = {name: w.astype(ml_dtypes.bfloat16) for name, w in expert_weights(rng).items()}
    rows, weights = rng.normal(size=(N, D)).astype(np.float32), rng.random((N, K), np.float32)
    ids = routings(rng)["spread"]
    stored = {name: w.view(np.uint16) for name, w in params.items()}
    product = ExpertProduct(implementation, weight_dtype=np.dtype(ml_dtypes.bfloat16))
    expected = by_loop({name: w.astype(np.float32) for name, w in params.items()}, rows, ids, weights)
    np.testing.assert_allclose(jax.jit(product)(stored, rows, ids, weights), expected, atol=3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_weights_are_multiplied_by_their_block_scales(implementation):
    width, hidden = 256, 128  # two blocks along D, one along F
    rng = np.random.default_rng(3)
    fp8 = {n: w.astype(ml_dtypes.float8_e4m3fn) for n, w in expert_weights(rng, 2, width, hidden).items()}
    scales = {
        "gate_up.scale": rng.random((2, 2, 2, 1), np.float32) + 0.5,
        "down.scale": rng.random((2, 1, 2), np.float32) + 0.5,
    }
    plain = {
        "gate_up.weight": fp8["gate_up.weight"].astype(np.float32) * np.repeat(scales["gate_up.scale"], 128, 1),
        "down.weight": fp8["down.weight"].astype(np.float32) * np.repeat(scales["down.scale"], 128, 2),
    }
    rows, weights = rng.normal(size=(6, width)).astype(np.float32), rng.random((6, 2), np.float32)
    ids = np.array([[0, 1], [1, -1], [-1, -1], [0, -1], [1, 0], [-1, 0]])
    product = ExpertProduct(implementation, weight_dtype=np.dtype(ml_dtypes.float8_e4m3fn))
    stored = {name: w.view(np.uint8) for name, w in fp8.items()} | scales
    expected = by_loop(plain, rows, ids, weights)
    np.testing.assert_allclose(jax.jit(product)(stored, rows, ids, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_of_a_stack_gives_what_that_layer_alone_gives(implementation):
    rng = np.random.default_rng(4)
    layers = [expert_weights(rng) for _ in range(3)]
    rows, weights = rng.normal(size=(N, D)).astype(np.float32), rng.random((N, K), np.float32)
    ids = routings(rng)["some"]
    product = jax.jit(ExpertProduct(implementation))
    stack = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    for index, layer in enumerate(layers):
        alone = product(layer, rows, ids, weights)
        np.testing.assert_array_equal(product(stack | {"layer": np.int32(index)}, rows, ids, weights), alone)


@pytest.mark.parametrize("layout", ["dp=8", "dp=2,tp=4,ep=2", "tp=4,ep=1"])
@pytest.mark.parametrize("method", ["gather", "padded"])
def test_experts_behind_a_dispatch_equal_the_loop(layout, method):
    experts, layers = 8, 2
    spec = MeshSpec.parse(layout)
    mesh = spec.build()
    rng = np.random.default_rng(5)
    params = expert_weights(rng, layers * experts)
    stack = {name: w.reshape(layers, experts, *w.shape[1:]) for name, w in params.items()}
    width_axes = spec.expert_width_axes or None
    specs = {
        "gate_up.weight": P(None, spec.expert_axes, None, None, width_axes),
        "down.weight": P(None, spec.expert_axes, width_axes),
    }
    placed = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in stack.items()}
    rows, weights = rng.normal(size=(N, D)).astype(np.float32), rng.random((N, K), np.float32)
    ids = np.stack([rng.permutation(experts)[:K] for _ in range(N)])
    ids[3:9] = -1

    @jax.jit
    def step(rows, ids, weights, placed, layer):
        config = DispatchConfig(method, capacity=1)
        params = placed | {"layer": layer}
        return dispatch(
            spec, mesh, config, rows, ids, weights, params, ExpertProduct(), specs | {"layer": P()}, experts=experts
        )[0]

    for layer in range(layers):
        found = jax.block_until_ready(step(rows, ids, weights, placed, layer))
        one = {name: w[layer] for name, w in stack.items()}
        # float32 sums in another order than the loop's
        np.testing.assert_allclose(found, by_loop(one, rows, ids, weights), atol=3e-6)


def test_a_round_holds_the_load_and_no_more_rows_than_fit():
    assert default_capacity(8, experts=8) == 24  # 8 + 4 × 2.8, in eights
    assert default_capacity(2048, experts=8) == 2232
    assert default_capacity(2048, experts=256) * 256 == ROUND_ROWS


def test_the_choice_follows_platform_and_load():
    assert choose_implementation("cpu", mean_load=32) == "tiles"
    assert choose_implementation("gpu", mean_load=32) == "einsum"
    assert choose_implementation("tpu", mean_load=32) == "einsum"
    assert choose_implementation("gpu", mean_load=4096) == "einsum"
    assert choose_implementation("tpu", mean_load=4096) == "ragged_dot"
    with pytest.raises(ValueError, match="'fastest'; expected one of"):
        ExpertProduct("fastest")
