"""What is declared once: tables, storage dtypes, and weights that come out of them as the numbers they mean."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import scaled

from dsjax.config import load_config
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import BLOCK, Declaration, Matrix, dequantise, reinterpret, storage_dtype
from dsjax.model.parameters import ParameterTable as Table

FP8, BF16, F32 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32))


def element_by_element(weight, scale, rows: int):
    """``weight × scale`` of the block, one index at a time; ``rows`` is the axis of the matrix's rows."""
    out = np.empty(weight.shape, np.float32)
    for index in np.ndindex(weight.shape):
        at = list(index)
        at[rows] //= BLOCK
        at[-1] //= BLOCK
        out[index] = np.float32(weight[index]) * scale[tuple(at)]
    return out


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((130, 3), 0),  # a ragged last block of rows
        ((3, 257), 0),  # and of columns
        ((128, 128), 0),
        ((2, 129, 5), 1),  # stacked
        ((131, 2, 3), 0),  # gate and up fused
        ((2, 129, 2, 130), 1),  # stacked experts, fused
        ((4, 2, 6), 1),  # two rows, no fusion: one block
    ],
)
def test_each_element_is_multiplied_by_the_scale_of_its_own_block(shape, rows):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape).astype(FP8)
    scale_shape = [-(-size // BLOCK) if axis in (rows, len(shape) - 1) else size for axis, size in enumerate(shape)]
    scale = (2.0 ** np.arange(math.prod(scale_shape)) / 8).astype(np.float32).reshape(scale_shape)
    expected = element_by_element(weight, scale, rows)
    found = jax.jit(lambda w, s: dequantise(w, s, jnp.float32))(weight, scale)
    np.testing.assert_array_equal(found, expected)
    rounded = jax.jit(lambda w, s: dequantise(w, s, jnp.bfloat16))(weight, scale)
    np.testing.assert_array_equal(rounded, expected.astype(BF16))


def a_matrix(weights, platform, shape=(2, 130, 2, 140)):
    declare = Declaration(weights, platform).stacked(3)
    return Table.of(Matrix(declare, shape, ("experts", "embed", "stack", "expert_width")))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("weights", ["f32", "bf16", "fp8"])
def test_a_declared_matrix_reads_the_stored_bits_as_what_they_mean(weights, platform):
    table = a_matrix(weights, platform)
    rng = np.random.default_rng(1)
    params, expected = {}, None
    for path, info in table.infos.items():
        values = rng.random(info.shape, np.float32).astype(info.dtype)
        params[path] = values.view(info.storage_dtype)
        if path == "weight":
            expected = values.astype(np.float32)
            if (weights, platform) == ("fp8", "gpu"):
                assert info.logical_axes == ("layers", "experts", "stack", "expert_width", "embed")
                expected = expected.transpose(0, 1, 4, 2, 3)
    expected = scaled(expected, params.get("scale"), (2, 4)).astype(np.float32)
    found = jax.jit(lambda params: table.bind(params).value(jnp.float32))(params)
    np.testing.assert_array_equal(found, expected)


def test_narrow_dtypes_are_stored_as_integers_of_their_bits_on_cpu_alone():
    assert [storage_dtype(dtype, "cpu").name for dtype in (F32, BF16, FP8)] == ["float32", "uint16", "uint8"]
    for platform in ("gpu", "tpu"):
        assert [storage_dtype(dtype, platform) for dtype in (F32, BF16, FP8)] == [F32, BF16, FP8]
    bits = np.array([0x3F80, 0xC000], np.uint16)
    np.testing.assert_array_equal(jax.jit(lambda b: reinterpret(b, BF16))(bits), np.array([1, -2], BF16))


def test_v3_s_fp8_weights_are_the_linear_ones_with_a_scale_a_block():
    config = load_config("deepseek-v3")
    infos = parameter_table(config, weights="fp8", mtp=False).infos
    fp8 = {path: info for path, info in infos.items() if info.dtype == FP8}
    # Everything but embedding, head, norms, routers: all of attention's, the MLPs' and the experts' matrices.
    norms_of_mla = 1536 + 512
    linear = 61 * (187_107_328 - norms_of_mla) + 3 * 396_361_728 + 58 * 257 * 44_040_192
    assert sum(info.nbytes for info in fp8.values()) == linear
    rest = {path: info for path, info in infos.items() if info.dtype != FP8}
    scales = {path for path in rest if path.endswith(".scale") and "norm" not in path}
    assert scales == {path.removesuffix("weight") + "scale" for path in fp8}
    # kv_a has 576 columns: four whole blocks and a half one.
    assert infos["moe_layers.attn.kv_a.scale"].shape == (58, 56, 5)
    assert infos["moe_layers.moe.experts.gate_up.scale"].shape == (58, 256, 56, 2, 16)
    assert infos["moe_layers.moe.experts.down.scale"].shape == (58, 256, 16, 56)
