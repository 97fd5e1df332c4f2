"""Loading onto meshes: the right values in the right shard, shared where equal, exact in every format."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from fp8_checkpoints import dequantised
from odd_checkpoints import CONFIG, assert_same, make_checkpoint, make_tensors, place

from dsjax.checkpoint.errors import CheckpointError, CheckpointWarning
from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.names import SCALE_SUFFIX
from dsjax.checkpoint.quantise import block_scales, quantise
from dsjax.checkpoint.source import open_checkpoint
from dsjax.model.window import ParameterWindow
from sharding.layer_placement import LayerPlacements

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("mesh", ["dp=8", "dp=2,tp=4", "tp=8", "tp=8,ep=1", "dp=8,ep=2", "dp=4,tp=8,ep=8"])
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_every_mesh_gets_the_same_parameters(checkpoints, mesh, weights):
    directory, tensors = checkpoints("bf16")
    whole = from_hf_tensors(CONFIG, tensors, weights=weights)
    placed = place(directory, mesh, weights=weights)
    assert placed.keys() == whole.keys()
    for path, expected in whole.items():
        for shard in placed[path].addressable_shards:
            assert shard.data.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=path)


def test_devices_share_one_host_buffer_of_what_they_hold_alike(checkpoints):
    params = place(checkpoints("f32")[0], "dp=32,ep=8")
    for path, array in params.items():
        buffers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        assert len(array.addressable_shards) == 32
        assert len(buffers) == (8 if ".experts." in path else 1), path


def test_auto_keeps_float32_checkpoints_in_float32_and_others_in_bf16(checkpoints):
    for stored, kept in (("f32", "float32"), ("bf16", "uint16"), ("fp8", "uint16")):
        assert place(checkpoints(stored)[0], "dp=1")["embed.weight"].dtype == kept


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=4"])
def test_fp8_is_dequantised_exactly_and_rounded_once(checkpoints, mesh):
    directory, tensors = checkpoints("fp8")
    plain = dequantised(tensors)
    as_f32, as_bf16 = (place(directory, mesh, weights=weights) for weights in ("f32", "bf16"))
    cases = [
        (("moe_layers.attn.q_b.weight", 0), "model.layers.1.self_attn.q_b_proj.weight"),
        (("dense_layers.mlp.gate_up.weight", 0, slice(None), 1), "model.layers.0.mlp.up_proj.weight"),
        (("dense_layers.mlp.down.weight", 0), "model.layers.0.mlp.down_proj.weight"),
        (("moe_layers.moe.experts.down.weight", 1, 5), "model.layers.2.mlp.experts.5.down_proj.weight"),
    ]
    for (path, *index), name in cases:
        expected = np.ascontiguousarray(plain[name].T)
        np.testing.assert_array_equal(np.asarray(as_f32[path])[tuple(index)], expected)
        np.testing.assert_array_equal(np.asarray(as_bf16[path]).view(BF16)[tuple(index)], expected.astype(BF16))


@pytest.mark.parametrize("mesh", ["dp=1", "dp=8"])
def test_a_bf16_checkpoint_is_quantised_by_whole_blocks_when_fp8_is_asked(checkpoints, mesh):
    directory, tensors = checkpoints("bf16")
    params = place(directory, mesh, weights="fp8")
    weight, scale = quantise(tensors["model.layers.0.mlp.down_proj.weight"])
    assert scale.shape == (2, 3)
    np.testing.assert_array_equal(np.asarray(params["dense_layers.mlp.down.weight"])[0], weight.view(np.uint8).T)
    np.testing.assert_array_equal(np.asarray(params["dense_layers.mlp.down.scale"])[0], scale.T)


def test_a_shard_that_cuts_blocks_is_quantised_like_the_whole(checkpoints):
    """A shard's own maximum must not make its scale: rows and columns are widened to whole blocks first."""
    from dsjax.checkpoint.assemble import Assembler
    from dsjax.checkpoint.names import TensorNames
    from dsjax.model.parameter_table import abstract_parameters

    tensors = checkpoints("bf16")[1]
    whole = from_hf_tensors(CONFIG, tensors, weights="fp8")
    names = TensorNames(CONFIG, abstract_parameters(CONFIG, weights="fp8"))
    path, region = "dense_layers.mlp.down.weight", (slice(0, 1), slice(70, 201), slice(5, 150))
    out = np.empty((1, 131, 145), np.uint8)
    Assembler(names, tensors).fill(out, path, region)
    np.testing.assert_array_equal(out, whole[path][region])


def test_quantised_weights_are_within_half_a_step_of_e4m3_and_never_nan():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((200, 300)).astype(np.float32) * np.logspace(-6, 6, 300, dtype=np.float32)
    matrix[:128, :128] = 0
    weight, scale = quantise(matrix)
    assert scale.shape == (2, 3)
    assert scale[0, 0] == 1
    assert np.isfinite(weight.astype(np.float32)).all()
    rows, columns = np.arange(200) // 128, np.arange(300) // 128
    back = weight.astype(np.float32) * scale[rows[:, None], columns]
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of a normal value; below 2^-6 steps are 2^-9, half is 2^-10.
    bound = np.maximum(np.abs(matrix) / 16, scale[rows[:, None], columns] * 2.0**-10)
    assert (np.abs(back - matrix) <= bound * 1.0001).all()
    np.testing.assert_array_equal(block_scales(matrix), scale)


def test_each_layer_is_read_as_it_is_placed_the_mtp_module_last(checkpoints):
    rng = np.random.default_rng(5)
    layers = CONFIG.num_moe_layers + 1
    rows = np.stack([rng.permutation(np.concatenate([np.arange(8), rng.integers(0, 8, 4)])) for _ in range(layers)])
    directory, tensors = checkpoints("f32")
    params = place(directory, "dp=4", placement=LayerPlacements(rows, 8))
    for stack, first in (("moe_layers", 0), ("mtp.layers", layers - 1)):
        down = np.asarray(params[f"{stack}.moe.experts.down.weight"])
        for row, layer in zip(rows[first:], down, strict=False):
            number = CONFIG.num_dense_layers + first
            first += 1
            for slot, expert in enumerate(row):
                name = f"model.layers.{number}.mlp.experts.{expert}.down_proj.weight"
                np.testing.assert_array_equal(layer[slot], tensors[name].T)


def test_a_window_of_layers_and_experts_is_read_as_its_part_of_the_whole(checkpoints):
    directory, _ = checkpoints("f32")
    whole = place(directory, "dp=1")
    window = ParameterWindow({"moe_layers": range(1, 2)}, experts=range(2, 6))
    part = place(directory, "dp=2", window=window)
    assert part.keys() == whole.keys()
    for path, array in part.items():
        layers = slice(1, 2) if path.startswith("moe_layers.") else slice(None)
        experts = (slice(2, 6),) if ".experts." in path else ()
        np.testing.assert_array_equal(array, np.asarray(whole[path])[(layers, *experts)], err_msg=path)


def test_a_checkpoint_whose_config_promises_an_mtp_module_it_lacks(tmp_path):
    without = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    make_checkpoint(tmp_path, CONFIG, make_tensors(without))
    with pytest.warns(CheckpointWarning, match="no tensor of layer 3; going on without"):
        checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == without
    assert "head.weight" in place(checkpoint, "dp=1")


def test_an_mtp_copy_that_differs_from_the_main_models_is_reported(checkpoints):
    tensors = dict(checkpoints("f32")[1])
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.layers.3.embed_tokens.weight"] + 1
    with pytest.warns(CheckpointWarning, match="embed_tokens.weight differs from model.embed_tokens.weight"):
        from_hf_tensors(CONFIG, tensors)


def test_a_tied_head_that_differs_from_the_embedding_is_used_as_transformers_uses_it(tmp_path):
    tied, tensors = dataclasses.replace(CONFIG, tie_word_embeddings=True), make_tensors(CONFIG)
    make_checkpoint(tmp_path / "differs", tied, tensors)
    with pytest.warns(CheckpointWarning, match="ties lm_head.weight to model.embed_tokens.weight, but they differ"):
        checkpoint = open_checkpoint(tmp_path / "differs")
    assert checkpoint.config == CONFIG
    head = place(checkpoint, "dp=1")["head.weight"]
    np.testing.assert_array_equal(np.asarray(head).view(np.uint16), tensors["lm_head.weight"].T.view(np.uint16))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        from_hf_tensors(tied, tensors)
    make_checkpoint(tmp_path / "equal", tied, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert open_checkpoint(tmp_path / "equal").config == tied


def test_block_scales_may_be_powers_of_two_in_one_byte(checkpoints):
    tensors = dict(checkpoints("fp8")[1])
    scales = {name: np.exp2(np.ceil(np.log2(value))) for name, value in tensors.items() if name.endswith(SCALE_SUFFIX)}
    bytes_of = {name: scale.astype(ml_dtypes.float8_e8m0fnu) for name, scale in scales.items()}
    for weights in ("fp8", "f32"):
        assert_same(*(from_hf_tensors(CONFIG, tensors | kept, weights=weights) for kept in (scales, bytes_of)))


def test_extras_are_named_in_one_warning_and_left_out(checkpoints):
    tensors = dict(checkpoints("f32")[1])
    tensors["model.layers.².weight"] = tensors["model.vision.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    with pytest.warns(CheckpointWarning, match="2 tensors are not part of the model .* model.vision.weight"):
        from_hf_tensors(CONFIG, tensors)


def test_non_finite_values_are_listed_together(checkpoints):
    tensors = dict(checkpoints("fp8")[1])
    broken = {
        "model.norm.weight": np.full_like(tensors["model.norm.weight"], np.inf),
        "model.layers.1.self_attn.o_proj.weight": tensors["model.layers.1.self_attn.o_proj.weight"].copy(),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv": np.full((1, 2), -1, np.float32),
    }
    for weights, either_nan in (("bf16", 0xFF), ("fp8", 0x7F)):
        broken["model.layers.1.self_attn.o_proj.weight"].view(np.uint8)[-1, -1] = either_nan
        with pytest.raises(CheckpointError) as caught:
            from_hf_tensors(CONFIG, {**tensors, **broken}, weights=weights)
        assert [problem.split(":")[0] for problem in caught.value.problems] == sorted(broken)
        assert "negative" in str(caught.value)
