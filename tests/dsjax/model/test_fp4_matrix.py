"""Packed experts give what their decoded numbers give, in every implementation, and W4A8 what its definition says."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_weights import encoded
from kernel_cases import ExpertsCase

from dsjax.fp4 import host
from dsjax.fp4.formats import FORMATS, INT4, MXFP4, NVFP4
from dsjax.fp4.rows import quantise
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme
from sharding import fp8

pytestmark = pytest.mark.slow  # all together

N, BYTES, BF16 = 24, np.dtype(np.uint8), np.dtype(ml_dtypes.bfloat16)


def drawn(form):
    """Weights in FP4, as the second of two layers, of which the first is full of the largest values; and the case of their numbers."""
    return ExpertsCase.drawn(4, X=5, D=96, F=64, N=N, K=3).in_fp4(form)


@pytest.mark.parametrize(
    ("form", "implementation", "stacked"),
    [(NVFP4, "tiles", True), (MXFP4, "einsum", True), (MXFP4, "tiles", False), (INT4, "tiles", True), (INT4, "einsum", False)],
)  # fmt: skip
def test_the_product_is_that_of_the_decoded_numbers(form, implementation, stacked):
    packed, case = drawn(form)
    if not stacked:
        packed = {name: array[1] for name, array in packed.items() if name != "layer"}
    found = case.by(ExpertProduct(implementation, weight_dtype=BYTES), packed)
    np.testing.assert_array_equal(found, case.by(ExpertProduct(implementation)))


@pytest.mark.parametrize("form", [NVFP4, INT4], ids=lambda form: form.name)
def test_in_bfloat16_the_decoded_numbers_are_rounded_once(form):
    packed, case = drawn(form)
    rounded = dataclasses.replace(case, gate_up=case.gate_up.astype(BF16), down=case.down.astype(BF16))
    rows = jnp.asarray(case.rows, BF16)
    expected = rounded.by(ExpertProduct("einsum", weight_dtype=BF16), rows=rows)
    found = case.by(ExpertProduct("einsum", weight_dtype=BYTES), packed, rows)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("form", "implementation", "powers"),
    [(NVFP4, "einsum", False), (MXFP4, "tiles", True), (INT4, "tiles", False)],
    ids=FORMATS,
)
def test_w4a8_multiplies_activations_in_fp8_with_the_decoded_numbers(form, implementation, powers):
    packed, case = drawn(form)
    scheme = ActivationScheme(dynamic=True, powers=powers)
    found = case.by(ExpertProduct(implementation, weight_dtype=BYTES, scheme=scheme), packed)

    def in_fp8(x):
        return np.asarray(fp8.dequantise(*fp8.quantise(jnp.asarray(x, jnp.float32), powers=powers)), np.float64)

    expected, _ = case.expected(rounded=in_fp8)
    # But for hidden values on a rounding edge, which go one e4m3 number (an eighth) up or down: a few of 64 in a row, at most.
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-6 * np.abs(expected).max()
    exact, _ = case.expected()
    assert np.abs(found - exact).max() > 1e-3 * np.abs(exact).max(), "activations are quantised at all"


def in_nvfp4(row: np.ndarray) -> np.ndarray:
    """A row as the tensor of one row that NVFP4's definition quantises, on the host."""
    packed, scales, whole = encoded(row[None], NVFP4)
    return host.decode(packed, NVFP4, scales, whole)[0].astype(np.float64)


@pytest.mark.parametrize("implementation", ["tiles", "einsum"])
def test_w4a4_multiplies_rows_in_nvfp4_with_the_decoded_numbers(implementation):
    packed, case = drawn(NVFP4)
    scheme = ActivationScheme(dynamic=True, experts="nvfp4")
    found = case.by(ExpertProduct(implementation, weight_dtype=BYTES, scheme=scheme), packed)
    expected, _ = case.expected(rounded=in_nvfp4)
    off = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    # But for rows with hidden values, or a block's scale, on a rounding edge, which float32's sums put on its other side.
    assert np.sort(off)[: 2 * N // 3].max() <= 1e-5
    assert off.max() <= 0.3
    exact, _ = case.expected()
    assert np.abs(found - exact).max() > 0.02 * np.abs(exact).max(), "rows are quantised at all"


def test_a_row_in_nvfp4_is_what_the_host_makes_of_it_and_depends_on_no_other():
    rng = np.random.default_rng(9)
    x = (rng.normal(size=(40, 96)) * 10.0 ** rng.integers(-6, 6, (40, 1))).astype(np.float32)
    x[3], x[4, 16:32] = 0, 0
    quantised = jax.jit(quantise)(x)
    found = np.asarray(quantised.in_float32() * quantised.row_scale, np.float64)
    # Of a scale that is rounded otherwise in its last bit all values differ by that bit, and some by a step of e4m3 or e2m1.
    close = np.isclose(found, np.stack([in_nvfp4(row) for row in x]), rtol=1e-6, atol=0)
    assert close.mean() > 0.99
    alone = jax.jit(quantise)(x[7:8])
    np.testing.assert_array_equal(quantised.values[7:8].astype(jnp.float32), alone.values.astype(jnp.float32))
    assert np.isnan(np.asarray(quantise(jnp.array([[1.0, np.inf] + [0.0] * 14])).row_scale * 0)).all()
