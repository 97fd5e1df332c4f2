"""A folder of shards with an index is one mapping, and its faults are told together."""

import json

import numpy as np
import pytest

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import INDEX_NAME, SafetensorsFolder, write_folder

TENSORS = {f"t{i}": np.full((10,), i, np.float32) for i in range(7)}


def write(folder, tensors=TENSORS, limit=100):
    folder.mkdir(exist_ok=True)
    specs = {name: TensorSpec(t.dtype, t.shape) for name, t in tensors.items()}
    return write_folder(folder, specs, tensors.__getitem__, limit)


def edit_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_shards_hold_at_most_the_limit_and_read_as_one_mapping(tmp_path):
    written = write(tmp_path)
    assert written == [*(f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)), INDEX_NAME]
    folder = SafetensorsFolder(tmp_path)
    assert folder.problems == []
    assert {name: float(folder[name][9]) for name in folder} == {f"t{i}": i for i in range(7)}
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"]["total_size"] == 280


@pytest.mark.parametrize(("limit", "files"), [(1000, 1), (1, 8)])
def test_one_file_needs_no_index_and_a_tensor_above_the_limit_gets_its_own_shard(tmp_path, limit, files):
    assert len(write(tmp_path, limit=limit)) == files
    assert len(SafetensorsFolder(tmp_path)) == 7


def test_missing_and_truncated_shards_are_listed_and_their_tensors_named_unreadable(tmp_path):
    first, second, *_ = write(tmp_path)
    (tmp_path / first).unlink()
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-3])
    folder = SafetensorsFolder(tmp_path)
    assert len(folder.problems) == 2
    assert "missing" in folder.problems[0]
    assert "truncated" in folder.problems[1]
    assert folder.unreadable == {"t0", "t1", "t2", "t3"}


def test_an_index_that_points_to_where_a_tensor_is_not_and_a_tensor_in_two_shards_are_faults(tmp_path):
    write(tmp_path)
    edit_index(tmp_path, lambda weights: weights.update(ghost="model-00001-of-00004.safetensors"))
    folder = SafetensorsFolder(tmp_path)
    assert folder.problems == [
        f"ghost: {INDEX_NAME} places it in model-00001-of-00004.safetensors, which does not hold it"
    ]
    first, second, *_ = write(tmp_path)
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    problems = SafetensorsFolder(tmp_path).problems
    assert any(problem.startswith("t0: in two shards") for problem in problems)
    write(tmp_path)
    edit_index(tmp_path, lambda weights: weights.update(t0="../secret.safetensors"))
    with pytest.raises(CheckpointError, match="not a file name of its own folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}", "9" * 5000, "[" * 100_000]
)
def test_an_index_that_is_none_is_a_clear_error(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        SafetensorsFolder(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    write(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="found 4 safetensors files and no index"):
        SafetensorsFolder(tmp_path)


def test_a_single_file_that_is_a_link_to_nothing_is_a_clear_error(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be used.*\n.*No such file"):
        SafetensorsFolder(tmp_path)
