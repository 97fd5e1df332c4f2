"""What travels: one array of words, bit for bit; and the FP8 wire within its rounding, which `test_fp8_product.py` defines."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dispatch_cases import K, compiled, routings

from sharding.dispatch import DispatchConfig
from sharding.dispatch.wire import WireFormat
from sharding.fp8 import dequantise, quantise


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "word"), [("float32", 4), ("bfloat16", 2), ("bfloat16", 1)])
def test_packed_rows_come_out_as_they_went_in(dtype, word):
    rng, fp8 = np.random.default_rng(0), word == 1
    wire = WireFormat(200, 3, jnp.dtype(dtype), fp8)
    x = jnp.asarray(rng.normal(size=(5, 200)), dtype)
    ids = jnp.array(rng.integers(-1, 300, size=(5, 3)), jnp.int32)
    weights = jnp.asarray(rng.random((5, 3)), jnp.float32)
    packed = jax.jit(wire.pack)(x, ids, weights, jnp.int32(70_000))
    assert (packed.dtype.itemsize, packed.shape, packed.nbytes) == (word, (5, wire.row_words), 5 * wire.row_bytes)
    rows, ids_back, weights_back, extra = wire.unpack(packed)
    np.testing.assert_array_equal(ids_back, ids)
    np.testing.assert_array_equal(weights_back, weights)
    np.testing.assert_array_equal(extra, [70_000] * 5)
    order = jnp.array([4, 0, 0])
    assert (rows.shape, rows.dtype) == (x.shape, x.dtype)
    wanted = np.asarray(dequantise(*quantise(x)).astype(x.dtype) if fp8 else x)
    np.testing.assert_array_equal(rows.take(order, axis=0), wanted[np.asarray(order)])


def test_every_bit_pattern_survives_the_wire_even_those_of_nan():
    patterns = np.arange(2**16, dtype=np.uint16)
    x = patterns.view(ml_dtypes.bfloat16).reshape(256, 256)
    wire = WireFormat(256, 1, jnp.dtype(jnp.bfloat16))
    packed = wire.pack(jnp.asarray(x), jnp.zeros((256, 1), int), jnp.zeros((256, 1)), jnp.int32(0))
    np.testing.assert_array_equal(np.asarray(packed)[:, :256], patterns.reshape(256, 256))


def pass_through(params, rows, ids, weights):
    """Every expert is the identity, and only ever one is used."""
    x = rows.take(jnp.arange(rows.shape[0]), axis=0).astype(jnp.float32)
    return (x * jnp.sum(jnp.where(ids >= 0, weights, 0), axis=1, keepdims=True)).astype(rows.dtype)


@pytest.mark.parametrize("method", ["gather", "padded"])
def test_the_fp8_wire_rounds_each_value_by_at_most_a_sixteenth_and_keeps_extremes_finite(method):
    spec, call = compiled("dp=8", DispatchConfig(method, wire="fp8"), 32, local_experts=pass_through)
    tokens, width = 8 * spec.num_devices, 256
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(tokens, width)) * np.exp(3 * rng.normal(size=(tokens, 1)))).astype(np.float32)
    x[0] = 0
    x[1, 7], x[2, 200], x[3] = 3e38, -1e-30, 448.0
    slots = routings(tokens, 32, spec.num_devices)["every token to one expert"]
    y, _ = call(x, slots, np.ones((tokens, K), np.float32))
    assert np.all(np.isfinite(y))
    # The sum has one term, so only the way there rounds. The scale's division may fall on the other side of a tie
    # than NumPy's: compare with the format's own bound. e4m3 has 3 bits after the leading one (half a step: 2^-4
    # of the value); below 2^-6 its step is 2^-9.
    largest = np.abs(x).reshape(tokens, -1, 128).max(axis=2).repeat(128, axis=1)
    assert np.all(np.abs(y - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * largest / 448) * 1.0001)
    assert np.any(y != x)
    np.testing.assert_array_equal(y[3], x[3])
    np.testing.assert_allclose(y, dequantise(*quantise(jnp.asarray(x))), rtol=2.0**-3, atol=1e-30)


@pytest.mark.parametrize("method", ["gather", "ragged"])
def test_bfloat16_rows_keep_their_bits_both_ways(method):
    spec, call = compiled("dp=8", DispatchConfig(method), 32, local_experts=pass_through, dtype=jnp.bfloat16)
    tokens = 4 * spec.num_devices
    x = np.random.default_rng(0).normal(size=(tokens, 64)).astype(ml_dtypes.bfloat16)
    slots = routings(tokens, 32, spec.num_devices)["every token to one expert"]
    y, _ = call(x, slots, np.ones((tokens, K), np.float32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), x)
