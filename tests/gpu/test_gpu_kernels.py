"""Each Pallas kernel, compiled for the GPU at hand, at DeepSeek-V3's widths, against the plain form in float32 on the same GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsjax.kernels.pallas import PallasKernels, activations, attention, compressed, heads, products
from dsjax.kernels.table import Kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme, block_product
from dsjax.model.parameters import dequantise
from sharding import fp8

pytestmark = pytest.mark.gpu

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
M, O, G = 512, 64, 16  # V3's latents and rotary keys, and slots of a page
PALLAS = Kernels(pallas=PallasKernels())


def drawn(seed, *shape, dtype=BF16, scale=1.0):
    values = jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale
    return values.astype(dtype)


def softmax_over_pages(q_latent, q_rope, latent, rope, start, length, tables, filled, scale):
    """All in float32, a row at a time."""
    found = []
    for r in range(len(start)):
        keys, ropes = (a[1][tables[r]].reshape(-1, a.shape[-1]).astype(jnp.float32) for a in (latent, rope))
        own = start[r] + jnp.arange(q_latent.shape[1])
        at = jnp.arange(keys.shape[0])
        seen = at <= own[:, None]
        if filled is not None:
            seen &= filled[tables[r]].reshape(-1) | (at == own[:, None])
        scores = jnp.einsum("chm,sm->chs", q_latent[r].astype(jnp.float32), keys)
        scores = (scores + jnp.einsum("cho,so->chs", q_rope[r].astype(jnp.float32), ropes)) * scale
        probs = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        active = (jnp.arange(len(own)) < length[r])[:, None, None]
        found.append(jnp.where(active, jnp.einsum("chs,sm->chm", probs, keys), 0))
    return jnp.stack(found)


@pytest.mark.parametrize(
    ("R", "C", "H", "context", "holes"),
    [
        (3, 1, 128, 4096, False),  # a decode, split over the context
        (32, 1, 16, 1024, False),  # heads of one of eight devices
        (4, 3, 128, 777, True),  # drafts being verified, with holes
        (2, 256, 128, 1024, False),  # chunks of prompts
        (2, 40, 5, 130, False),  # nothing divides
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_attention_is_softmax_over_each_rows_pages(R, C, H, context, holes, dtype, gpu):
    pages = -(-context // G)
    rng = np.random.default_rng(R)
    tables = jnp.asarray(1 + rng.permutation(R * pages).reshape(R, pages).astype(np.int32))
    start = jnp.asarray(rng.integers(0, context - C + 1, R).astype(np.int32)).at[0].set(context - C)
    length = jnp.asarray(rng.integers(0, C + 1, R).astype(np.int32)).at[0].set(C)
    filled = jnp.asarray(rng.random((R * pages + 1, G)) < 0.7) if holes else None
    q_latent, q_rope = drawn(0, R, C, H, M, dtype=dtype), drawn(1, R, C, H, O, dtype=dtype)
    latent, rope = (drawn(seed, 2, R * pages + 1, G, width, dtype=dtype) for seed, width in ((2, M), (3, O)))
    scale = 0.5 / (M + O) ** 0.5

    def run(*arrays):
        cache = {"latent": arrays[2], "rope": arrays[3]}
        return attention.latent_attention(
            arrays[0], arrays[1], cache, np.dtype(dtype), jnp.int32(1), start, length, tables, filled, scale=scale
        )

    found = jax.jit(run)(q_latent, q_rope, latent, rope).astype(jnp.float32)
    expected = softmax_over_pages(q_latent, q_rope, latent, rope, start, length, tables, filled, scale)
    # bf16: weights and results are rounded to 8 bits; float32: another order of sums of 576 and of the context.
    np.testing.assert_allclose(found, expected, atol=0.02 if dtype == jnp.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    ("R", "C", "H", "slots", "chosen"),
    [
        (3, 1, 64, 1, False),  # a decode, whose entries are split
        (2, 256, 128, 1, False),  # chunks of prompts
        (8, 1, 64, 32, True),  # chosen entries
        (2, 5, 6, 32, True),  # drafts, on one of several devices
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_attention_of_v4_is_softmax_over_sink_window_and_entries(R, C, H, slots, chosen, dtype, gpu):
    span, entries, scale, rng = 128, 1024, 0.5 / M**0.5, np.random.default_rng(R)
    positions = (rng.integers(span, 4096, (R, 1)) + np.arange(C)).astype(np.int32)
    pages, ring = -(-entries // slots), (C + span - 2) // span + 2
    tables, windows = (1 + rng.permutation(R * n).reshape(R, n).astype(np.int32) for n in (pages, ring))
    picked = np.sort(rng.integers(0, entries, (R, C, 512)), axis=-1).astype(np.int32) if chosen else None
    count = rng.integers(0, 512, (R, C)).astype(np.int32)
    query, sink = drawn(0, R, C, H, M, dtype=dtype), drawn(1, H, dtype=jnp.float32)
    window, kept = drawn(2, 2, R * ring + 1, span, M, dtype=dtype), drawn(3, 2, R * pages + 1, slots, M, dtype=dtype)

    def run(*arrays):
        layers, rest = (jnp.int32(1), jnp.int32(1)), (positions, windows, tables, None, picked, count)
        rest = [array if array is None else jnp.asarray(array) for array in rest]
        return compressed.compressed_attention(*arrays, layers, *rest, span=span, scale=scale, stored=np.dtype(dtype))

    found = jax.jit(run)(query, sink, window, kept).astype(jnp.float32)
    for r, c in [(0, 0), (R - 1, C - 1)]:
        tokens = positions[r, c] - np.arange(span)
        numbers = np.arange(count[r, c]) if picked is None else picked[r, c, : count[r, c]]
        own = window[1, windows[r, tokens // span % ring], tokens % span]
        context = jnp.concatenate([own, kept[1, tables[r, numbers // slots], numbers % slots]]).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            scores = query[r, c].astype(jnp.float32) @ context.T * scale
            probs = jax.nn.softmax(jnp.concatenate([sink[:, None], scores], axis=1), axis=1)[:, 1:]
            # bf16: weights and results are rounded to 8 bits; float32: another order of sums of 512 and of the context.
            np.testing.assert_allclose(found[r, c], probs @ context, atol=0.02 if dtype == jnp.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    ("stored", "scheme"),
    [(BF16, ActivationScheme()), (FP8, ActivationScheme()), (FP8, ActivationScheme(dynamic=True))],
    ids=["bfloat16", "FP8 weights", "FP8 activations"],
)
@pytest.mark.parametrize(("N", "load"), [(1, 0.1), (128, 4.0), (1024, 32.0), (4096, 512.0)])
def test_experts_of_v3_are_those_of_the_plain_form(N, load, stored, scheme, gpu):
    X, D, F, K = 8, 7168, 2048, 8
    rng = np.random.default_rng(N)
    ids = rng.integers(0, round(N * K / load), (N, K)).astype(np.int32)
    ids[ids >= X] = -1
    params = {
        "gate_up.weight": drawn(0, 2, X, D, 2, F, dtype=stored, scale=D**-0.5 if stored == BF16 else 1.0),
        "down.weight": drawn(1, 2, X, F, D, dtype=stored, scale=F**-0.5 if stored == BF16 else 1.0),
        "layer": jnp.int32(1),
    }
    if stored == FP8:
        params["gate_up.scale"] = jax.random.uniform(jax.random.key(3), (2, X, D // 128, 2, F // 128)) * D**-0.5
        params["down.scale"] = jax.random.uniform(jax.random.key(4), (2, X, F // 128, D // 128)) * F**-0.5
    arguments = params, drawn(2, N, D), jnp.asarray(ids), jnp.asarray(rng.random((N, K), np.float32))
    options = {"weight_dtype": stored, "platform": "gpu", "mean_load": load, "scheme": scheme}
    found = jax.jit(ExpertProduct(kernels=PALLAS, **options))(*arguments).astype(jnp.float32)
    plain = jax.jit(ExpertProduct(**options))(*arguments).astype(jnp.float32)
    # Hidden values, each expert's result and the sum are rounded to 8 bits; plain rounds dequantised weights too. A hidden value in the
    # middle between two FP8 numbers may go either way.
    np.testing.assert_allclose(found, plain, atol=0.03 * float(jnp.abs(plain).max() + 1e-6))


def drawn_matrix(K, N, stored):
    """A stack of two matrices, the scales of their blocks, and the second one as numbers."""
    weight = drawn(0, 2, K, N, dtype=stored)
    if stored == BF16:
        return weight, None, weight[1].astype(jnp.float32)
    scale = jax.random.uniform(jax.random.key(1), (2, K // 128, -(-N // 128)))
    return weight, scale, dequantise(weight[1], scale[1], jnp.float32)


DENSE = pytest.mark.parametrize(("K", "N"), [(7168, 1536), (7168, 576), (1536, 24576), (16384, 7168), (2048, 7168)])


@pytest.mark.parametrize("stored", [BF16, FP8], ids=str)
@DENSE
@pytest.mark.parametrize("T", [1, 32, 2048])
def test_dense_matrices_of_v3_are_multiplied_with_in_the_stack(T, K, N, stored, gpu):
    weight, scale, value = drawn_matrix(K, N, stored)
    x = drawn(2, T, K, scale=K**-0.5)
    found = jax.jit(lambda w, s, x: products.dense(w, s, stored, jnp.int32(1), x))(weight, scale, x)
    np.testing.assert_allclose(found.astype(jnp.float32), x.astype(jnp.float32) @ value, atol=0.03)


@DENSE
@pytest.mark.parametrize("T", [1, 32, 2048])
@pytest.mark.parametrize("powers", [False, True])
def test_quantised_rows_times_dense_matrices_of_v3_are_the_plain_form_s(T, K, N, powers, gpu):
    (weight, scale, _), x = drawn_matrix(K, N, FP8), drawn(2, T, K, scale=K**-0.5)
    rows = jax.jit(lambda x: activations.quantise(x, powers=powers))(x)
    exact = fp8.quantise(x, powers=powers)
    # Division may round the other way: a unit in a scale's last place, and a value on the edge goes to its neighbour.
    np.testing.assert_allclose(rows.scales, exact.scales, rtol=3e-7)
    steps = (jax.lax.bitcast_convert_type(q.values, jnp.int8).astype(int) for q in (rows, exact))
    assert np.abs(np.subtract(*map(np.asarray, steps))).max() <= 1
    found = jax.jit(lambda w, s, q: products.dense(w, s, FP8, jnp.int32(1), q, dtype=BF16))(weight, scale, rows)
    with jax.default_matmul_precision("highest"):
        expected = block_product(rows, weight[1], scale[1], jnp.float32)
    # FP8 tensor cores of Hopper keep 14 bits of a sum of 32 products (arXiv 2412.19437, section 3.3.2); the result has 8.
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03)


@pytest.mark.parametrize("stored", [BF16, FP8], ids=str)
@pytest.mark.parametrize(("T", "H"), [(32, 128), (2048, 16)])
def test_keys_go_into_queries_and_values_onto_results(T, H, stored, gpu):
    N = U = 128
    weight, scale, value = drawn_matrix(M, H * (N + U), stored)
    keys, values = jnp.split(value.reshape(M, H, N + U), [N], axis=2)
    for kernel, width, matrix, by in (
        (heads.absorb, N, keys, "thn,mhn->thm"),
        (heads.expand, M, values, "thm,mhu->thu"),
    ):
        x = drawn(2, T, H, width, scale=width**-0.5)
        found = jax.jit(lambda w, s, x, kernel=kernel: kernel(w, s, stored, jnp.int32(1), x, U))(weight, scale, x)
        expected = jnp.einsum(by, x.astype(jnp.float32), matrix)
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03)
