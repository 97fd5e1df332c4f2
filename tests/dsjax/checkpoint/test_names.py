"""Hugging Face's names and our paths, in both directions."""

import dataclasses
import gzip
import json
import math
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from odd_checkpoints import CONFIG

from dsjax.checkpoint.check import check_structure
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.source import tensors_to_write
from dsjax.config import load_config
from dsjax.model.parameter_table import abstract_parameters

REFERENCE = Path(__file__).parents[3] / ".." / "shared" / "reference"
DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the real tensor list is not here")
def test_every_tensor_of_the_real_checkpoint_is_placed_with_its_shape_and_dtype():
    real = json.loads(gzip.decompress((REFERENCE / "deepseek-r1.tensors.json.gz").read_bytes()))
    assert len(real) == 91_991
    config = load_config(REFERENCE / "deepseek-r1.config.json")
    names = TensorNames(config, abstract_parameters(config, weights="fp8"))
    places = names.places()
    infos = {name: (names.parameters[path], piece) for name, (path, piece) in places.items()}
    ours = {name: (info.dtype.name, list(piece.shape(info.shape))) for name, (info, piece) in infos.items()}
    ours |= {copy: ours[original] for copy, original in names.copies().items()}
    assert ours == {name: (DTYPE_NAMES[spec["dtype"]], spec["shape"]) for name, spec in real.items()}
    # And the loader has nothing to say of it, in any weights: no problem, no extra.
    specs = {
        name: TensorSpec(np.dtype(getattr(ml_dtypes, dtype, dtype)), tuple(shape))
        for name, (dtype, shape) in ours.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_structure("R1", TensorNames(config, abstract_parameters(config, weights="bf16")), specs)


@pytest.mark.parametrize(
    ("model", "tensors", "numbers"), [("glm-4.7-flash", 9_703, 31_221_488_576), ("glm-5.1", 59_870, 753_864_139_008)]
)
def test_a_neighbour_has_as_many_tensors_and_numbers_as_its_published_files(model, tensors, numbers):
    """Of zai-org/GLM-4.7-Flash, whose MTP module has copies of embedding and head, and of zai-org/GLM-5.1, whose has none."""
    config = load_config(model)
    names = TensorNames(config, abstract_parameters(config, weights="bf16"))
    shapes = names.expected()
    if model == "glm-4.7-flash":
        shapes |= {copy: shapes[original] for copy, original in names.copies().items()}
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == numbers


def test_kimi_k2_5_s_text_part_has_the_tensors_of_its_published_files():
    """Of moonshotai/Kimi-K2.5: 208,550 tensors, of which 335 are its vision part's; an expert's matrices are three tensors each."""
    config = load_config("kimi-k2.5")
    names = TensorNames(config, abstract_parameters(config, weights="int4-bf16", platform="any"))
    found = {}
    for name, (path, piece) in names.places().items():
        info = names.parameters[path]
        found |= tensors_to_write(names, path, name, TensorSpec(info.dtype, piece.shape(info.shape)))
    assert len(found) == 208_550 - 335
    expert = "model.layers.60.mlp.experts.383.gate_proj.weight"
    assert found[f"{expert}_packed"][0] == TensorSpec(np.dtype(np.int32), (2048, 896))
    assert found[f"{expert}_shape"][0] == TensorSpec(np.dtype(np.int32), (2,))
    assert found.keys() >= {f"{expert}_scale", "lm_head.weight"}
    assert expert not in found


def test_a_region_names_only_the_pieces_that_touch_it():
    names = TensorNames(CONFIG, abstract_parameters(CONFIG))
    region = (slice(1, 2), slice(3, 5), slice(None), slice(None), slice(0, 8))
    pieces = list(names.pieces("moe_layers.moe.experts.gate_up.weight", region))
    assert [piece.name.removeprefix("model.layers.2.mlp.experts.") for piece in pieces] == [
        f"{expert}.{part}_proj.weight" for expert in (3, 4) for part in ("gate", "up")
    ]


def slot_names(names):
    """What lies in the slots of the first MoE layer, below its MLP's name."""
    pieces = [piece for piece in names.pieces("moe_layers.moe.experts.down.weight") if piece.index[0] == 0]
    return [piece.name.removeprefix("model.layers.1.mlp.") for piece in pieces]


def test_slots_hold_copies_of_their_logical_expert_and_the_number_behind_the_last_is_the_shared_one():
    slots = (0, 1, 2, 3, 4, 5, 6, 7, 5, 0)
    names = TensorNames(CONFIG, abstract_parameters(CONFIG, num_physical=10), slots)
    assert slot_names(names) == [f"experts.{e}.down_proj.weight" for e in slots]
    assert names.places()["model.layers.1.mlp.experts.5.down_proj.weight"][1].index[:2] == (0, 5)
    slots = (0, 1, 2, 3, 8, 4, 5, 6, 7, 8)
    declared = abstract_parameters(CONFIG, num_physical=10, shared_apart=False)
    assert not any(".shared." in path for path in declared)
    names = TensorNames(CONFIG, declared, slots)
    assert slot_names(names) == [
        "shared_experts.down_proj.weight" if e == 8 else f"experts.{e}.down_proj.weight" for e in slots
    ]
    assert names.expected() == TensorNames(CONFIG, abstract_parameters(CONFIG)).expected()


def test_a_tied_head_is_a_copy_and_products_derived_from_other_weights_are_not_expected():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    copies = TensorNames(config, abstract_parameters(config)).copies()
    assert copies["lm_head.weight"] == "model.embed_tokens.weight"
    assert copies["model.layers.3.shared_head.head.weight"] == "model.embed_tokens.weight"
    declared = abstract_parameters(CONFIG, materialise=True)
    derived = {path for path, info in declared.items() if info.init == "derived"}
    assert derived
    assert set(TensorNames(CONFIG, declared).parameters) == set(declared) - derived
