"""Products in FP8 are those of DeepSeek's published inference kernels, written again here in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import ExpertsCase, scaled

from dsjax.checkpoint import quantise as weights
from dsjax.kernels.pallas import activations
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme, block_product
from sharding import fp8
from sharding.dispatch.wire import WireFormat

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DYNAMIC = ActivationScheme(dynamic=True)


def act_quant(x, powers=False):
    """Per 128 values of a row: ``s = max |x| / 448``, ``y = x / s``."""
    values, scales = np.zeros(x.shape, E4M3), np.zeros((len(x), -(-x.shape[1] // 128)), np.float32)
    for row in range(len(x)):
        for block in range(scales.shape[1]):
            own = slice(128 * block, 128 * (block + 1))
            s = np.abs(x[row, own]).max() / np.float32(448)
            if powers:
                s = np.float32(2.0 ** np.ceil(np.log2(np.float64(s))))
            s = np.float32(1) if s == 0 else s
            values[row, own], scales[row, block] = np.clip(x[row, own] / s, -448, 448).astype(E4M3), s
    return values, scales


def fp8_gemm(a, a_scales, b, b_scales):
    """Block by block of the depth: ``total += (a · b) × a_s × b_s``, each block's sum exact here."""
    total = np.zeros((len(a), b.shape[1]))
    column = np.arange(b.shape[1]) // 128
    for block in range(a_scales.shape[1]):
        own = slice(128 * block, 128 * (block + 1))
        product = a[:, own].astype(np.float64) @ b[own].astype(np.float64)
        total += product * a_scales[:, block, None] * b_scales[block, column]
    return total


def drawn_weight(rng, K, N):
    weight = np.clip(rng.normal(size=(K, N)) * 100, -448, 448).astype(E4M3)
    return weight, rng.uniform(0.001, 0.01, size=(-(-K // 128), -(-N // 128))).astype(np.float32)


@pytest.mark.parametrize(
    ("T", "K", "N", "powers"), [(9, 300, 200, False), (1, 129, 128, True), (5, 128, 1, True), (3, 1, 200, False)]
)
def test_a_product_is_deepseeks_act_quant_and_fp8_gemm(T, K, N, powers):
    rng = np.random.default_rng(K)
    x, (weight, scale) = rng.normal(size=(T, K)).astype(np.float32), drawn_weight(rng, K, N)
    values, scales = act_quant(x, powers)
    found = ActivationScheme(dynamic=True, powers=powers).quantise(jnp.asarray(x))
    # XLA divides by 448 by multiplying, which can be off by a unit in the last place; a value on the edge then goes to its neighbour.
    np.testing.assert_allclose(found.scales, scales, rtol=3e-7)
    steps = np.abs(np.asarray(found.values).view(np.int8).astype(int) - values.view(np.int8))
    assert steps.max() <= 1
    assert steps.mean() < 0.01
    values, scales = (np.asarray(array) for array in found)
    expected = fp8_gemm(values, scales, weight, scale)
    size = fp8_gemm(np.abs(values.astype(np.float32)), scales, np.abs(weight.astype(np.float32)), scale)
    for operands in (jnp.float32, jnp.bfloat16):  # both hold every e4m3 number
        product = block_product(found, weight, scale, operands)
        assert np.all(np.abs(product - expected) <= 2e-6 * (size + 1e-6))


EXTREMES = (0, 1e-45, 1e-40, 1.17e-38, 1.2e-38, 1e-37, 4e-36, 6e-36, 1e-30, 9.9e-11, 1e-10, 1e-6, 1, 448, 1e30, 3e38)


def scale_by_hand(largest, powers):
    """The scale of a block by NumPy, which has denormal numbers where XLA has none."""
    if largest < np.finfo(np.float32).tiny:
        return np.float32(1)
    scale = np.maximum(np.float32(largest), np.float32(1e-10)) * np.float32(1 / 448)
    return np.float32(2.0 ** np.ceil(np.log2(np.float64(scale)))) if powers else scale


def assert_rounded(back, exact, scale):
    """Each value is at most half a step of e4m3 away, and one that is a denormal number at most itself."""
    has_scale = np.abs(exact).reshape(len(exact), -1, 128).max(axis=2).repeat(128, axis=1) >= np.finfo(np.float32).tiny
    half_step = np.maximum(np.abs(exact) / 16, has_scale * scale * 2.0**-10)
    assert np.all(np.abs(back - exact) <= half_step * 1.0001 + np.finfo(np.float32).tiny)


def quantised_in_every_form(x, powers=False):
    return {
        "compiled": jax.jit(lambda x: fp8.quantise(x, powers=powers))(x),
        "by operations": fp8.quantise(jnp.asarray(x), powers=powers),
        "pallas": activations.quantise(jnp.asarray(x), powers=powers, interpret=True),
    }


@pytest.mark.parametrize("powers", [False, True])
def test_rows_of_every_magnitude_have_the_same_finite_bits_in_every_form(powers):
    x = np.zeros((len(EXTREMES), 256), np.float32)
    with np.errstate(under="ignore"):
        x[:, 3], x[:, 7] = EXTREMES, -np.float32(EXTREMES) / 2
        x[:, 130] = EXTREMES[::-1]
    scales = np.array([[scale_by_hand(row[b : b + 128].max(), powers) for b in (0, 128)] for row in x])
    forms = quantised_in_every_form(x, powers)
    codes = np.asarray(forms["pallas"].values).view(np.uint8)
    for name, (values, found) in forms.items():
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), scales.view(np.int32), name)
        np.testing.assert_array_equal(np.asarray(values).view(np.uint8), codes)
        assert_rounded(np.asarray(fp8.dequantise(values, found)), x, scales.repeat(128, axis=1))


def test_a_number_that_is_not_finite_leaves_a_nan_and_spoils_no_other_block():
    cases = [(bad, beside) for bad in (np.nan, np.inf, -np.inf) for beside in (0.0, 1e-40, 1e-37, 1.0)]
    x = np.repeat(np.array([[beside] for _, beside in cases], np.float32), 256, axis=1)
    x[:, 5] = [bad for bad, _ in cases]
    for form in quantised_in_every_form(x).values():
        back = np.asarray(fp8.dequantise(*form))
        assert np.isnan(back[:, 5]).all()
        assert np.isfinite(back[:, 128:]).all()


def test_a_block_of_weights_of_every_magnitude_has_a_scale_that_xla_does_not_take_for_zero():
    dequantised = jax.jit(lambda v, s: v.astype(jnp.float32) * s[0, 0])
    for largest in EXTREMES:
        with np.errstate(under="ignore"):
            matrix = np.outer(np.linspace(-1, 1, 128), np.linspace(0, 1, 128)).astype(np.float32) * np.float32(largest)
        values, scale = weights.quantise(matrix)
        assert scale.item() >= np.float32(1e-10) / np.float32(448)
        assert_rounded(np.asarray(dequantised(values, scale)), matrix, scale)


def act_quantised(row):
    """What ``act_quant`` makes of a row, as numbers."""
    values, scales = act_quant(row[None].astype(np.float32))
    return scaled(values, scales, (1,))[0]


@pytest.mark.parametrize(
    ("implementation", "stacked"), [("tiles", True), ("einsum", False)], ids=["tiles, a stack", "einsum, one layer"]
)
def test_experts_quantise_what_goes_into_each_of_their_products(implementation, stacked):
    case = ExpertsCase.drawn(3, X=3, D=150, F=140, N=9, K=2, stored=1)
    params = case.params()
    if not stacked:
        params = {name: array[-1] for name, array in params.items() if name != "layer"}
    found = case.by(ExpertProduct(implementation, weight_dtype=E4M3, scheme=DYNAMIC), params)
    expected, _ = case.expected(rounded=act_quantised)
    # One hidden value within float32's rounding of the middle between two e4m3 numbers would move a result by 6 %; none is here.
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_rows_that_travelled_in_fp8_are_taken_as_they_came():
    x = np.random.default_rng(0).normal(size=(6, 200)).astype(ml_dtypes.bfloat16)
    wire = WireFormat(200, 1, jnp.dtype(jnp.bfloat16), fp8=True)
    rows, *_ = wire.unpack(wire.pack(jnp.asarray(x), jnp.zeros((6, 1), jnp.int32), jnp.ones((6, 1)), jnp.int32(0)))
    index = jnp.asarray([4, 0, 99])
    found, expected = rows.take_quantised(index), fp8.quantise(jnp.asarray(x)[jnp.asarray([4, 0, 5])])
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(own).astype(np.float32), np.asarray(other).astype(np.float32))
