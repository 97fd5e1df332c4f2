"""The Pallas product of packed experts, run by the interpreter, is that of the decoded numbers; W4A8 is that of the plain form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import ExpertsCase
from test_kernel_order import kernel_arrays, shape

from dsjax.fp4.formats import FORMATS, INT4, MXFP4, NVFP4
from dsjax.kernels.pallas import addressing, fp4_products
from dsjax.kernels.pallas.products import Groups, ProductTiles
from dsjax.kernels.table import choose_kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme
from sharding.fp8 import E4M3

PALLAS = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)
BYTES = np.dtype(np.uint8)
pytestmark = pytest.mark.slow  # all together


def case_of(form, D, F, N):
    packed, case = ExpertsCase.drawn(4, X=3, D=D, F=F, N=N, K=2).in_fp4(form)
    return packed, dataclasses.replace(case, rows=case.rows * np.float32(D**0.5))


SIZES = (NVFP4, 64, 96, 5), (MXFP4, 320, 160, 40), (INT4, 320, 96, 9)


@pytest.mark.parametrize(("form", "D", "F", "N"), SIZES, ids=FORMATS)
def test_products_are_those_of_the_decoded_numbers(form, D, F, N):
    packed, case = case_of(form, D, F, N)
    case.assert_near(case.by(ExpertProduct(weight_dtype=BYTES, kernels=PALLAS), packed))


@pytest.mark.parametrize("form", [NVFP4, INT4], ids=lambda form: form.name)
def test_in_bfloat16_the_results_are_rounded(form):
    """And in INT4 a value times its scale, once, to eight bits of twelve."""
    packed, case = case_of(form, 160, 64, 12)
    rows = jnp.asarray(case.rows, jnp.bfloat16)
    expected, _ = dataclasses.replace(case, rows=np.asarray(rows, np.float32)).expected()
    found = case.by(ExpertProduct(weight_dtype=BYTES, kernels=PALLAS), packed, rows)
    # hidden values, each expert's result and the sum, to 8 bits each
    assert np.abs(found.astype(np.float32) - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(("form", "powers"), [(NVFP4, False), (MXFP4, True), (INT4, False)], ids=FORMATS)
def test_w4a8_is_the_plain_form_s(form, powers):
    packed, case = case_of(form, 320, 160, 9)
    scheme = ActivationScheme(dynamic=True, powers=powers)
    expected = case.by(ExpertProduct("tiles", weight_dtype=BYTES, scheme=scheme), packed)
    found = case.by(ExpertProduct(weight_dtype=BYTES, kernels=PALLAS, scheme=scheme), packed)
    # but for hidden values on a rounding edge
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("rows", "row", "hidden"), [(jnp.bfloat16, 2 * 256, 2 * 384), (E4M3, 256 + 8, 384 + 12)])
def test_a_call_costs_the_bytes_that_it_reads_and_writes(rows, row, hidden):
    """Rows in FP8 have hidden values in FP8 too, with a scale for each 128; sums of experts are in the dtype of computation."""
    X, D, F, load = 4, 256, 384, 64.0
    for dims, read, written in (((1, X, D // 2, 2, F), row, hidden), ((1, X, F // 2, D), hidden, 2 * D)):
        form, tiles = FORMATS["nvfp4"], ProductTiles.for_load(load)
        width = dims[2] * 2
        x, weight = jax.ShapeDtypeStruct((256, width), rows), jax.ShapeDtypeStruct(dims, BYTES)
        told = fp4_products._cost(x, weight, form, load, tiles, jnp.dtype(jnp.bfloat16))
        assert told.bytes == pytest.approx(2 * weight.size * form.bytes_per_value + X * load * (read + written))


def result(form, dynamic, **options):
    packed, case = case_of(form, 160, 96, 9)
    product = ExpertProduct(weight_dtype=BYTES, kernels=PALLAS, scheme=ActivationScheme(dynamic=dynamic), **options)
    return case.by(product, packed)


addressed = functools.cache(result)


@pytest.mark.parametrize(
    ("form", "module", "dynamic"),
    [(NVFP4, fp4_products, False), (MXFP4, fp4_products, True), (NVFP4, addressing, False)],
    ids=["weights in words of two columns", "weights of W4A8 too", "one layer of scales is copied"],
)
def test_stacks_that_pallas_does_not_address_are_read_all_the_same(form, module, dynamic, monkeypatch):
    expected = addressed(form, dynamic)
    monkeypatch.setattr(module, "addressable", lambda array: False)
    found = result(form, dynamic, capacity=1)
    np.testing.assert_allclose(found, expected, atol=(module is fp4_products) * 1e-5 * np.abs(expected).max(), rtol=0)


def test_no_kernel_is_given_scales_whose_offsets_would_turn_negative():
    """A device of eight with DeepSeek-V3 has 32 experts of each layer: 27.2 GB of gate and up in NVFP4, and 3.4 GB of scales."""
    stack = {"weight": shape(58, 32, 3584, 2, 2048, dtype=BYTES), "scale": shape(58, 32, 448, 2, 2048, dtype=E4M3)}
    stack["global_scale"] = shape(58, 32, 2, 1, dtype=jnp.float32)

    def gate_up(stack, layer, x, start, count):
        groups = Groups(start, count, 8.0)
        return fp4_products.gate_up(stack, FORMATS["nvfp4"], layer, x, groups, dtype=jnp.dtype(jnp.bfloat16))

    whole = [shape(32, dtype=jnp.int32)] * 2
    arrays = kernel_arrays(gate_up, stack, shape(dtype=jnp.int32), shape(512, 7168), *whole)
    assert all(map(addressing.addressable, arrays))
    assert any(array.shape == stack["weight"].shape for array in arrays)
