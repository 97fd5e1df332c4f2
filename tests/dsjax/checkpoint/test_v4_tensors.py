"""DeepSeek-V4's tensors under DeepSeek's names, as transformers saves them and as its class has them; scales in F8_E8M0, experts in FP4."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from fp4_weights import encoded
from odd_checkpoints import assert_same, place
from v4_models import v4_config, v4_tensors

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.checkpoint.source import open_checkpoint
from dsjax.checkpoint.v4_tensors import V4Tensors, dsjax_name
from dsjax.config import ModelConfig
from dsjax.fp4 import host
from dsjax.fp4.formats import MXFP4

LAYERS = 3
HEAD = {f"hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
# Ours, and DeepSeek's: ``inference/model.py`` and the released index of Flash.
NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    **{f"model.{ours}": theirs for ours, theirs in HEAD.items()},
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    **{f"{hc}_hc.{part}": f"hc_{hc}_{part}" for hc in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{
        f"mlp.{owner}.{name}.weight": f"ffn.{owner}.{name}.weight"
        for owner in ("experts.7", "shared_experts")
        for name in ("w1", "w2", "w3")
    },
}
IN_MODULE = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "shared_head.norm.weight": "norm.weight",
    **HEAD,
}


def theirs(name: str) -> str:
    """DeepSeek's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name).groups()
    expert = re.search(r"experts\.(\d+)\.", rest)
    found = (IN_LAYER | IN_MODULE)[re.sub(r"experts\.\d+\.", "experts.7.", rest)]
    found = found.replace("experts.7.", f"experts.{expert[1]}.") if expert else found
    return f"layers.{layer}.{found}" if int(layer) < LAYERS else f"mtp.{int(layer) - LAYERS}.{found}"


@pytest.mark.parametrize(
    "ours",
    [*NAMES, *(f"model.layers.1.{name}" for name in IN_LAYER), *(f"model.layers.3.{name}" for name in IN_MODULE)],
)
def test_a_released_tensor_has_one_name_here_which_stays(ours):
    assert dsjax_name(theirs(ours), LAYERS) == ours
    assert dsjax_name(ours, LAYERS) == ours


WIDTHS = {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128, "head_dim": 64}
CONFIG = ModelConfig.from_dict(v4_config("wch", hashed=1, num_nextn_predict_layers=1, **WIDTHS))
TENSORS = v4_tensors(CONFIG)


def by_powers(matrix):
    """A matrix in e4m3 with block scales in E8M0: powers of two."""
    rows, columns = (-(-size // 128) for size in matrix.shape)
    padded = np.zeros((rows * 128, columns * 128), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    largest = np.abs(padded).reshape(rows, 128, columns, 128).max((1, 3))
    scale = np.exp2(np.ceil(np.log2(largest / 448))).astype(np.float32)
    spread = np.kron(scale, np.ones((128, 128), np.float32))[: matrix.shape[0], : matrix.shape[1]]
    values = (matrix / spread).astype(ml_dtypes.float8_e4m3fn)
    return values, scale.astype(ml_dtypes.float8_e8m0fnu), values.astype(np.float32) * spread


def released():
    """The tensors as DeepSeek releases them, and the numbers that they stand for under our names."""
    stored, numbers = {}, {}
    for name, values in TENSORS.items():
        original, numbers[name] = theirs(name), values
        if ".mlp.experts." in name:
            packed, scales, _ = encoded(values, MXFP4)
            stored[original] = packed.view(np.int8)
            stored[original.removesuffix("weight") + "scale"] = scales.view(ml_dtypes.float8_e8m0fnu)
            numbers[name] = host.decode(packed, MXFP4, scales, np.float32(1))
        elif re.search(r"(q_a|q_b|\.self_attn\.kv|o_a|o_b|e|h)_proj|shared_experts", name) and "norm" not in name:
            stored[original], scale, numbers[name] = by_powers(values)
            stored[original.removesuffix("weight") + "scale"] = scale
        else:
            stored[original] = values
    return stored, numbers


def write(folder, names, stored):
    """Write the named tensors to a file, and the configuration beside it. Return the folder."""
    specs = {name: TensorSpec(stored[name].dtype, stored[name].shape) for name in names}
    write_file(folder / "model.safetensors", specs, stored.__getitem__)
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    stored, _ = released()
    return write(tmp_path_factory.mktemp("v4"), stored, stored)


def test_a_released_checkpoint_gives_the_numbers_of_its_fp8_and_fp4(folder):
    _, numbers = released()
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.stored_weights, checkpoint.config.num_nextn_predict_layers) == ("mxfp4", 1)
    assert_same(place(checkpoint, "dp=1", weights="f32"), from_hf_tensors(CONFIG, numbers))


def test_it_is_kept_as_it_is_stored(folder):
    stored, _ = released()
    params = place(folder, "dp=1", weights="mxfp4")
    gate, scale = (params[f"csa_moe_1.moe.experts.gate_up.{part}"] for part in ("weight", "scale"))
    np.testing.assert_array_equal(gate[0, 2, :, 1], stored["layers.1.ffn.experts.2.w3.weight"].view(np.uint8).T)
    np.testing.assert_array_equal(scale[0, 2, :, 1], stored["layers.1.ffn.experts.2.w3.scale"].view(np.uint8).T)
    query = params["csa_moe_1.attn.q_b.scale"]
    np.testing.assert_array_equal(query[0], stored["layers.1.attn.wq_b.scale"].astype(np.float32).T)
    assert np.all(np.exp2(np.round(np.log2(query))) == query)
    assert params["csa_moe_1.attn.compressor.kv.weight"].dtype == np.uint16, "what compresses stays in bfloat16"


def test_tensors_of_a_lost_file_are_not_called_missing_on_top(tmp_path):
    stored, _ = released()
    files = {name: "lost" if name.startswith(("mtp.", "layers.1.")) else "model" for name in stored}
    write(tmp_path, [name for name, file in files.items() if file == "model"], stored)
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in files.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).config.num_nextn_predict_layers == 1
    with pytest.raises(CheckpointError, match=r"lost\.safetensors") as error:
        place(tmp_path, "dp=1", weights="f32")
    assert "1 problem" in str(error.value)


def test_transformers_own_names_with_experts_in_one_tensor_are_read():
    fused = {}
    for name, values in TENSORS.items():
        if "shared_experts" in name:
            fused[name.replace("w1", "gate_proj").replace("w2", "down_proj").replace("w3", "up_proj")] = values
        elif ".mlp.experts." not in name:
            fused[name] = values
    for layer in range(LAYERS + 1):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, down, up = (
            np.stack([TENSORS[f"{stem}.{expert}.{part}.weight"] for expert in range(CONFIG.n_routed_experts)])
            for part in ("w1", "w2", "w3")
        )
        fused[f"{stem}.gate_up_proj"], fused[f"{stem}.down_proj"] = np.concatenate([gate, up], axis=1), down
    specs = {name: TensorSpec(values.dtype, values.shape) for name, values in fused.items()}
    tensors = V4Tensors.of(fused, specs, LAYERS)
    whole = {name: tensors[name][(slice(None),) * values.ndim] for name, values in TENSORS.items()}
    assert {*tensors} == {*TENSORS}
    assert_same(whole, TENSORS)
