"""A DeepSeek-V4's cache in FP8 with index keys in FP4, against the arithmetic of DeepSeek's inference code.

The references below are NumPy with ml_dtypes' number formats: `act_quant` in blocks of 64 on unrotated values, a Hadamard matrix and
`fp4_act_quant` in blocks of 32 on index queries and keys, whose rotated pairs lie side by side, and attention to what they return.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
from compressed_layer import (
    KINDS,
    LENGTH,
    MESHES,
    assert_a_mesh_gives_the_same_bits,
    assert_chunks_give_the_bits_of_the_whole,
    assert_rejected_drafts_leave_no_trace,
    model,
    whole,
)
from scipy.linalg import hadamard

from dsjax.model.compressed.precision import pack_entries, pack_keys, round_queries, unpack_entries, unpack_keys
from dsjax.model.sparse import IndexScores
from sharding import fp8

FP4 = IndexScores(fp4=True)
QUANTISED = {"stored": fp8.E4M3, "scores": FP4, "blocks": True}
ROTATED, WIDTH, INDEX, TOPK, HEADS = 4, 76, 64, 16, 8
"""Sizes in `compressed_layer.py`: an entry's unrotated values are two blocks, and so is an index key."""
BF16, E4M3, E2M1 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def published(x, block, least, largest, number):
    """`act_quant` and `fp4_act_quant` in place: scale 2^⌈log2(max(amax, least) / largest)⌉, clip, round, and multiply again."""
    found = np.empty_like(x)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]
        amax = np.maximum(np.abs(part).max(axis=-1, keepdims=True), np.float32(least))
        fraction, exponent = np.frexp(amax * np.float32(1 / largest))
        scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        values = np.clip(part / scale, -largest, largest).astype(number).astype(np.float32)
        found[..., start : start + block] = values * scale
    return found


def published_entry(x, rotated=ROTATED):
    plain = published(x[..., :-rotated], 64, 1e-4, 448, E4M3)
    return np.concatenate([plain, x[..., -rotated:].astype(BF16).astype(np.float32)], axis=-1)


def published_fp4(x):
    return published(x, 32, 6 * 2.0**-126, 6, E2M1)


def side_by_side(x):
    """Index queries or keys with the pairs of rotated values as the published code has them."""
    first, second = np.split(x[..., -ROTATED:], 2, axis=-1)
    return np.concatenate([x[..., :-ROTATED], np.stack([first, second], -1).reshape(first.shape[:-1] + (-1,))], axis=-1)


def rounded(name, array, entries=True):
    """What the published code keeps of a cache array; entries: whether they are in FP8."""
    if name.startswith("state"):
        return array
    return published_fp4(turned(array)) if name == "c4_index" else published_entry(array) if entries else array


def turned(x):
    return (side_by_side(x).astype(float) @ hadamard(INDEX) * INDEX**-0.5).astype(np.float32)


def numbers(rng, shape):
    """Numbers of many magnitudes, zeros, and ones that lie half way between two of a format."""
    x = (rng.normal(0, 1, shape) * 10.0 ** rng.integers(-7, 5, (*shape[:-1], 1))).astype(np.float32)
    x[0], x[1] = 0, np.resize([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5], shape[1:])
    x[2], x[3] = np.resize([448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10], shape[1:]), 2.0**-140
    return x


def test_an_entry_takes_584_bytes_and_is_what_the_published_code_keeps():
    x = numbers(np.random.default_rng(1), (500, 512))
    packed = np.asarray(jax.jit(pack_entries, static_argnums=1)(x, 64))
    assert packed.shape == (500, 584)
    assert packed.dtype == np.uint8
    expected = published_entry(x, rotated=64)
    np.testing.assert_array_equal(unpack_entries(packed, 512, 64), expected)
    # Where each number lies: 448 of e4m3, seven exponents and a zero, 64 of bfloat16.
    scales = np.ldexp(np.float32(1), packed[:, 448:455].astype(int) - 127).repeat(64, axis=1)
    np.testing.assert_array_equal(packed[:, :448].view(E4M3).astype(np.float32) * scales, expected[:, :448])
    assert not packed[:, 455].any()
    np.testing.assert_array_equal(packed[:, 456:].copy().view(BF16).astype(np.float32), expected[:, 448:])


def test_an_index_key_takes_68_bytes_and_is_what_the_published_code_keeps():
    x = numbers(np.random.default_rng(2), (500, 128))
    packed = np.asarray(jax.jit(pack_keys)(x))
    assert packed.shape == (500, 68)
    expected = published_fp4(x)
    np.testing.assert_array_equal(unpack_keys(packed, 128), expected)
    np.testing.assert_array_equal(round_queries(x), expected)
    codes = np.stack([packed[:, :64] & 15, packed[:, :64] >> 4], axis=-1).reshape(500, 128)
    scales = np.ldexp(np.float32(1), packed[:, 64:].astype(int) - 127).repeat(32, axis=1)
    np.testing.assert_array_equal(codes.view(E2M1).astype(np.float32) * scales, expected)


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda x: pack_entries(x, 4), lambda x: unpack_entries(x, 76, 4)), (pack_keys, lambda x: unpack_keys(x, 76))],
)
def test_a_number_that_is_not_finite_leaves_a_nan(pack, unpack):
    for wrong in (np.nan, np.inf):
        x = np.ones((2, 76), np.float32)
        x[1, 3] = wrong
        found = np.asarray(unpack(pack(x)))
        assert np.isfinite(found[0]).all()
        assert np.isnan(found[1, 3])


def decoded(name, array):
    """The numbers of a quantised cache array's bytes."""
    if name.startswith("state"):
        return array
    return unpack_keys(array, INDEX) if name == "c4_index" else unpack_entries(array, WIDTH, ROTATED)


def bytes_of(layer, name):
    (group,) = (group for group in layer.groups if group.name == name)
    return group.entry_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cached_is_the_published_rounding_of_what_a_float32_cache_has(kind, backend):
    exact, _, _ = whole(kind, kernels=backend, blocks=True)
    quantised, _, _ = whole(kind, kernels=backend, **QUANTISED)
    for name, array in quantised.own(0).items():
        if not name.startswith("state"):
            assert bytes_of(quantised, name) == (INDEX // 2 + 2 if name == "c4_index" else 72 + 8 + 2 * ROTATED)
        np.testing.assert_array_equal(decoded(name, array), rounded(name, exact.own(0)[name]), err_msg=name)


def published_attention(kind, numbers, p, round_query):
    """Attention of one sequence's queries to the numbers of a cache, before the result is rotated back."""
    config, _, params = model(blocks=True)
    (sink,) = (params[path][0] for path in params if path.startswith(f"{kind}_moe_") and path.endswith(".sink"))
    window = numbers["window"].reshape(-1, WIDTH)
    out = np.zeros((LENGTH, HEADS, WIDTH))
    for position in range(LENGTH):
        context = [window[max(position - 127, 0) : position + 1]]
        if kind != "window":
            rate = {"csa": 4, "hca": 128}[kind]
            seen = np.arange((position + 1) // rate)
            if kind == "csa" and len(seen) > TOPK:
                query = turned(np.asarray(p.index_query)[0, position])
                query = published_fp4(query) if round_query else query
                products = query.astype(float) @ numbers["c4_index"].reshape(-1, INDEX)[seen].T
                scores = np.asarray(p.index_weight)[0, position] @ np.maximum(products, 0)
                seen = np.sort(np.argsort(-scores, kind="stable")[:TOPK])
            context.append(numbers[{"csa": "c4", "hca": "c128"}[kind]].reshape(-1, WIDTH)[seen])
        context = np.concatenate(context).astype(float)
        scores = np.asarray(p.query)[0, position].astype(float) @ context.T * config.softmax_scale
        weights = np.exp(np.concatenate([sink[:, None], scores], axis=1))
        out[position] = (weights / weights.sum(axis=1, keepdims=True))[:, 1:] @ context
    return out


def rotated_back(p, out):
    """Each head's values with their last rotated by the opposite of the position's angles, pairs side by side."""
    first, second = np.split(out[..., -ROTATED:], 2, axis=-1)
    turn = (np.asarray(p.rotation.cos) - 1j * np.asarray(p.rotation.sin))[0, :, None]
    pairs = (first + 1j * second) * turn
    turned_back = np.stack([pairs.real, pairs.imag], -1).reshape(*out.shape[:-1], ROTATED)
    return np.concatenate([out[..., :-ROTATED], turned_back], -1)


@pytest.mark.parametrize(
    ("kind", "stored", "scores"),
    [
        ("window", fp8.E4M3, IndexScores()),
        ("csa", fp8.E4M3, FP4),
        ("csa", fp8.E4M3, IndexScores()),
        ("csa", np.float32, FP4),
        ("hca", fp8.E4M3, IndexScores()),
    ],
)
def test_attention_is_the_published_one_to_what_the_published_code_keeps(kind, stored, scores, backend):
    exact, _, p = whole(kind, kernels=backend, blocks=True)
    numbers = {name: rounded(name, array, stored == fp8.E4M3) for name, array in exact.own(0).items()}
    _, out, _ = whole(kind, kernels=backend, stored=stored, scores=scores, blocks=True)
    expected = rotated_back(p, published_attention(kind, numbers, p, scores.fp4))
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_bfloat16_cache_may_keep_index_keys_in_fp4():
    layer, _, _ = whole("csa", stored=BF16, scores=FP4, blocks=True)
    assert {name: bytes_of(layer, name) for name in ("c4", "c4_index")} == {"c4": 2 * WIDTH, "c4_index": INDEX // 2 + 2}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_that_cross_pages_and_single_tokens_give_the_same_bits(kind, backend):
    sizes = (5, 121, 1, 1, 1, 130, 1, 1, 1, 1, 37)
    assert_chunks_give_the_bits_of_the_whole(kind, sizes, kernels=backend, **QUANTISED)


def test_rejected_drafts_leave_the_bits_of_no_drafts_in_fp8(backend):
    assert_rejected_drafts_leave_no_trace("csa", kernels=backend, **QUANTISED)


@pytest.mark.slow
@MESHES
def test_every_mesh_gives_the_same_bits_in_fp8(kind, mesh, backend):
    assert_a_mesh_gives_the_same_bits(kind, mesh, kernels=backend, **QUANTISED)
