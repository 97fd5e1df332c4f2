"""An FP8 checkpoint answers as its dequantised twin does: exactly when dequantised at load, closely when kept FP8.

Every matrix is wider than a 128 × 128 block, most with a ragged last one, and no two blocks of it are of like size, so
that a scale applied to the wrong elements would move the logits by much more than the bounds.
"""

import dataclasses
import json

import numpy as np
import pytest
from goldens.random_weights import RandomWeights

from dsjax import LLM
from dsjax.checkpoint.names import SCALE_SUFFIX, TensorNames
from dsjax.checkpoint.quantise import quantise
from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.config import ModelConfig, QuantizationConfig
from dsjax.model.parameters import BLOCK
from dsjax.model.transformer import abstract_parameters
from sharding import MeshError

RAGGED = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=72,
    hidden_size=160,
    intermediate_size=272,
    num_hidden_layers=2,
    num_attention_heads=8,
    q_lora_rank=136,
    kv_lora_rank=132,
    qk_nope_head_dim=20,
    qk_rope_head_dim=8,
    v_head_dim=18,
    moe_intermediate_size=136,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    max_position_embeddings=64,
    torch_dtype="float32",
    quantization=QuantizationConfig(),
)
# Widths that tp splits are whole blocks on two devices; those that it does not split stay ragged.
WHOLE = dataclasses.replace(
    RAGGED,
    num_attention_heads=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    intermediate_size=256,
    moe_intermediate_size=256,
)
CONFIGS = {"ragged": RAGGED, "whole": WHOLE}
MESHES = [("ragged", "dp=1"), ("ragged", "dp=4"), ("whole", "tp=2"), ("whole", "tp=2,ep=1")]
TOKENS = np.random.default_rng(0).integers(2, 72, size=21).tolist()


def uneven(values: np.ndarray) -> np.ndarray:
    """The blocks of a matrix at different sizes, a power of two apart."""
    rows, columns = (np.arange(size) // BLOCK for size in values.shape)
    return values * np.float32(2.0) ** -(rows[:, None] + 2 * columns[None, :]).astype(np.float32)


def fp8_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    names = TensorNames(config, abstract_parameters(config, weights="fp8"))
    weights, tensors = RandomWeights(1), {}
    for name, (path, piece) in names.places().items():
        if name.endswith(SCALE_SUFFIX):
            continue
        info = names.parameters[path]
        values = weights.tensor(name, piece.shape(info.shape))
        if info.quantised:
            tensors[name], tensors[name + SCALE_SUFFIX] = quantise(uneven(values))
        else:
            tensors[name] = values
    return tensors


def dequantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Float32 tensors without scales, by repeating each scale over its block."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if name + SCALE_SUFFIX in tensors:
            scale = np.kron(tensors[name + SCALE_SUFFIX], np.ones((BLOCK, BLOCK), np.float32))
            value = value.astype(np.float32) * scale[: value.shape[0], : value.shape[1]]
        plain[name] = value
    return plain


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """``(config, form)`` → directory of the checkpoint, ``fp8`` or ``plain``."""
    made = {}
    for name, config in CONFIGS.items():
        tensors = fp8_tensors(config)
        for form, kept in (("fp8", tensors), ("plain", dequantised(tensors))):
            folder = tmp_path_factory.mktemp(f"{name}-{form}")
            specs = {key: TensorSpec(value.dtype, value.shape) for key, value in kept.items()}
            write_file(folder / "model.safetensors", specs, kept.__getitem__)
            quantization = config.quantization if form == "fp8" else None
            (folder / "config.json").write_text(
                json.dumps(dataclasses.replace(config, quantization=quantization).to_dict())
            )
            made[name, form] = folder
    return made


def load(directory, mesh: str, weights: str = "auto") -> LLM:
    return LLM(
        str(directory), mesh=mesh, weights=weights, dtype="float32", max_num_seqs=2, prefill_chunk=16, page_size=4
    )


def logits(directory, mesh: str, weights: str = "auto") -> np.ndarray:
    llm = load(directory, mesh, weights)
    try:
        return llm.logits([TOKENS])[0]
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def plain_logits(directories):
    """Of the dequantised checkpoint, once for each configuration and mesh."""
    return {case: logits(directories[case[0], "plain"], case[1]) for case in MESHES}


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_dequantised_at_load_the_logits_are_exactly_those_of_the_dequantised_checkpoint(
    directories, plain_logits, config, mesh
):
    np.testing.assert_array_equal(logits(directories[config, "fp8"], mesh), plain_logits[config, mesh])


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_kept_fp8_the_logits_are_close_and_the_weights_are_a_quarter_of_the_bytes(
    directories, plain_logits, config, mesh
):
    llm = load(directories[config, "fp8"], mesh, "fp8")
    try:
        found, reference = llm.logits([TOKENS])[0], plain_logits[config, mesh]
        assert np.abs(found - reference).max() <= 1e-2 * np.abs(reference).max()
        quantised = [path for path, info in llm.runner.step.table.infos.items() if info.quantised]
        assert {llm.runner.params[path].dtype for path in quantised} == {np.dtype(np.uint8)}
        assert "moe_layers.moe.experts.down.weight" in quantised
    finally:
        llm.shutdown()


def test_a_scale_on_the_wrong_block_would_be_noticed(directories, plain_logits, tmp_path):
    # The comparison above is worth what this is: one matrix's scales, exchanged.
    tensors = fp8_tensors(RAGGED)
    name = "model.layers.0.mlp.down_proj.weight" + SCALE_SUFFIX
    assert len(np.unique(tensors[name])) == tensors[name].size == 6
    tensors[name] = tensors[name][:, ::-1].copy()
    specs = {key: TensorSpec(value.dtype, value.shape) for key, value in tensors.items()}
    write_file(tmp_path / "model.safetensors", specs, tensors.__getitem__)
    (tmp_path / "config.json").write_text(json.dumps(RAGGED.to_dict()))
    reference = plain_logits["ragged", "dp=1"]
    assert np.abs(logits(tmp_path, "dp=1") - reference).max() > 5e-2 * np.abs(reference).max()


def test_a_tp_that_would_cut_blocks_is_refused_with_the_widths_it_cuts(directories):
    with pytest.raises(MeshError) as error:
        load(directories["ragged", "fp8"], "tp=2", "fp8")
    for part in (
        "dense MLP width 272 over tp=2 is 136",
        "shared expert width 136 over tp=2 is 68",
        "query heads' width 224 over tp=2 is 112",
        "key and value heads' width 304 over tp=2 is 152",
        "value heads' width 144 over tp=2 is 72",
        "cuts a quantisation block of 128",
    ):
        assert part in str(error.value)
    load(directories["ragged", "fp8"], "tp=2").shutdown()  # not FP8 in memory: nothing is cut
