"""In sizes that every shape has, a kernel gives a row the same bits beside any others, and a depth the same on any number of devices."""

import importlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_kernel_order
from kernel_cases import ExpertsCase
from test_kernel_order import BF16, LAYER, shape, stated

from dsjax.kernels.pallas import PallasKernels, attention, products, tpu_attention, tpu_heads, tpu_products
from dsjax.kernels.pallas.norm import rms_norm
from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.table import Kernels
from dsjax.model.experts import ExpertProduct
from sharding.sums import add_as_tree

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FIXED = PallasKernels(interpret=True, fixed=True)


def drawn(seed, *dims, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=dims), jnp.float32).astype(dtype)


def dense(x, weight, pieces, scale=None, dtype=jnp.float32, **options):
    stored = FP8 if scale is not None else np.dtype(weight.dtype)
    return np.asarray(
        products.dense(weight, scale, stored, LAYER, x, interpret=True, pieces=pieces, dtype=np.dtype(dtype), **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("K", "N", "dtype"), [(512, 200, jnp.bfloat16), (96, 40, jnp.float32)], ids=["bf16", "f32"])
def test_a_row_of_a_dense_product_is_the_same_beside_any_others(K, N, dtype):
    x, weight = drawn(1, 70, K, dtype=dtype), drawn(2, 1, K, N, dtype=dtype)
    found = dense(x, weight, 8)
    exact = np.asarray(x, np.float64) @ np.asarray(weight[0], np.float64)
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(dense(x[69:], weight, 8), found[69:])


@pytest.mark.slow
def test_devices_that_share_a_depth_give_the_bits_of_one():
    x, weight = drawn(1, 5, 1024), drawn(2, 1, 1024, 40)
    whole = dense(x, weight, 8)
    cuts = [slice(at, at + 256) for at in range(0, 1024, 256)]
    branches = [dense(x[:, cut], weight[:, cut], products.fixed_pieces(1024, shares=4)) for cut in cuts]
    np.testing.assert_array_equal(np.asarray(add_as_tree(jnp.stack(branches))), whole)
    assert not np.array_equal(dense(x, weight, 1), whole)  # as one sum it is another


def test_pieces_of_fp8_are_whole_tiles_and_how_many_programs_share_them_changes_no_bit():
    """512 columns are four tiles, of which eight pieces make 32 programs; on a device of four cores each tile has one program."""
    x, weight = drawn(1, 3, 512, dtype=jnp.bfloat16), drawn(2, 1, 512, 512, dtype=jnp.bfloat16)
    assert products.ProductTiles.fixed(3, 512, 8).splits == 8
    assert products.ProductTiles.fixed(3, 512, 8, cores=4).splits == 1
    np.testing.assert_array_equal(dense(x, weight, 8, cores=Cores(count=4)), dense(x, weight, 8))
    assert [products.fixed_pieces(depth, scaled=True) for depth in (7168, 1536, 128, 2048)] == [8, 8, 2, 8]
    assert [tpu_products.fixed_pieces(depth) for depth in (16_384, 18_432, 2048, 1536)] == [8, 8, 8, 4]
    assert products.fixed_pieces(2048, 16) == 1  # more devices than pieces


def test_no_tile_of_fp8_weights_takes_the_scale_of_the_block_before_its_own():
    """2,816, the width of Moonlight's shared experts, in eight pieces would have tiles that begin within a block and end in the next."""
    K, N = 2816, 16
    x, weight = drawn(1, 3, K), drawn(2, 1, K, N).astype(FP8)
    scale = jnp.arange(1.0, K // 128 + 1)[None, :, None]
    found = dense(x, weight, products.fixed_pieces(K, scaled=True), scale)
    exact = np.asarray(x, np.float64) @ (
        np.asarray(weight[0], np.float64) * np.repeat(np.asarray(scale[0]), 128, axis=0)
    )
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


def attend(kernel, q, rope, cache, start, length, tables):
    one = np.dtype(np.float32)
    return np.asarray(
        kernel(q, rope, cache, one, LAYER, start, length, tables, scale=0.3, interpret=True, fixed=True)
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [attention.latent_attention, tpu_attention.latent_attention], ids=["gpu", "tpu"])
def test_a_token_attends_alike_in_a_decode_and_in_a_chunk_of_a_prompt(kernel):
    """Context of 70 positions, in two blocks on GPUs; a chunk of the last three tokens against the last alone with fewer heads."""
    wide = 128 if kernel is tpu_attention.latent_attention else 16
    cache = {"latent": drawn(1, 1, 12, 8, wide), "rope": drawn(2, 1, 12, 8, wide)}
    q, rope = drawn(3, 1, 3, 4, wide), drawn(4, 1, 3, 4, wide)
    tables = jnp.arange(10)[None]
    whole = attend(kernel, q, rope, cache, jnp.array([67]), jnp.array([3]), tables)
    last = attend(kernel, q[:, 2:, 1:3], rope[:, 2:, 1:3], cache, jnp.array([69]), jnp.array([1]), tables[:, :9])
    np.testing.assert_array_equal(last[0, 0], whole[0, 2, 1:3])


@pytest.mark.slow
def test_a_tokens_experts_are_added_in_the_order_of_its_choice_in_one_round_or_many(monkeypatch):
    case = ExpertsCase.drawn(1, X=4, D=32, F=16, N=5, K=3, routing="all")
    product = ExpertProduct(platform="gpu", kernels=Kernels(pallas=FIXED), mean_load=15 / 4)
    params, tokens = case.params(), [jnp.asarray(array) for array in (case.rows, case.ids, case.weights)]
    whole = np.asarray(product(params, *tokens))
    np.testing.assert_array_equal(np.asarray(product(params, *[array[4:] for array in tokens])), whole[4:])
    monkeypatch.setattr(importlib.import_module("dsjax.model.experts"), "round_pairs", lambda *_: 8)
    np.testing.assert_array_equal(np.asarray(product(params, *tokens)), whole)
    for found, expected in zip(whole, case.expected()[0], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("platform", "D"), [("gpu", 96), ("tpu", 128)])
def test_a_rows_norm_is_the_definitions_and_the_same_beside_any_others(platform, D):
    kernels = PallasKernels(platform, interpret=True, fixed=True)
    x, scale = drawn(1, 21, D), drawn(2, D)
    found = np.asarray(rms_norm(x, scale, 1e-6, kernels))
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(scale)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(rms_norm(x[4:5], scale, 1e-6, kernels)), found[4:5])


@pytest.mark.slow
def test_a_tpus_dense_product_has_the_bits_of_devices_that_share_its_depth():
    K, T = 512, 130
    x = drawn(1, T, K, dtype=jnp.bfloat16)
    weight = drawn(2, 1, K, 2, 128).astype(FP8)
    scale = jnp.abs(drawn(3, 1, K // 128, 2, 1))

    def of(x, weight, scale, pieces):
        stack = tpu_products.Stack(weight, scale, FP8)
        return tpu_products.dense(stack, LAYER, x, interpret=True, pieces=pieces, dtype=np.dtype(np.float32))

    whole = np.asarray(of(x, weight, scale, 4))
    halves = [
        of(x[:3, at : at + 256], weight[:, at : at + 256], scale[:, at // 128 : at // 128 + 2], 2) for at in (0, 256)
    ]
    np.testing.assert_array_equal(np.asarray(halves[0] + halves[1]), whole[:3])


def test_a_call_says_that_nothing_chose_its_sizes():
    def of(rows):
        x, weight = shape(rows, 7168), shape(2, 7168, 1536)
        on_tpu = lambda w, x: tpu_products.dense(  # noqa: E731
            tpu_products.Stack(w, None, BF16), LAYER, x, pieces=8, dtype=jnp.bfloat16
        )
        norm = lambda x, s: rms_norm(x, s, 1e-6, PallasKernels("gpu", fixed=True))  # noqa: E731
        return [
            test_kernel_order.dense(rows, pieces=8, dtype=jnp.float32),
            test_kernel_order.absorb(rows, fixed=True),
            test_kernel_order.attend(rows, fixed=True),
            stated(on_tpu, weight, x),
            stated(norm, x, shape(7168)),
        ]

    few = of(1)
    assert few == of(256)
    assert {one["order_depends"] for one in few} == {""}
    assert few[0] == {
        "order_depth": "64", "order_piece": "896", "order_rows": "64", "order_sums": "f32", "order_depends": "",
    }  # fmt: skip


def test_a_tpus_product_by_head_is_einsums_and_a_rows_own():
    weight, x = drawn(1, 3, 64, 128), drawn(2, 140, 3, 64)
    found = np.asarray(tpu_heads.by_head(weight, x, "absorb_keys", interpret=True))
    exact = np.einsum("thk,hkn->thn", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(
        np.asarray(tpu_heads.by_head(weight, x[3:5], "absorb_keys", interpret=True)), found[3:5]
    )
