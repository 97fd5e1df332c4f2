"""DeepSeek-V3's neighbours: of a checkpoint that transformers saved an engine makes what transformers' class of the family makes of it."""

import functools
import importlib
import importlib.util
import json
from importlib.metadata import version

import numpy as np
import pytest

# Not imported here: every process that shares the suite collects this file, and one of them runs it.
if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("compares with torch and transformers, which dsjax itself never needs", allow_module_level=True)
if int(version("transformers").split(".")[0]) < 5:
    pytest.skip("compares with transformers 5's classes", allow_module_level=True)

from layouts import MODELS, TINY
from quick_compilation import FEW_SHAPES
from safetensors import safe_open
from safetensors.numpy import save_file

from dsjax import LLM
from dsjax.checkpoint.errors import CheckpointWarning
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import ModelConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    # transformers announces an MTP module and saves none.
    pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers:dsjax.checkpoint.errors.CheckpointWarning"),
]

SMALL = TINY | {"num_key_value_heads": TINY["num_attention_heads"], "n_group": 1, "topk_group": 1}
GLM = SMALL | {"rope_scaling": None, "rms_norm_eps": 1e-5}
KIMI = SMALL | {"model_type": "kimi_k2"}
VISION = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
VISION |= {"pos_emb_height": 4, "pos_emb_width": 4}
FAMILIES = {
    "GLM-4.7-Flash": GLM | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "GLM-5": GLM | MODELS["v3.2"] | {"model_type": "glm_moe_dsa"},
    "Kimi-K2.5": {"model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": KIMI, "vision_config": VISION},
    "sarvam": SMALL | {"model_type": "sarvam_mla", "q_lora_rank": None},
}
MESHES = {"GLM-4.7-Flash": ("dp=1", "dp=2,tp=2"), "GLM-5": ("dp=1", "dp=8"), "Kimi-K2.5": ("dp=8", "dp=2,tp=2")}
MESHES |= {"sarvam": ("dp=1", "dp=2,tp=2")}
RUNS = [(family, mesh) for family, meshes in MESHES.items() for mesh in meshes]


def with_published_names(path):
    """Give a saved Kimi-K2.5's tensors the names of the published files, which transformers 5.24 reads and does not write."""
    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    named = {
        name.removeprefix("model.").replace("language_model.model.blocks.", "language_model.model.layers."): value
        for name, value in tensors.items()
    }
    save_file(named, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A family's checkpoint as transformers saves it, token ids, and transformers' logits."""

    @functools.cache
    def of(family):
        theirs = importlib.import_module("goldens.reference_model")
        tokens = np.random.default_rng(3).integers(2, TINY["vocab_size"], (1, 30))
        _, model = theirs.settled_weights(FAMILIES[family], -0.2, tokens, first_seed=5)
        folder = tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        if family == "Kimi-K2.5":
            with_published_names(folder / "model.safetensors")
            model = type(model).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
        return folder, tokens[0].tolist(), theirs.reference_logits(model, tokens)[0]

    return of


@pytest.mark.parametrize(("family", "mesh"), RUNS)
@pytest.mark.filterwarnings("ignore:.*vision part:dsjax.checkpoint.errors.CheckpointWarning")
def test_logits_are_those_of_transformers_on_each_mesh(family, mesh, saved):
    folder, tokens, expected = saved(family)
    found = LLM(str(folder), mesh=mesh, dtype="float32", **FEW_SHAPES).logits([tokens])[0]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Kimi-K2.5"])
def test_a_configuration_written_by_us_is_the_same_model_to_transformers(family, saved):
    _, tokens, expected = saved(family)
    theirs = importlib.import_module("goldens.reference_model")
    written = ModelConfig.from_dict(FAMILIES[family]).to_dict()
    _, model = theirs.settled_weights(written, -0.2, np.array([tokens]), first_seed=5)
    np.testing.assert_array_equal(theirs.reference_logits(model, np.array([tokens]))[0], expected)


def test_the_tensors_of_a_vision_part_are_named_and_left_out(saved):
    folder, *_ = saved("Kimi-K2.5")
    ignored = r"tensors of the vision part \(mm_projector, vision_tower\) are ignored.*rejects images"
    with pytest.warns(CheckpointWarning, match=ignored):
        checkpoint = open_checkpoint(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k25"
    assert {name.split(".")[0] for name in checkpoint.tensors} == {"model", "lm_head"}
