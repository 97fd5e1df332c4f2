"""The Pallas product of experts in FP4, run by its interpreter, is that of the decoded numbers, and W4A8 that of the plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp4_weights import in_fp4
from kernel_cases import ExpertsCase
from layouts import answer, difference, widths, write_checkpoint

from dsjax.fp4.formats import FORMATS
from dsjax.kernels.pallas import addressing, fp4_products
from dsjax.kernels.pallas.products import Groups, ProductTiles
from dsjax.kernels.table import choose_kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme
from sharding.fp8 import E4M3

PALLAS = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)
BYTES = np.dtype(np.uint8)
pytestmark = pytest.mark.slow  # all together
FORMS = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def case_of(form, D, F, N, dtype=np.float32):
    case = ExpertsCase.drawn(4, X=3, D=D, F=F, N=N, K=2, routing="some")
    packed, decoded = in_fp4({"gate_up.weight": case.gate_up[-1], "down.weight": case.down[-1]}, form)
    packed = {name: np.stack([np.full_like(array, 0x77), array]) for name, array in packed.items()} | {
        "layer": jnp.int32(1)
    }
    return packed, decoded, jnp.asarray(case.rows * D**0.5, dtype), case.ids, case.weights


@FORMS
@pytest.mark.parametrize(("D", "F", "N"), [(64, 96, 5), (320, 160, 40)])
def test_products_are_those_of_the_decoded_numbers(form, D, F, N):
    packed, decoded, rows, ids, weights = case_of(form, D, F, N)
    expected = np.asarray(jax.jit(ExpertProduct("tiles"))(decoded, rows, ids, weights))
    found = np.asarray(jax.jit(ExpertProduct(weight_dtype=BYTES, kernels=PALLAS))(packed, rows, ids, weights))
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@FORMS
def test_in_bfloat16_only_the_results_are_rounded(form):
    packed, decoded, rows, ids, weights = case_of(form, 160, 64, 12, jnp.bfloat16)
    expected = np.asarray(jax.jit(ExpertProduct("tiles"))(decoded, rows.astype(jnp.float32), ids, weights))
    found = jax.jit(ExpertProduct(weight_dtype=BYTES, kernels=PALLAS))(packed, rows, ids, weights)
    # hidden values, each expert's result and the sum, to 8 bits each
    assert np.abs(np.asarray(found, np.float32) - expected).max() <= 0.02 * np.abs(expected).max()


@FORMS
@pytest.mark.parametrize("powers", [False, True])
def test_w4a8_is_the_plain_form_s(form, powers):
    packed, _, rows, ids, weights = case_of(form, 320, 160, 9)
    scheme = ActivationScheme(dynamic=True, powers=powers)
    expected = np.asarray(
        jax.jit(ExpertProduct("tiles", weight_dtype=BYTES, scheme=scheme))(packed, rows, ids, weights)
    )
    product = ExpertProduct(weight_dtype=BYTES, kernels=PALLAS, scheme=scheme)
    found = np.asarray(jax.jit(product)(packed, rows, ids, weights))
    # but for hidden values on a rounding edge
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("rows", "row", "hidden"), [(jnp.bfloat16, 2 * 256, 2 * 384), (E4M3, 256 + 8, 384 + 12)])
def test_a_call_costs_the_bytes_that_it_reads_and_writes(rows, row, hidden):
    """Rows in FP8 have hidden values in FP8 too, with a scale for each 128; sums of experts are in the dtype of computation."""
    X, D, F, load = 4, 256, 384, 64.0
    for shape, read, written in (((1, X, D // 2, 2, F), row, hidden), ((1, X, F // 2, D), hidden, 2 * D)):
        form, tiles = FORMATS["nvfp4"], ProductTiles.for_load(load)
        width = shape[2] * 2
        x, weight = jax.ShapeDtypeStruct((256, width), rows), jax.ShapeDtypeStruct(shape, BYTES)
        told = fp4_products._cost(x, weight, form, load, tiles, jnp.dtype(jnp.bfloat16))
        assert told.bytes == pytest.approx(2 * weight.size * form.bytes_per_value + X * load * (read + written))


@FORMS
@pytest.mark.parametrize("dynamic", [False, True])
def test_stacks_that_pallas_does_not_address_are_read_in_words_of_two_columns(form, dynamic, monkeypatch):
    packed, _, rows, ids, weights = case_of(form, 160, 96, 9)
    product = ExpertProduct(weight_dtype=BYTES, kernels=PALLAS, scheme=ActivationScheme(dynamic=dynamic))
    expected = np.asarray(jax.jit(product)(packed, rows, ids, weights))
    monkeypatch.setattr(fp4_products, "addressable", lambda array: False)
    found = np.asarray(jax.jit(dataclasses.replace(product, capacity=1))(packed, rows, ids, weights))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@FORMS
def test_one_layer_is_copied_of_scales_that_pallas_does_not_address(form, monkeypatch):
    packed, _, rows, ids, weights = case_of(form, 160, 96, 9)
    product = ExpertProduct(weight_dtype=BYTES, kernels=PALLAS)
    expected = np.asarray(jax.jit(product)(packed, rows, ids, weights))
    monkeypatch.setattr(addressing, "addressable", lambda array: False)
    found = np.asarray(jax.jit(dataclasses.replace(product, capacity=1))(packed, rows, ids, weights))
    np.testing.assert_array_equal(found, expected)


def test_no_kernel_is_given_scales_whose_offsets_would_turn_negative():
    """A device of eight with DeepSeek-V3 has 32 experts of each layer: 27.2 GB of gate and up in NVFP4, and 3.4 GB of scales."""
    sized = jax.ShapeDtypeStruct
    stack = {"weight": sized((58, 32, 3584, 2, 2048), BYTES), "scale": sized((58, 32, 448, 2, 2048), E4M3)}
    stack["global_scale"] = sized((58, 32, 2, 1), jnp.float32)
    whole = lambda *dims: sized(dims, jnp.int32)  # noqa: E731
    jaxpr = jax.make_jaxpr(
        lambda stack, layer, x, start, count: fp4_products.gate_up(
            stack, FORMATS["nvfp4"], layer, x, Groups(start, count, 8.0), dtype=jnp.dtype(jnp.bfloat16)
        )
    )(stack, whole(), sized((512, 7168), jnp.bfloat16), whole(32), whole(32))
    (call,) = (one for one in jaxpr.eqns if one.primitive.name == "pallas_call")
    assert all(addressing.addressable(value.aval) for value in call.invars)
    assert any(value.aval.shape == stack["weight"].shape for value in call.invars)


def test_an_engine_with_them_gives_the_answer_of_one_without(tmp_path):
    checkpoint = write_checkpoint(tmp_path, **widths("mxfp4-bf16", 2))
    kept = {"weights": "nvfp4-bf16", "new_tokens": 6}
    expected = answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain", **kept)
    found = answer(checkpoint, "tp=2,ep=1", "auto", "CC", "A_CC_ME", kernels="pallas", **kept)
    assert difference(found, expected) is None
