"""The numbers of NVFP4, MXFP4 and INT4 are those of their published definitions, and of torchao and compressed-tensors.

These are the tests of `host.py` and `decode.py`. `tools/make_fp4_goldens.py` of commit 0a987fa9 wrote the goldens with these libraries.
"""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp4_weights import encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.fp4 import decode, host
from dsjax.fp4.formats import CODES, FORMATS, INT4, MXFP4, NVFP4

GOLDENS = dict(np.load(Path(__file__).parents[2] / "goldens" / "fp4.npz"))
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def whole_of(form, library):
    if not form.has_global:
        return np.float32(1)
    whole = GOLDENS[f"{library}_nvfp4_whole"][0]
    return whole if library == "torchao" else np.float32(1) / whole


def stored_scales(form, library):
    return GOLDENS[f"{library}_{form.name}_scale"].view(form.scale_dtype)


def test_the_sixteen_codes_are_those_of_the_specification_and_of_integers_eight_less():
    assert CODES == E2M1
    codes = np.arange(16, dtype=np.uint8)
    expected = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    np.testing.assert_array_equal(decode.codes_to_values(jnp.asarray(codes)), expected)
    np.testing.assert_array_equal(np.signbit(decode.codes_to_values(jnp.asarray(codes))), codes >= 8)
    np.testing.assert_array_equal(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32), expected)
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(decode.codes_to_values(jnp.asarray(codes | 0xF0), integers=True), np.arange(-8, 8))


def test_values_round_to_the_nearest_and_ties_to_the_even_fraction():
    values = np.float32([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.26, -0.74, 0.24, 5.01, 4.99, 100, -100, 0]])
    codes = host.encode(values, NVFP4, np.ones((1, 1), E4M3), np.float32(1))
    expected = [[0, 1, 1, 2, 2, 4, 4, 6, -0.5, -0.5, 0, 6, 4, 6, -6, 0]]
    np.testing.assert_array_equal(host.decode(codes, NVFP4, np.ones((1, 1), E4M3), np.float32(1)), expected)


@pytest.mark.parametrize(("form", "library"), [(NVFP4, "torchao"), (NVFP4, "ct"), (MXFP4, "torchao"), (INT4, "ct")])
def test_encoding_gives_the_very_bytes_of_other_libraries(form, library):
    values, scales, whole = encoded(GOLDENS["matrix"], form)
    np.testing.assert_allclose(whole, whole_of(form, library), rtol=1e-7)
    theirs = stored_scales(form, library)
    # They give blocks whose scale would be tiny or 0 a larger one, and the values of those blocks differ with it.
    same = scales == theirs
    tiny = host.scale_values(scales) < 2.0**-6
    assert np.all(same | tiny)
    assert (~same).sum() <= {"nvfp4": 3, "mxfp4": 0, "int4": 1}[form.name]
    rows, blocks = np.nonzero(same)
    by_block = lambda packed: packed.reshape(*scales.shape, -1)[rows, blocks]  # noqa: E731
    np.testing.assert_array_equal(by_block(values), by_block(GOLDENS[f"{library}_{form.name}_values"]))


@pytest.mark.parametrize(
    ("form", "library", "tolerance"),
    [(NVFP4, "torchao", 2e-7), (NVFP4, "ct", 2**-7), (MXFP4, "torchao", 0), (MXFP4, "ct", 0), (INT4, "ct", 0)],
)
def test_what_another_library_stored_is_decoded_as_it_decodes_it(form, library, tolerance):
    """NVFP4: torchao multiplies the scales with one another first; compressed-tensors decodes in bfloat16, of eight bits."""
    scales, whole = stored_scales(form, library), whole_of(form, library)
    packed, theirs = GOLDENS[f"{library}_{form.name}_values"], GOLDENS[f"{library}_{form.name}_decoded"]
    found = host.decode(packed, form, scales, whole)
    np.testing.assert_allclose(found, theirs, rtol=tolerance)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_device_decodes_as_the_host_does_to_the_bit(form, fused):
    packed, scales, whole = encoded(GOLDENS["matrix"], form)
    expected = host.decode(packed, form, scales, whole).T
    arrays = packed.T, scales.T
    if fused:  # gate and up: the halves of the columns
        arrays = tuple(array.reshape(len(array), 2, -1) for array in arrays)
        expected = expected.reshape(len(expected), 2, -1)
    wholes = jnp.full((1,) * len(expected.shape), whole) if form.has_global else None
    decoded = decode.decode(jnp.asarray(arrays[0]), jnp.asarray(arrays[1]), wholes, 0, jnp.float32)
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_bfloat16_holds_values_and_block_scales_exactly_but_for_integers_which_are_rounded_once(form):
    packed, scales, _ = encoded(GOLDENS["matrix"], form)
    in_bf16, in_f32 = (
        np.asarray(decode.decode(jnp.asarray(packed.T), jnp.asarray(scales.T), None, 0, dtype))
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_array_equal(in_bf16, in_f32.astype(in_bf16.dtype))
    assert np.array_equal(in_bf16.astype(np.float32), in_f32) == (not form.integers)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_no_value_is_further_off_than_half_a_step_of_its_block(form, data):
    numbers = st.floats(-1e4, 1e4, width=32)
    matrix = np.array([data.draw(st.lists(numbers, min_size=form.block, max_size=form.block))], np.float32)
    packed, scales, whole = encoded(matrix, form)
    decoded = host.decode(packed, form, scales, whole)
    step = host.scale_values(scales) * whole
    if form.integers:
        # The largest magnitude is 7.5 scales, and a scale is rounded by a 256th: of 7.5 up to a half and a 34th are left at 7.
        assert np.all(np.abs(decoded - matrix) <= 0.53 * step)
        np.testing.assert_array_equal(host.encode(decoded, form, scales, whole), packed)
        return
    # Steps of 2 up to 6 scales. In MXFP4 a block's largest magnitude is below 8 scales; NVFP4's scale is rounded by a 16th at most.
    assert np.all(np.abs(decoded - matrix) <= 2 * step + 1e-30)
    small = np.abs(matrix) <= 2 * step
    assert np.all(np.abs(decoded - matrix)[small] <= np.broadcast_to(step / 4 * 1.00001 + 1e-30, matrix.shape)[small])
    np.testing.assert_array_equal(
        host.encode(decoded, form, scales, whole) & 0x77, packed & 0x77, "decoded numbers encode to themselves"
    )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros_and_numbers_that_are_none_leave_a_scale_that_is_none(form):
    matrix = np.zeros((2, 64), np.float32)
    packed, scales, whole = encoded(matrix, form)
    np.testing.assert_array_equal(host.decode(packed, form, scales, whole), matrix)
    for bad in (np.nan, np.inf):
        matrix[1, 5] = bad
        scales = encoded(matrix, form)[1]
        assert not np.isfinite(host.scale_values(scales)[1, 0])
