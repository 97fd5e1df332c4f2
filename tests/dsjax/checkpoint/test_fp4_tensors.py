"""Checkpoints with packed matrices, of every convention, load as the same numbers; and any weights are packed and come back from it."""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
from fp4_weights import encoded
from held_engines import Engine
from odd_checkpoints import CONFIG, assert_same, make_checkpoint, make_tensors, place

from dsjax.checkpoint.convert import convert_checkpoint
from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.checkpoint.load import from_hf_tensors, to_hf_tensors
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import QuantizationConfig, load_config
from dsjax.config.weights import PACKED
from dsjax.fp4 import host
from dsjax.fp4.formats import FORMATS, INT4, MXFP4, NVFP4

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


# Widths that blocks of 16 and of 32 divide, and 128 does not.
SMALL = dataclasses.replace(CONFIG, hidden_size=96, intermediate_size=160, moe_intermediate_size=64)
TENSORS = make_tensors(SMALL)


CONVENTIONS = {
    "modelopt": lambda name, values, scales, whole: {
        name: values,
        f"{name}_scale": scales,
        f"{name}_scale_2": np.float32(whole).reshape(()),
        name.replace(".weight", ".input_scale"): np.float32(1).reshape(()),
    },
    "ct_nvfp4": lambda name, values, scales, whole: {
        f"{name}_packed": values,
        f"{name}_scale": scales,
        f"{name}_global_scale": np.array([1 / whole], np.float32),
    },
    "quark": lambda name, values, scales, _: {name: values, f"{name}_scale": scales},
    "ct_mxfp4": lambda name, values, scales, _: {f"{name}_packed": values, f"{name}_scale": scales},
    "ct_int4": lambda name, values, scales, _: {
        f"{name}_packed": values.view(np.int32),
        f"{name}_scale": scales,
        f"{name}_shape": np.array([len(values), 2 * values.shape[1]], np.int64),
    },
    "deepseek": lambda name, values, scales, _: {
        name: values.view(np.int8),
        f"{name}_scale_inv": scales.view(ml_dtypes.float8_e8m0fnu),
    },
}
"""Tensors of a matrix from its values, the scales of its blocks, and that of the whole."""


def form_of(convention):
    return {"modelopt": NVFP4, "ct_nvfp4": NVFP4, "ct_int4": INT4}.get(convention, MXFP4)


def stored(convention, where=r"\.mlp\.experts\."):
    """The tensors with the matrices of some modules by a convention."""
    made = {}
    for name, value in TENSORS.items():
        if re.search(where, name) and value.ndim == 2:
            made |= CONVENTIONS[convention](name, *encoded(value, form_of(convention)))
        else:
            made[name] = value
    return made


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_convention_loads_as_the_same_parameters(convention, tmp_path, recwarn):
    weights = f"{form_of(convention).name}-bf16"
    expected = from_hf_tensors(SMALL, TENSORS, weights=weights)
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", SMALL, stored(convention)))
    assert checkpoint.stored_weights == weights
    found = place(checkpoint, "dp=2", weights=weights)
    assert not [one for one in recwarn if "not part of the model" in str(one.message)], "scales of activations"
    assert found.keys() == expected.keys()
    for path, array in found.items():
        if path.endswith("global_scale") and convention == "ct_nvfp4":
            np.testing.assert_allclose(array, expected[path], rtol=2e-7, err_msg="a reciprocal of a reciprocal")
        else:
            np.testing.assert_array_equal(array, expected[path], err_msg=path)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "bf16"])
def test_a_scale_of_zero_on_a_tensor_that_is_not_is_an_error_however_the_tensor_is_wanted(weights):
    zero = stored("modelopt") | {f"{EXPERT}_scale_2": np.zeros((), np.float32)}
    with pytest.raises(CheckpointError, match="a scale of zero, and the weights of the tensor are not zero") as caught:
        from_hf_tensors(SMALL, zero, weights=weights)
    assert caught.value.source == f"{EXPERT}_scale_2"
    zero[EXPERT] = np.zeros_like(zero[EXPERT])
    from_hf_tensors(SMALL, zero, weights=weights)


def test_bad_fp8_scales_are_an_error_where_fp8_becomes_fp4_too():
    tensors = make_tensors(SMALL, "fp8")
    tensors[f"{EXPERT}_scale_inv"] = np.zeros_like(tensors[f"{EXPERT}_scale_inv"])
    with pytest.raises(CheckpointError, match="a block scale of zero, and the weights of the block are not zero"):
        from_hf_tensors(SMALL, tensors, weights="nvfp4")


def decoded(form):
    made = dict(TENSORS)
    for name in filter(re.compile(r"\.mlp\.experts\.").search, TENSORS):
        values, *scales = encoded(TENSORS[name], form)
        made[name] = host.decode(values, form, *scales)
    return made


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_fp4_loads_as_other_weights_as_its_decoded_numbers_do(form):
    packed = stored({NVFP4: "modelopt", MXFP4: "quark", INT4: "ct_int4"}[form])
    other = {NVFP4: "mxfp4", MXFP4: "int4", INT4: "nvfp4"}[form]
    for weights in ("f32", "bf16", "fp8", other):
        expected = from_hf_tensors(SMALL, decoded(form), weights=weights)
        assert_same(from_hf_tensors(SMALL, packed, weights=weights), expected)


@pytest.mark.parametrize(
    ("mesh", "weights"),
    [("dp=4", "mxfp4-bf16"), ("tp=2,ep=1", "nvfp4-bf16"), ("dp=2,tp=2", "mxfp4-bf16"), ("tp=2,ep=1", "int4-bf16")],
)
def test_a_mesh_gets_its_parts_of_what_is_encoded_while_loading(tmp_path, mesh, weights):
    directory = make_checkpoint(tmp_path / "model", SMALL, TENSORS)
    assert_same(place(directory, mesh, weights=weights), from_hf_tensors(SMALL, TENSORS, weights=weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "source"), [(name, ("bf16", "fp8")[place % 2]) for place, name in enumerate(PACKED)]
)
def test_conversion_gives_what_loading_gives_and_comes_back_to_the_byte(tmp_path, weights, source):
    config = dataclasses.replace(SMALL, quantization=QuantizationConfig() if source == "fp8" else None)
    tensors = make_tensors(config, source)
    directory = make_checkpoint(tmp_path / "source", config, tensors)
    made = convert_checkpoint(directory, tmp_path / "hf", to="hf", weights=weights)
    opened = open_checkpoint(made)
    assert opened.stored_weights == weights
    expected = from_hf_tensors(config, tensors, weights=weights)
    assert_same(from_hf_tensors(config, dict(opened.tensors), weights=weights), expected)
    through = convert_checkpoint(made, tmp_path / "orbax", to="orbax")
    back = convert_checkpoint(through, tmp_path / "back", to="hf")
    assert (back / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((made / "config.json").read_text())
    assert (made / "hf_quant_config.json").exists() == (weights == "nvfp4-bf16")
    assert load_config(made).quantization is not None
    plain = convert_checkpoint(made, tmp_path / "plain", to="hf", weights="bf16")
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert not (plain / "hf_quant_config.json").exists()
    written = to_hf_tensors(config, expected)
    assert {f"{EXPERT}_scale", EXPERT} <= written.keys()
    if weights.startswith("int4"):  # written in words, with the shape beside them
        words, shape = opened.tensors[f"{EXPERT}_packed"], opened.tensors[f"{EXPERT}_shape"]
        np.testing.assert_array_equal(words.view(np.uint8), written[EXPERT])
        assert (words.dtype, shape.dtype, list(shape)) == (np.int32, np.int32, [96, 64])
    else:
        assert written.keys() <= opened.tensors.keys()


def test_shared_experts_and_dense_layers_that_are_fp4_are_decoded():
    packed = stored("modelopt", where=r"\.mlp\.(?!gate\.)")
    name = "model.layers.0.mlp.up_proj.weight"
    values, scales, whole = encoded(TENSORS[name], NVFP4)
    expected = host.decode(values, NVFP4, scales, whole).T.astype(ml_dtypes.bfloat16)
    found = from_hf_tensors(SMALL, packed, weights="nvfp4-bf16")["dense_layers.mlp.gate_up.weight"][0, :, 1]
    np.testing.assert_array_equal(found.view(ml_dtypes.bfloat16), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}_scale"), "four bits without scales"),
        (lambda t: t.pop(f"{EXPERT}_scale_2"), "without the scale of the tensor"),
        (lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"][:, :-1]}), "one scale per 16 values"),
        (lambda t: t.update({EXPERT: t[EXPERT][:-1]}), "shape"),
        (lambda t: t.update({f"{EXPERT}_scale_2": np.ones(3, np.float32)}), "expected one float32"),
        (lambda t: t.pop(EXPERT), "missing"),
    ],
)
def test_what_is_wrong_with_an_fp4_matrix_is_said_before_anything_is_read(change, message):
    packed = stored("modelopt")
    change(packed)
    with pytest.raises(CheckpointError, match=message) as error:
        from_hf_tensors(SMALL, packed, weights="nvfp4-bf16")
    assert EXPERT in str(error.value)


def test_scales_that_are_no_numbers_are_found():
    for convention, bad in (("modelopt", 0x7F), ("quark", 0xFF), ("ct_int4", 0x7FC0)):
        packed = stored(convention)
        scale = packed[f"{EXPERT}_scale"]
        scale.view(f"u{scale.dtype.itemsize}")[2, 1] = bad
        with pytest.raises(CheckpointError, match=rf"{EXPERT}_scale: has values that are not finite"):
            from_hf_tensors(SMALL, packed, weights=f"{form_of(convention).name}-bf16")


def test_scales_and_widths_that_cannot_be_are_refused():
    packed = stored("ct_int4")
    packed[f"{EXPERT}_scale"] = packed[f"{EXPERT}_scale"].astype(np.float16)
    with pytest.raises(CheckpointError, match=f"{EXPERT}_scale: dtype float16, expected bfloat16"):
        from_hf_tensors(SMALL, packed, weights="int4-bf16")
    with pytest.raises(CheckpointError, match="blocks of 16 along the last dimension"):
        from_hf_tensors(CONFIG, make_tensors(CONFIG), weights="nvfp4-bf16")


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4-bf16", "int4-bf16"])
def test_weights_that_are_no_numbers_are_not_encoded(weights):
    broken = dict(TENSORS) | {EXPERT: TENSORS[EXPERT].copy()}
    broken[EXPERT][3, 3] = np.nan
    with pytest.raises(CheckpointError, match=EXPERT):
        from_hf_tensors(SMALL, broken, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "old", "new"), [("mxfp4-bf16", "dp=2", "tp=2,ep=1"), ("nvfp4", "tp=2,ep=1", "dp=4")]
)
def test_after_a_change_of_the_mesh_parameters_are_those_of_a_fresh_load_and_none_is_read(tmp_path, weights, old, new):
    # On two tp devices each width is whole blocks of FP8, too.
    mla = dataclasses.replace(SMALL.mla, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
    config = dataclasses.replace(SMALL, intermediate_size=256, moe_intermediate_size=256, mla=mla)
    directory = make_checkpoint(tmp_path / "model", config, make_tensors(config))
    held = HeldWeights()
    Engine(directory, config, old, held=held, weights=weights).release(held, ())
    after = Engine(directory, config, new, held=held, weights=weights)
    assert_same(after.params, Engine(directory, config, new, weights=weights).params)
    assert held.counts.read == 0
