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
F32, BF16, FP8 = (np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn))


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, FP8], ids=str)
def test_products_are_those_of_the_loop(implementation, dtype, case):
    gate_up, down, rows, ids, weights = case
    params = {"gate_up.weight": gate_up.astype(dtype), "down.weight": down.astype(dtype)}
    plain = [array.astype(np.float32) for array in params.values()]
    if dtype == FP8:
        rng = np.random.default_rng(1)
        gate_scale = rng.uniform(0.5, 2, size=(X, D // 128, 2, F // 128)).astype(np.float32)
        down_scale = rng.uniform(0.5, 2, size=(X, F // 128, D // 128)).astype(np.float32)
        params |= {"gate_up.scale": gate_scale, "down.scale": down_scale}
        plain = [plain[0] * np.repeat(gate_scale, 128, axis=1), plain[1] * np.repeat(down_scale, 128, axis=2)]
    if dtype == BF16:
        rows = rows.astype(BF16)
    run = jax.jit(ExpertProduct(implementation, weight_dtype=dtype, platform="gpu", tile=8, capacity=8, block=32))
    found = np.asarray(run(params, rows, ids, weights)).astype(np.float32)
    exact = by_loop(*plain, rows.astype(np.float32), ids, weights)
    largest = np.abs(exact).max()
    # Sums of 256 and 128 products of values around 1, float32 against float64; in bf16 the hidden values and the result are rounded
    # to 8 bits: 2⁻⁹ each, of values up to the largest.
    bound = {F32: 2e-5, BF16: 1e-2 * largest, FP8: 2e-6 * largest + 5e-5}[dtype]
    assert np.abs(found - exact).max() <= bound


@pytest.mark.parametrize("method", ["gather", "padded", "ragged", "auto"])
def test_every_dispatch_on_one_device_gives_the_exact_sums(method):
    spec, call = compiled("dp=1", DispatchConfig(method, capacity=2, report=True), 8)
    tokens = 12
    for name, slots in routings(tokens, 8, spec.num_devices).items():
        y, report = call(coded_rows(tokens), slots, weights_of(tokens))
        np.testing.assert_array_equal(y, expected(coded_rows(tokens), slots, weights_of(tokens)), err_msg=name)
        counts = np.bincount(slots[slots >= 0], minlength=8)
        np.testing.assert_array_equal(report["tokens_per_expert"], counts[None], err_msg=name)
