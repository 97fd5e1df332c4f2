"""What is declared once: tables, storage dtypes, and weights that come out of them as the numbers they mean."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.model.parameters import BLOCK, Declaration, Matrix, dequantise, reinterpret, storage_dtype
from dsjax.model.parameters import ParameterTable as Table
from dsjax.model.transformer import abstract_parameters, parameter_table

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
    if weights == "fp8":
        rows = np.repeat(params["scale"], BLOCK, axis=2)[:, :, :130]
        expected = expected * np.repeat(rows, BLOCK, axis=4)[..., :140]
    found = jax.jit(lambda params: table.bind(params).value(jnp.float32))(params)
    np.testing.assert_array_equal(found, expected)


def test_scales_stand_beside_quantised_matrices_with_one_entry_a_block():
    infos = a_matrix("fp8", "cpu").infos
    assert infos["weight"].shape == (3, 2, 130, 2, 140)
    assert infos["scale"].shape == (3, 2, 2, 2, 2)
    assert infos["weight"].logical_axes == infos["scale"].logical_axes
    assert (infos["weight"].quantised, infos["scale"].init, infos["scale"].dtype) == (True, "scale", F32)
    assert set(a_matrix("bf16", "cpu").infos) == {"weight"}


def test_narrow_dtypes_are_stored_as_integers_of_their_bits_on_cpu_alone():
    assert [storage_dtype(dtype, "cpu").name for dtype in (F32, BF16, FP8)] == ["float32", "uint16", "uint8"]
    for platform in ("gpu", "tpu"):
        assert [storage_dtype(dtype, platform) for dtype in (F32, BF16, FP8)] == [F32, BF16, FP8]
    bits = np.array([0x3F80, 0xC000], np.uint16)
    np.testing.assert_array_equal(jax.jit(lambda b: reinterpret(b, BF16))(bits), np.array([1, -2], BF16))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_parameter_of_v3_changes_its_meaning_or_size_with_the_platform(platform):
    config = load_config("deepseek-v3")
    here = abstract_parameters(config, weights="fp8", platform=platform)
    for path, info in here.items():
        assert info.storage_dtype.itemsize == info.dtype.itemsize, path
        assert info.storage_dtype == storage_dtype(info.dtype, platform), path


def test_v3_has_the_published_number_of_parameters():
    infos = parameter_table(load_config("deepseek-v3"), mtp=False).infos
    assert sum(math.prod(info.shape) for info in infos.values()) == 671_026_419_200
    router_bias = 58 * 256
    # bf16 but for the routers' correction bias
    assert sum(info.nbytes for info in infos.values()) == 2 * (671_026_419_200 - router_bias) + 4 * router_bias


def test_v3_s_mtp_module_adds_its_own():
    config = load_config("deepseek-v3")
    with_mtp, without = (abstract_parameters(config, mtp=mtp) for mtp in (True, False))
    own = sum(math.prod(info.shape) for path, info in with_mtp.items() if path not in without)
    assert own == 11_610_068_224
    assert all(path.startswith("mtp.") for path in with_mtp.keys() - without.keys())


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


def test_a_device_of_dp_32_holds_v3_s_active_parameters():
    # 8 of 256 experts are on a device, and 8 are used by a token: both are 37,552,297,472 parameters.
    infos = parameter_table(load_config("deepseek-v3"), mtp=False).infos
    on_a_device = sum(math.prod(info.shape) // (32 if ".experts." in path else 1) for path, info in infos.items())
    assert on_a_device == 37_552_297_472


def test_a_table_binds_values_to_the_paths_that_it_names():
    table = a_matrix("bf16", "gpu", (2, 3, 2, 4))
    bound = table.bind({"weight": np.zeros((3, 2, 3, 2, 4), BF16)})
    assert bound.value(jnp.float32).shape == (3, 2, 3, 2, 4)
    with pytest.raises(KeyError, match="weight"):
        table.bind({})


def test_materialised_products_are_derived_and_in_no_checkpoint():
    config = load_config("deepseek-v3")
    plain = abstract_parameters(config, mtp=False)
    more = abstract_parameters(config, materialise=True, mtp=False)
    added = {path: info for path, info in more.items() if path not in plain}
    assert {info.init for info in added.values()} == {"derived"}
    assert added["moe_layers.attn.query_key"].shape == (58, 1536, 128, 512)
    assert added["moe_layers.attn.value_output"].shape == (58, 128, 512, 7168)
