"""Converting: byte-exact there and back, never half a directory, and only what a device needs is read."""

import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import jax
import ml_dtypes
import numpy as np
import pytest
from odd_checkpoints import CONFIG, assert_same, make_checkpoint, make_tensors, place
from typer.testing import CliRunner

from dsjax.checkpoint import convert as convert_module
from dsjax.checkpoint.convert import convert_checkpoint, save
from dsjax.checkpoint.errors import CheckpointError, CheckpointWarning
from dsjax.checkpoint.load import from_hf_tensors, to_hf_tensors
from dsjax.checkpoint.orbax_form import MANIFEST_NAME
from dsjax.checkpoint.publish import check_destination, publish
from dsjax.checkpoint.source import open_checkpoint
from dsjax.cli.convert import convert, parse_bytes
from dsjax.cli.main import app
from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.parameter_table import abstract_parameters
from sharding import MeshSpec, Rules
from sharding.placement import Placement

pytestmark = pytest.mark.slow  # all together


def assert_same_tensors(directory, tensors):
    found = open_checkpoint(directory).tensors
    assert set(found) == set(tensors)
    for name, expected in tensors.items():
        assert found[name].dtype == expected.dtype, name
        assert found[name].tobytes() == expected.tobytes(), name


def edit_manifest(directory, **fields):
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


@pytest.fixture(scope="module")
def orbax(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    return functools.cache(lambda weights: convert_checkpoint(checkpoints(weights)[0], folder / weights, to="orbax"))


@pytest.mark.parametrize("weights", ["bf16", "fp8", "f32"])
def test_there_and_back_is_exact_to_the_byte(checkpoints, orbax, tmp_path, weights):
    source, tensors = checkpoints(weights)
    back = convert_checkpoint(orbax(weights), tmp_path / "back", to="hf", max_shard_bytes=200_000)
    assert (back / "model.safetensors.index.json").exists()
    assert_same_tensors(back, tensors)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_the_encoder_of_the_model_s_prompts_comes_along(checkpoints, tmp_path, form):
    """A DeepSeek-V4 has no chat template: its encoder beside the weights shows which reasoning efforts its prompts know."""
    source = shutil.copytree(checkpoints("bf16")[0], tmp_path / "source")
    (source / "encoding").mkdir()
    (source / "encoding" / "encoding_dsv4.py").write_text("EFFORTS = {}\n")
    made = convert_checkpoint(source, tmp_path / "made", to=form)
    assert (made / "encoding" / "encoding_dsv4.py").read_text() == "EFFORTS = {}\n"


@pytest.mark.parametrize(
    ("weights", "changed", "dtype"), [("bf16", "e_score_correction_bias", ml_dtypes.bfloat16), ("f32", "", np.float16)]
)
def test_narrower_dtypes_come_back_as_they_were(checkpoints, tmp_path, weights, changed, dtype):
    tensors = checkpoints(weights)[1]
    tensors = {name: value.astype(dtype) if name.endswith(changed) else value for name, value in tensors.items()}
    source = make_checkpoint(tmp_path / "source", CONFIG, tensors)
    assert_same_tensors(convert_checkpoint(source, tmp_path / "again", to="hf"), tensors)
    convert_checkpoint(source, tmp_path / "orbax", to="orbax")
    assert_same_tensors(convert_checkpoint(tmp_path / "orbax", tmp_path / "back", to="hf"), tensors)


@pytest.mark.parametrize("form", ["orbax", "hf"])
@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
@pytest.mark.filterwarnings("ignore:checkpoint")
def test_what_is_converted_says_which_mtp_modules_and_head_it_has(tmp_path, form, key):
    """The module that `config.json` announces is not there, and the head that it ties differs."""
    without = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    tensors = make_tensors(without)
    source = make_checkpoint(tmp_path / "source", without, tensors)
    fields = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    del fields["num_nextn_predict_layers"]
    (source / "config.json").write_text(json.dumps(fields | {key: 1}))
    made = convert_checkpoint(source, tmp_path / "made", to=form)
    assert load_config(made) == without
    assert_same_tensors(convert_checkpoint(made, tmp_path / "back", to="hf"), tensors)


def test_of_a_model_with_a_vision_part_the_text_part_is_read_and_converted(checkpoints, tmp_path):
    tensors = checkpoints("bf16")[1]
    whole = {f"language_model.{name}": value for name, value in tensors.items()}
    whole |= {"vision_tower.patch_embed.proj.bias": np.ones(3, np.float32), "mm_projector.proj.0.weight": np.eye(2)}
    source = make_checkpoint(tmp_path / "source", CONFIG, whole)
    nested = {"model_type": "kimi_k25", "text_config": CONFIG.to_dict(), "vision_config": {}}
    (source / "config.json").write_text(json.dumps(nested))
    with pytest.warns(CheckpointWarning, match=r"2 tensors of the vision part \(mm_projector, vision_tower\).*images"):
        text = convert_checkpoint(source, tmp_path / "text", to="hf")
    assert json.loads((text / "config.json").read_text()) == CONFIG.to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_tensors(text, tensors)


def test_layers_of_different_dtypes_come_back_with_the_same_values(checkpoints, tmp_path):
    tensors, first = checkpoints("bf16")[1], "model.layers.1.mlp.gate.e_score_correction_bias"
    mixed = tensors | {first: tensors[first].astype(ml_dtypes.bfloat16)}
    source = make_checkpoint(tmp_path / "mixed", CONFIG, mixed)
    written = open_checkpoint(convert_checkpoint(source, tmp_path / "mixed again", to="hf")).tensors
    assert_same({name: written[name].astype(np.float32) for name in mixed}, mixed)


@pytest.mark.parametrize(
    ("mesh", "stored", "options"),
    [
        ("dp=2,tp=4", "bf16", {}),
        ("dp=8,ep=2", "bf16", {}),
        ("dp=4", "fp8", {"weights": "bf16", "placement": Placement.with_redundancy(8, 12, ranks=4)}),
        ("dp=4", "fp8", {"weights": "fp8", "placement": Placement.with_redundancy(8, 12, ranks=4)}),
    ],
)
def test_the_orbax_form_loads_on_any_mesh_like_the_original(checkpoints, orbax, mesh, stored, options):
    original, restored = (place(source, mesh, **options) for source in (checkpoints(stored)[0], orbax(stored)))
    assert_same(restored, original)
    assert all(restored[path].sharding == array.sharding for path, array in original.items())


def test_orbax_alone_restores_our_form_into_another_sharding(checkpoints, orbax):
    import orbax.checkpoint as ocp

    spec = MeshSpec.parse("dp=2,tp=4")
    mesh, rules = spec.build(), Rules.for_mesh(spec)
    infos = abstract_parameters(CONFIG, weights="bf16", platform="any")
    target = {
        path: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=rules.sharding(mesh, info.logical_axes, info.shape))
        for path, info in infos.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(orbax("bf16") / "params", target)
    for path, expected in from_hf_tensors(CONFIG, checkpoints("bf16")[1], weights="bf16").items():
        assert restored[path].sharding == target[path].sharding
        bits = np.asarray(restored[path]).view(expected.dtype)
        np.testing.assert_array_equal(bits, expected, err_msg=path)


def test_a_device_reads_its_share_of_the_experts_and_not_the_others(orbax):
    """Bytes that TensorStore reads for one expert of eight are at most a seventh of what it reads for all."""
    import tensorstore

    tensors = open_checkpoint(orbax("bf16")).tensors

    def file_bytes():
        metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    def bytes_read(experts):
        down = "model.layers.1.mlp.experts.{}.down_proj.weight".format
        tensors[down(7)][0:1, 0:1]  # opened before, so that reading the store's index does not count
        before = file_bytes()
        for expert in experts:
            tensors[down(expert)][:, :]
        return file_bytes() - before

    expert, all_experts = bytes_read(range(1)), bytes_read(range(8))
    size = 136 * 152 * 2
    # A chunk is compressed, and random mantissas hardly compress; the store's own index adds a little.
    assert 0.5 * size < expert < 1.5 * size
    assert 7 * expert < all_experts


@pytest.mark.parametrize(("source", "target"), [("bf16", "fp8"), ("f32", "fp8"), ("fp8", "bf16"), ("bf16", "f32")])
def test_hugging_face_to_itself_in_other_weights(checkpoints, tmp_path, source, target):
    """What is written loads without a further change, and is what loading the source in these weights gives."""
    directory, tensors = checkpoints(source)
    written = open_checkpoint(convert_checkpoint(directory, tmp_path / "new", to="hf", weights=target))
    assert written.stored_weights == target
    assert (written.config.quantization is not None) == (target == "fp8")
    assert written.config.torch_dtype == ("float32" if target == "f32" else "bfloat16")
    expected = from_hf_tensors(CONFIG, tensors, weights=target)
    assert_same(from_hf_tensors(CONFIG, written.tensors, weights=target), expected)


def test_parameters_in_memory_are_saved_and_are_the_inverse_of_reading(checkpoints, tmp_path):
    directory, tensors = checkpoints("bf16")
    params = place(directory, "dp=2,tp=2")
    for name, value in to_hf_tensors(CONFIG, params).items():
        assert value.tobytes() == tensors[name].tobytes(), name
    for form in ("hf", "orbax"):
        saved = save(CONFIG, params, tmp_path / form, to=form, companions=[directory / "tokenizer.json"])
        assert (saved / "tokenizer.json").exists()
        assert open_checkpoint(saved).config == CONFIG
        assert_same(place(saved, "dp=1"), params)


def test_saving_parameters_of_another_model_is_refused(checkpoints, tmp_path):
    params = dict(from_hf_tensors(CONFIG, checkpoints("f32")[1]))
    params["stray"] = params.pop("embed.weight")
    with pytest.raises(CheckpointError, match=r"embed\.weight: missing"):
        save(CONFIG, params, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_damaged_values_are_not_converted(checkpoints, tmp_path, to):
    damaged = checkpoints("f32")[1] | {"model.norm.weight": np.full(152, np.nan, np.float32)}
    source = make_checkpoint(tmp_path / "source", CONFIG, damaged)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: has values that are not finite"):
        convert_checkpoint(source, tmp_path / "new", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("to", "stage"), [("orbax", "write_params"), ("orbax", "write_manifest"), ("hf", "_build_config")]
)
def test_a_conversion_that_fails_leaves_nothing(checkpoints, tmp_path, monkeypatch, to, stage):
    monkeypatch.setattr(convert_module, stage, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(checkpoints("bf16")[0], tmp_path / "new", to=to)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from dsjax.checkpoint import convert as module
def stop(*args, **kwargs):
    print("reached", flush=True)
    time.sleep(600)
module.write_manifest = stop
module.convert_checkpoint(sys.argv[1], sys.argv[2], to="orbax")
"""


def test_a_conversion_that_is_killed_leaves_nothing_that_loads(checkpoints, tmp_path):
    destination = tmp_path / "new"
    arguments = [sys.executable, "-c", KILLED, str(checkpoints("bf16")[0]), str(destination)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "reached\n"
        process.send_signal(signal.SIGKILL)
    assert not destination.exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError):
        open_checkpoint(left)
    open_checkpoint(convert_checkpoint(checkpoints("bf16")[0], destination, to="orbax"))  # it is in nobody's way


def test_a_destination_is_kept_unless_told_otherwise_and_until_the_new_one_is_complete(checkpoints, tmp_path):
    replace = functools.partial(convert_checkpoint, checkpoints("f32")[0], tmp_path / "model", to="hf")
    convert_checkpoint(checkpoints("bf16")[0], tmp_path / "model", to="hf")
    with pytest.raises(CheckpointError, match=r"cannot write to .*: it exists already; .* --overwrite"):
        replace()
    failing = mock.patch.object(convert_module, "write_folder", side_effect=ZeroDivisionError)
    with failing, pytest.raises(ZeroDivisionError):
        replace(overwrite=True)
    assert open_checkpoint(tmp_path / "model").stored_weights == "bf16"
    assert open_checkpoint(replace(overwrite=True)).stored_weights == "f32"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_behind_a_link_the_folder_is_replaced_and_the_link_stays(tmp_path):
    old, link = tmp_path / "volume" / "old", tmp_path / "model"
    old.mkdir(parents=True)
    link.symlink_to(old)
    for name in ("config.json", "model.safetensors"):
        (old / name).touch()
    with publish(link, overwrite=True) as folder:
        (folder / "new weights").touch()
    assert link.readlink() == old
    assert {*tmp_path.rglob("*")} == {old.parent, old, link, old / "new weights"}


def test_a_folder_whose_place_cannot_be_taken_is_put_back(checkpoints, tmp_path):
    model = convert_checkpoint(checkpoints("bf16")[0], tmp_path / "model", to="hf")
    moves = iter([Path.rename, mock.Mock(side_effect=KeyboardInterrupt), Path.rename])
    patched = mock.patch.object(Path, "rename", lambda path, to: next(moves)(path, to))
    with patched, pytest.raises(KeyboardInterrupt), publish(model, overwrite=True):
        pass
    assert open_checkpoint(model).stored_weights == "bf16"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("files", [["thesis.tex"], ["config.json", "main.py"], ["model.safetensors"]])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path, files):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="is no checkpoint, which is all that --overwrite replaces"):
        check_destination(tmp_path, overwrite=True)
    with pytest.raises(CheckpointError, match="is no checkpoint"), publish(tmp_path, overwrite=True):
        raise AssertionError("nothing is written")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("destination", "message"),
    [("/proc/none/model", "it cannot be made .No such file"), ("/proc", "it is where a volume is mounted")],
)
def test_where_no_folder_can_be_made_or_replaced_the_reason_is_said(destination, message):
    with pytest.raises(CheckpointError, match=message), publish(Path(destination), overwrite=True):
        raise AssertionError("nothing is written")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / MANIFEST_NAME).write_text("{"), "dsjax.json is damaged"),
        (lambda d: (d / MANIFEST_NAME).write_text('{"format": "dsjax-orbax", "version": 9}'), "version 9, expected"),
        (lambda d: edit_manifest(d, parameters=[1]), "dsjax.json is damaged .*parameters is a list, expected a dict"),
        (lambda d: edit_manifest(d, copies="ab"), "dsjax.json is damaged .*copies is a str, expected a list"),
        (lambda d: (d / "config.json").write_text((d / "config.json").read_text() + " "), "config.json is not the one"),
        (lambda d: (d / MANIFEST_NAME).unlink(), "has a config.json but no weights"),
        (lambda d: (d / "params" / "manifest.ocdbt").unlink(), "cannot be read"),
    ],
)
def test_a_damaged_orbax_directory_is_a_clear_error(orbax, tmp_path, damage, message):
    destination = shutil.copytree(orbax("bf16"), tmp_path / "new")
    damage(destination)
    with pytest.raises(CheckpointError, match=message):
        place(destination, "dp=1")


def command(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_an_empty_destination_and_one_that_exists_are_refused_before_the_source_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = command("demo", "")
    assert isinstance(run.exception, UserError)
    assert "the destination is '', which names no folder" in str(run.exception)
    assert not any(tmp_path.iterdir())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match=f"cannot write to {tmp_path}: it exists already; .* pass --overwrite"):
        convert("no/such-source", tmp_path)


def test_the_command_converts_to_the_other_form_and_says_what_it_wrote(checkpoints, tmp_path):
    source, tensors = checkpoints("bf16")
    run = command(source, tmp_path / "orbax", "--no-progress")
    assert run.exit_code == 0, run.output
    assert "Orbax form" in run.output
    run = command(tmp_path / "orbax", tmp_path / "back", "--max-shard-size", "300KB", "--no-progress")
    assert run.exit_code == 0, run.output
    assert_same_tensors(tmp_path / "back", tensors)
    assert max(path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")) < 330_000


@pytest.mark.parametrize("text", ["", "0", "5XB", "-1GB", "GB"])
def test_a_size_that_is_none_is_refused(text):
    assert parse_bytes("1.5 KiB") == 1536
    with pytest.raises(ValueError, match="expected a positive number with a unit"):
        parse_bytes(text)
