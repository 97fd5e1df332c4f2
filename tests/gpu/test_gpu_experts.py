"""Each grouped expert product, and each dispatch in front of it, on one GPU against a plain loop in NumPy."""

import jax
import ml_dtypes
import numpy as np
import pytest
from dispatch_cases import coded_rows, compiled, expected, routings, weights_of

from dsjax.model.experts import IMPLEMENTATIONS, ExpertProduct
from sharding.dispatch import DispatchConfig

pytestmark = pytest.mark.gpu

N, K, X, D, F = 96, 3, 5, 256, 128  # two FP8 blocks of width
BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def by_loop(gate_up, down, rows, ids, weights):
    """Float64, one row and one expert at a time."""
    out = np.zeros(rows.shape)
    for n, k in np.argwhere(ids >= 0):
        gate, up = np.einsum("d,dgf->gf", rows[n].astype(np.float64), gate_up[ids[n, k]].astype(np.float64))
        out[n] += weights[n, k] * (gate / (1 + np.exp(-gate)) * up) @ down[ids[n, k]].astype(np.float64)
    return out


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(X)[:K] for _ in range(N)])
    ids[rng.random((N, K)) < 0.3] = -1
    ids[:20, 1:], ids[:20, 0] = -1, 4  # one expert has many more than its share
    gate_up = (rng.normal(size=(X, D, 2, F)) / D**0.5).astype(np.float32)
    down = (rng.normal(size=(X, F, D)) / F**0.5).astype(np.float32)
    return gate_up, down, rng.normal(size=(N, D)).astype(np.float32), ids, rng.random((N, K), np.float32)


def product(implementation, params, rows, ids, weights, dtype):
    run = jax.jit(ExpertProduct(implementation, weight_dtype=dtype, platform="gpu", tile=8, capacity=8, block=32))
    return np.asarray(run(params, rows, ids, weights)).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_product_equals_the_loop(implementation, case):
    gate_up, down, *tokens = case
    params = {"gate_up.weight": gate_up, "down.weight": down}
    found = product(implementation, params, *tokens, np.dtype(np.float32))
    # Sums of 256 and 128 products of values around 1, float32 against float64
    np.testing.assert_allclose(found, by_loop(gate_up, down, *tokens), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_product_is_near_the_loop(implementation, case):
    gate_up, down, rows, ids, weights = case
    params = {"gate_up.weight": gate_up.astype(BF16), "down.weight": down.astype(BF16)}
    rows = rows.astype(BF16)
    exact = by_loop(
        *(params[key].astype(np.float32) for key in ("gate_up.weight", "down.weight")),
        rows.astype(np.float32),
        ids,
        weights,
    )
    found = product(implementation, params, rows, ids, weights, BF16)
    # The hidden values and the result are rounded to 8 bits: 2⁻⁹ each, of values up to the largest.
    assert np.abs(found - exact).max() <= 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_product_equals_the_loop_over_dequantised_weights(implementation, case):
    gate_up, down, rows, ids, weights = case
    rng = np.random.default_rng(1)
    gate_scale = rng.uniform(0.5, 2, size=(X, D // 128, 2, F // 128)).astype(np.float32)
    down_scale = rng.uniform(0.5, 2, size=(X, F // 128, D // 128)).astype(np.float32)
    params = {
        "gate_up.weight": gate_up.astype(FP8),
        "gate_up.scale": gate_scale,
        "down.weight": down.astype(FP8),
        "down.scale": down_scale,
    }
    plain_gate = params["gate_up.weight"].astype(np.float32) * np.repeat(gate_scale, 128, axis=1)
    plain_down = params["down.weight"].astype(np.float32) * np.repeat(down_scale, 128, axis=2)
    found = product(implementation, params, rows, ids, weights, FP8)
    exact = by_loop(plain_gate, plain_down, rows, ids, weights)
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max() + 5e-5)


@pytest.mark.parametrize("method", ["gather", "padded", "ragged", "auto"])
def test_every_dispatch_on_one_device_gives_the_exact_sums(method):
    spec, call = compiled("dp=1", DispatchConfig(method, capacity=2, report=True), 8)
    tokens = 12
    for name, slots in routings(tokens, 8, spec.num_devices).items():
        y, report = call(coded_rows(tokens), slots, weights_of(tokens))
        np.testing.assert_array_equal(y, expected(coded_rows(tokens), slots, weights_of(tokens)), err_msg=name)
        counts = np.bincount(slots[slots >= 0], minlength=8)
        np.testing.assert_array_equal(report["tokens_per_expert"], counts[None], err_msg=name)
