"""With --batch-invariant a request gets on a GPU, beside others and in other chunks, the bits that it gets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits_together import bits_alone_and_together
from layouts import write_checkpoint

from dsjax.kernels.pallas import PallasKernels, attention, heads, products
from dsjax.kernels.pallas.norm import rms_norm
from sharding.sums import add_as_tree

pytestmark = pytest.mark.gpu

BF16, LAYER = np.dtype(jnp.bfloat16), jnp.int32(0)


def drawn(seed, *dims, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), dims, jnp.float32) * scale).astype(jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_gets_the_bits_of_it_alone_beside_others_and_in_other_chunks(tmp_path, dtype, gpu):
    alone, together = bits_alone_and_together(
        write_checkpoint(tmp_path), {"prefill_chunk": 16}, {"prefill_chunk": 8}, dtype=dtype
    )
    assert alone == together[1]
    assert len(set(together)) == 3


@pytest.mark.parametrize(("K", "N"), [(7168, 1536), (1536, 24_576), (16_384, 7168)])
def test_rows_and_devices_that_share_the_depth_change_no_bit_of_v3s_products(K, N, gpu):
    x, weight = drawn(1, 300, K), drawn(2, 1, K, N, scale=K**-0.5)

    def dense(x, weight, pieces):
        return np.asarray(products.dense(weight, None, BF16, LAYER, x, pieces=pieces, dtype=np.dtype(np.float32)))

    whole = dense(x, weight, 8)
    for rows in (slice(0, 1), slice(7, 39), slice(172, 300)):
        np.testing.assert_array_equal(dense(x[rows], weight, 8), whole[rows])
    cuts = [slice(at, at + K // 8) for at in range(0, K, K // 8)]
    branches = jnp.stack([dense(x[:32, cut], weight[:, cut], 1) for cut in cuts])
    np.testing.assert_array_equal(np.asarray(add_as_tree(branches)), whole[:32])


@pytest.mark.parametrize("H", [16, 128])
def test_a_token_attends_alike_in_a_decode_beside_others_and_in_a_prompt(H, gpu):
    G, context = 16, 1000
    cache = {"latent": drawn(1, 1, 64, G, 512), "rope": drawn(2, 1, 64, G, 64)}
    q, rope, tables = drawn(3, 1, 40, H, 512), drawn(4, 1, 40, H, 64), jnp.arange(64)[None]

    def attend(q, rope, start, length, tables):
        rows = [jnp.full((len(q),), value, jnp.int32) for value in (start, length)]
        out = attention.latent_attention(q, rope, cache, BF16, LAYER, *rows, tables, scale=0.07, fixed=True)
        return np.asarray(out.astype(jnp.float32))

    prompt = attend(q, rope, context - 40, 40, tables)
    last = [jnp.repeat(array[:, 39:], 33, axis=0) for array in (q, rope)]
    decodes = attend(*last, context - 1, 1, jnp.repeat(tables, 33, axis=0))
    np.testing.assert_array_equal(decodes[:, 0], np.broadcast_to(prompt[0, 39], decodes[:, 0].shape))


def test_heads_and_norms_of_a_row_are_the_same_beside_any_others(gpu):
    weight, q, x = drawn(1, 1, 512, 16 * 256), drawn(2, 130, 16, 128), drawn(3, 130, 7168)
    absorb = lambda q: np.asarray(heads.absorb(weight, None, BF16, LAYER, q, 128, fixed=True).astype(jnp.float32))  # noqa: E731
    norm = lambda x: np.asarray(rms_norm(x, x[0], 1e-6, PallasKernels(fixed=True)).astype(jnp.float32))  # noqa: E731
    np.testing.assert_array_equal(absorb(q[5:6]), absorb(q)[5:6])
    np.testing.assert_array_equal(
        np.asarray(rms_norm(x[5:6], x[0], 1e-6, PallasKernels(fixed=True)).astype(jnp.float32)), norm(x)[5:6]
    )
