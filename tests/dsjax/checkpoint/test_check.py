"""Ten kinds of corrupted checkpoint, and more: each one clear error, raised by `load` before a device holds anything."""

import dataclasses
import json

import numpy as np
import pytest

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.load import load
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import INDEX_NAME, write_folder
from dsjax.checkpoint.source import open_checkpoint
from sharding import MeshSpec, Rules

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
SPEC = MeshSpec.parse("dp=2")


def load_all(directory, **options):
    checkpoint = open_checkpoint(directory)
    return load(checkpoint.config, checkpoint, SPEC.build(), Rules.for_mesh(SPEC), **options)


@pytest.fixture
def folder(tmp_path, tiny_config, checkpoints):
    """A writable folder, and ``save(**changes)``: the tiny checkpoint with tensors replaced (None: left out) as shards."""

    def save(weights="bf16", config=tiny_config, drop_mtp=False, **changes):
        tensors = {**checkpoints(weights)[1], **{name.replace("__", "."): value for name, value in changes.items()}}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
        write_folder(tmp_path, specs, tensors.__getitem__, 1 << 20)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        return tmp_path

    return save


def named(name):
    return name.replace(".", "__")


def first_shard(directory):
    return sorted(directory.glob("*.safetensors"))[0]


def truncate(directory):
    shard = first_shard(directory)
    shard.write_bytes(shard.read_bytes()[:-100])


def overwrite(directory, start, data):
    shard = first_shard(directory)
    content = bytearray(shard.read_bytes())
    content[start : start + len(data)] = data
    shard.write_bytes(content)


def edit_header(directory, change):
    shard = first_shard(directory)
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    shard.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def overlap(header):
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    header[second]["shape"], header[second]["dtype"] = header[first]["shape"], header[first]["dtype"]


def duplicate_shard(directory):
    first, second, *_ = sorted(directory.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncate, "truncated: its tensors need", id="truncated file"),
        pytest.param(lambda d: overwrite(d, 8, b"garbage!"), "has a header that is not JSON", id="header garbage"),
        pytest.param(lambda d: overwrite(d, 0, b"\xff" * 8), "over the limit of 100,000,000", id="header length huge"),
        pytest.param(lambda d: edit_header(d, overlap), "overlap", id="overlapping offsets"),
        pytest.param(lambda d: first_shard(d).unlink(), "missing; model.safetensors.index.json places", id="no shard"),
        pytest.param(duplicate_shard, "in two shards", id="duplicated tensors"),
        pytest.param(lambda d: (d / INDEX_NAME).write_text("{"), "no index with a weight_map", id="index garbage"),
    ],
)
def test_damaged_files(folder, damage, message):
    directory = folder()
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        load_all(directory)


@pytest.mark.parametrize(
    ("weights", "name", "value", "message"),
    [
        pytest.param("bf16", EXPERT, None, "missing, expected shape [136, 152]", id="missing"),
        pytest.param(
            "f32", EXPERT, np.zeros((152, 136), np.float32), "[152, 136], expected [136, 152]", id="misshapen"
        ),
        pytest.param("bf16", EXPERT, np.zeros((136, 152), np.int8), "dtype int8, expected one of", id="wrong dtype"),
        pytest.param("bf16", EXPERT, np.full((136, 152), np.nan, np.float32), "not finite", id="NaN"),
        pytest.param("fp8", f"{EXPERT}_scale_inv", None, "missing, and", id="scale missing"),
        pytest.param(
            "fp8", f"{EXPERT}_scale_inv", np.ones((2, 3), np.float32), "expected [2, 2]", id="scale misshapen"
        ),
        pytest.param("fp8", f"{EXPERT}_scale_inv", np.ones((2, 2), np.float16), "expected float32", id="scale dtype"),
        pytest.param(
            "fp8", f"{EXPERT}_scale_inv", np.full((2, 2), np.inf, np.float32), "not finite", id="scale infinite"
        ),
        pytest.param(
            "bf16",
            "model.layers.3.embed_tokens.weight",
            np.zeros((9, 9), np.float32),
            "expected model.embed",
            id="copy",
        ),
    ],
)
def test_damaged_tensors(folder, weights, name, value, message):
    with pytest.raises(CheckpointError) as caught:
        load_all(folder(weights, **{named(name): value}))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(name)
    assert message in caught.value.problems[0]


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_nan_is_found_on_every_mesh_and_in_every_format(folder, checkpoints, weights):
    bad = checkpoints("fp8")[1][EXPERT].copy()
    bad.view(np.uint8)[5, 7] = 0x7F
    directory = folder("fp8", **{named(EXPERT): bad})
    for mesh in ("dp=1", "dp=8"):
        spec = MeshSpec.parse(mesh)
        checkpoint = open_checkpoint(directory)
        with pytest.raises(CheckpointError, match=rf"{EXPERT}: has values that are not finite"):
            load(checkpoint.config, checkpoint, spec.build(), Rules.for_mesh(spec), weights=weights)


def test_a_configuration_of_fewer_experts_or_layers_is_told_apart_from_extras(folder, tiny_config):
    fewer = dataclasses.replace(tiny_config, n_routed_experts=4)
    with pytest.raises(CheckpointError, match="n_routed_experts=4, but there are tensors of expert 7"):
        load_all(folder(config=fewer))
    fewer = dataclasses.replace(tiny_config, num_hidden_layers=2, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="num_hidden_layers=2, but there are tensors of layer 2"):
        load_all(folder(config=fewer))


def test_an_mtp_module_is_not_taken_for_a_layer_of_a_configuration_of_more(folder, tiny_config):
    layers = tiny_config.num_hidden_layers
    more = dataclasses.replace(tiny_config, num_hidden_layers=layers + 1, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=rf"layer {layers} is a multi-token prediction module .* has {layers}"):
        load_all(folder(config=more))


def test_a_configuration_of_more_experts_lists_what_is_missing(folder, tiny_config):
    more = dataclasses.replace(tiny_config, n_routed_experts=10)
    with pytest.raises(CheckpointError, match=r"experts\.9\.down_proj\.weight: missing"):
        load_all(folder(config=more))


def test_an_mtp_module_that_the_configuration_leaves_out_is_no_extra(folder, tiny_config, recwarn):
    load_all(folder(config=dataclasses.replace(tiny_config, num_nextn_predict_layers=0)))
    assert [str(warning.message) for warning in recwarn if "checkpoint" in str(warning.message)] == []


def test_everything_that_is_wrong_is_one_error(folder):
    """A lost shard, a missing tensor elsewhere, a misshapen one and a wrong dtype, without the lost shard's own tensors."""
    changes = {
        "model.norm.weight": None,
        "lm_head.weight": np.zeros((1, 1), np.float32),
        "model.layers.3.enorm.weight": np.zeros(152, np.int64),
    }
    directory = folder(**{named(name): value for name, value in changes.items()})
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    lost = next(shard for shard in index.values() if shard not in {index.get(name) for name in changes})
    (directory / lost).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_all(directory)
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == sorted([lost, *changes])


def test_a_long_list_is_cut_short_in_the_message_but_kept_whole(folder, tiny_config):
    with pytest.raises(CheckpointError) as caught:
        load_all(folder(config=dataclasses.replace(tiny_config, num_hidden_layers=9, num_nextn_predict_layers=0)))
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
