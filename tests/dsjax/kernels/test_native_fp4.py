"""The native experts' product with packed weights is that of their decoded numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_cases import ROUTINGS, ExpertsCase, drawn_from

from dsjax.fp4.formats import FORMATS, INT4, MXFP4, NVFP4
from dsjax.kernels.table import PLAIN
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import WIDEN, ActivationScheme

FEW = settings(max_examples=6, deadline=None, derandomize=True)


def run(kernels, packed, case, threads=1, scheme=WIDEN):
    if kernels.native is not None:
        kernels = dataclasses.replace(kernels, native=dataclasses.replace(kernels.native, threads=threads))
    return case.by(ExpertProduct(weight_dtype=np.dtype(np.uint8), kernels=kernels, scheme=scheme), packed)


@FEW
@given(**drawn_from(
    form=FORMATS.values(), X=range(1, 6), D=range(1, 10), F=range(1, 10), N=[1, 2, 7, 60], K=range(1, 5), routing=ROUTINGS
))  # fmt: skip
def test_products_are_those_of_the_decoded_numbers(kernels, form, D, F, **drawn):
    """D and F: in blocks that share a scale."""
    packed, numbers = ExpertsCase.drawn(D=D * form.block, F=F * form.block, **drawn).in_fp4(form)
    numbers.assert_near(run(kernels, packed, numbers))


@pytest.mark.parametrize(("form", "count"), [(NVFP4, 40), (MXFP4, 6), (NVFP4, 1), (MXFP4, 3), (INT4, 40), (INT4, 1)])
def test_wide_matrices_and_any_number_of_rows(kernels, form, count):
    packed, numbers = ExpertsCase.drawn(3, X=2, D=1088, F=544, N=count, K=1, routing="one expert").in_fp4(form)
    numbers.assert_near(run(kernels, packed, numbers))


@pytest.mark.parametrize(("form", "threads"), [(NVFP4, 2), (MXFP4, 5), (INT4, 3)], ids=FORMATS)
def test_threads_and_the_other_rows_change_no_bit_of_a_result(kernels, form, threads):
    packed, case = ExpertsCase.drawn(1, X=3, D=288, F=160, N=90, K=2, routing="all").in_fp4(form)
    many = run(kernels, packed, case)
    for rows in (90, 1, 2, 7):
        np.testing.assert_array_equal(run(kernels, packed, case.first(rows), threads), many[:rows])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "scheme"), [
    (NVFP4, ActivationScheme(dynamic=True)), (MXFP4, ActivationScheme(dynamic=True, powers=True)),
    (NVFP4, ActivationScheme(dynamic=True, experts="nvfp4")), (INT4, ActivationScheme(dynamic=True)),
], ids=["NVFP4 × FP8", "MXFP4 × FP8 by powers of two", "NVFP4 × NVFP4", "INT4 × FP8"])  # fmt: skip
def test_rows_and_hidden_values_are_rounded_as_the_plain_form_does_whatever_threads_and_rows(kernels, form, scheme):
    packed, case = ExpertsCase.drawn(9, X=4, D=320, F=288, N=70, K=2, routing="all").in_fp4(form)
    found, plain = (run(chosen, packed, case, scheme=scheme) for chosen in (kernels, PLAIN))
    exact, size = case.expected()
    assert np.abs(plain - exact).max() > 1e-3 * size.max(), "activations are quantised at all"
    # A hidden value in the middle between two numbers goes to either, as float32 rounds: of some 40,000 of them one or two.
    assert (np.abs(found - plain) > 2e-5 * size).any(axis=1).sum() <= 2
    for threads, rows in ((5, 70), (1, 1), (2, 7)):
        np.testing.assert_array_equal(run(kernels, packed, case.first(rows), threads, scheme), found[:rows])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_byte_of_values_and_scales_is_widened_as_the_definition_says(kernels, form):
    """One expert of 256 columns: column c has the byte c everywhere, or the scale c, of INT4 its upper byte."""
    D, F, columns = form.block, 256, np.arange(256, dtype=np.uint8)
    one = {"nvfp4": np.uint8(0x38), "mxfp4": np.uint8(127), "int4": np.uint16(0x3F80)}[form.name]  # the scale 1
    numbers = {"nvfp4": (columns & 0x7F) != 0x7F, "mxfp4": columns <= 250, "int4": (columns & 0x7F) < 0x7D}[form.name]
    zero, unit = (0x88, 9) if form.integers else (0, 2)  # a byte of two zeros, and the code of 1
    for which in ("values", "scales"):
        weight = np.broadcast_to(columns if which == "values" else np.uint8(0x22), (1, 1, D // 2, 2, F))
        # e4m3 has two codes for no number, and e8m0 one; 2^127 × 1 × 1 is still a number. bfloat16 has more, and large ones overflow.
        scale = np.where(numbers, columns.astype(one.dtype) << 8 * (form.scale_bytes - 1), one)
        scale = np.broadcast_to(scale if which == "scales" else one, (1, 1, 1, 2, F))
        # Down is the identity on the first of each 256 hidden values: rows of F, columns of D.
        for at in range(0, F, 128):
            down = np.full((1, 1, F // 2, D), zero, np.uint8)
            for column in range(D):
                hidden = at + column * (128 // D)
                down[0, 0, hidden // 2, column] ^= (unit ^ zero & 15) << 4 * (hidden % 2)
            params = {"gate_up.weight": weight, "gate_up.scale": scale, "down.weight": down,
                      "down.scale": np.full((1, 1, F // D, D), one)}  # fmt: skip
            if form.has_global:
                params["gate_up.global_scale"] = np.full((1, 1, 2, 1), 0.5, np.float32)
                params["down.global_scale"] = np.ones((1, 1, 1), np.float32)
            rows = np.zeros((1, D), np.float32)
            rows[0, 1] = 1e-3
            arguments = (params | {"layer": np.int32(0)}, rows, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
            native = jax.jit(ExpertProduct(weight_dtype=np.dtype(np.uint8), kernels=kernels))(*arguments)
            plain = jax.jit(ExpertProduct("tiles", weight_dtype=np.dtype(np.uint8)))(*arguments)
            np.testing.assert_allclose(native, plain, rtol=1e-5, atol=1e-30)
            assert jnp.any(plain != 0)
