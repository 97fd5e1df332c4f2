"""Ten kinds of corrupted checkpoint, and more: each one clear error, raised by `load` before a device holds anything."""

import dataclasses
import json

import numpy as np
import pytest
from odd_checkpoints import CONFIG, make_checkpoint, place

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.shards import INDEX_NAME
from dsjax.checkpoint.source import open_checkpoint

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def load_all(directory, **options):
    return place(directory, "dp=2", **options)


@pytest.fixture
def folder(tmp_path, checkpoints):
    """``save(weights, config, changes)``: the tiny checkpoint with tensors replaced (None: left out) as shards; its folder."""

    def save(weights="bf16", config=CONFIG, changes=()):
        tensors = checkpoints(weights)[1] | dict(changes)
        tensors = {name: value for name, value in tensors.items() if value is not None}
        return make_checkpoint(tmp_path, config, tensors, 1 << 20)

    return save


SCALE = f"{EXPERT}_scale_inv"
ZERO_SCALE = "a block scale of zero, and the weights of the block are not zero"
DAMAGES = {
    "missing": ("bf16", EXPERT, None, "missing, expected shape [136, 152]"),
    "misshapen": ("f32", EXPERT, np.zeros((152, 136), np.float32), "[152, 136], expected [136, 152]"),
    "wrong dtype": ("bf16", EXPERT, np.zeros((136, 152), np.int8), "dtype int8, expected one of"),
    "NaN": ("bf16", EXPERT, np.full((136, 152), np.nan, np.float32), "not finite"),
    "scale missing": ("fp8", SCALE, None, "missing, and"),
    "scale misshapen": ("fp8", SCALE, np.ones((2, 3), np.float32), "expected [2, 2]"),
    "scale dtype": ("fp8", SCALE, np.ones((2, 2), np.float16), "expected float32"),
    "scale infinite": ("fp8", SCALE, np.full((2, 2), np.inf, np.float32), "not finite"),
    "scale zero": ("fp8", SCALE, np.float32([[1, 1], [1, 0]]), ZERO_SCALE),
    "copy": ("bf16", "model.layers.3.embed_tokens.weight", np.zeros((9, 9), np.float32), "expected model.embed"),
}


@pytest.mark.parametrize(("weights", "name", "value", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_tensors(folder, weights, name, value, message):
    with pytest.raises(CheckpointError) as caught:
        load_all(folder(weights, changes={name: value}))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(name)
    assert message in caught.value.problems[0]


def test_a_configuration_of_fewer_experts_or_layers_is_told_apart_from_extras(folder):
    fewer = dataclasses.replace(CONFIG, n_routed_experts=4)
    with pytest.raises(CheckpointError, match="n_routed_experts=4, but there are tensors of expert 7"):
        load_all(folder(config=fewer))
    fewer = dataclasses.replace(CONFIG, num_hidden_layers=2, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="num_hidden_layers=2, but there are tensors of layer 2"):
        load_all(folder(config=fewer))


@pytest.mark.parametrize("mtp", [False, True])
def test_with_mtp_announced_a_layer_too_few_is_told_whether_the_module_is_loaded_or_not(folder, mtp):
    with pytest.raises(CheckpointError) as caught:
        load_all(folder(config=dataclasses.replace(CONFIG, num_hidden_layers=2)), mtp=mtp)
    message = "\n".join(caught.value.problems)
    assert "num_hidden_layers=2, but there are tensors of layer 2, which is no multi-token prediction module" in message
    assert "num_nextn_predict_layers=1, but layer 3 is a multi-token prediction module too" in message


@pytest.mark.parametrize("mtp", [False, True])
def test_a_module_beyond_those_announced_is_an_error(folder, checkpoints, mtp):
    module = {name: value for name, value in checkpoints("bf16")[1].items() if name.startswith("model.layers.3.")}
    second = {name.replace("layers.3.", "layers.4."): value for name, value in module.items()}
    with pytest.raises(CheckpointError, match="=1, but layer 4 is a multi-token prediction module too") as caught:
        load_all(folder(changes=second), mtp=mtp)
    assert len(caught.value.problems) == 1


def test_fp8_weights_of_zero_may_have_a_scale_of_zero(folder, checkpoints):
    weight = checkpoints("fp8")[1][EXPERT].copy()
    weight[128:, 128:] = -0.0
    load_all(folder("fp8", changes={EXPERT: weight, SCALE: np.float32([[1, 1], [1, 0]])}))


def test_files_that_git_lfs_has_not_fetched_are_named_together(folder):
    directory = folder()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5234139343\n"
    shard = sorted(directory.glob("*.safetensors"))[0]
    for path in (shard, directory / "tokenizer.json"):
        path.write_text(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull") as caught:
        open_checkpoint(directory)
    assert caught.value.problems == [
        f"{name}: a Git LFS pointer, not the file that it stands for" for name in (shard.name, "tokenizer.json")
    ]


def test_an_mtp_module_is_no_layer_of_a_configuration_of_more_and_no_extra_where_it_is_left_out(folder, recwarn):
    more = dataclasses.replace(CONFIG, num_hidden_layers=4, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"layer 3 is a multi-token prediction module .* has 3"):
        load_all(folder(config=more))
    load_all(folder(config=dataclasses.replace(CONFIG, num_nextn_predict_layers=0)))
    assert [str(warning.message) for warning in recwarn if "checkpoint" in str(warning.message)] == []


def test_everything_that_is_wrong_is_one_error(folder):
    """A lost shard, a missing tensor elsewhere, a misshapen one and a wrong dtype, without the lost shard's own tensors.

    `test_safetensors_file.py` and `test_shards.py` test files, headers, shards and indices alone.
    """
    changes = {
        "model.norm.weight": None,
        "lm_head.weight": np.zeros((1, 1), np.float32),
        "model.layers.3.enorm.weight": np.zeros(152, np.int64),
    }
    directory = folder(changes=changes)
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    lost = next(shard for shard in index.values() if shard not in {index.get(name) for name in changes})
    (directory / lost).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_all(directory)
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == sorted([lost, *changes])


def test_a_long_list_is_cut_short_in_the_message_but_kept_whole(folder):
    with pytest.raises(CheckpointError) as caught:
        load_all(folder(config=dataclasses.replace(CONFIG, num_hidden_layers=9, num_nextn_predict_layers=0)))
    assert len(caught.value.problems) > 100
    assert "more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 50


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda d: d.rmdir(), "does not exist"),
        (lambda d: None, "has no config.json; expected"),
        (lambda d: (d / "config.json").write_text("{}"), "has a config.json but no weights"),
    ],
)
def test_a_directory_that_is_no_checkpoint_says_what_was_looked_for(tmp_path, prepare, message):
    directory = tmp_path / "model"
    directory.mkdir()
    prepare(directory)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)
