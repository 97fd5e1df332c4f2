"""The fingerprint: the same wherever it is computed; another one where a sampled byte, a header or the configuration differs."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from odd_checkpoints import CONFIG, make_checkpoint, make_tensors

from dsjax.checkpoint import fingerprint as module
from dsjax.checkpoint.convert import convert_checkpoint
from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.fingerprint import BLOCK_BYTES, BLOCKS, fingerprint
from dsjax.checkpoint.safetensors import TensorSpec, write_file

VALUES = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)


def write(folder, name, array):
    write_file(folder / "model.safetensors", {name: TensorSpec(array.dtype, array.shape)}, lambda _: array)


@pytest.fixture
def large(tmp_path):
    """A file of 1 MiB, of which the blocks cover a sixteenth, and a configuration."""
    write(tmp_path, "w", VALUES)
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "model_type": "deepseek_v3"}')
    return tmp_path


def change_byte(path, place):
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.slow
def test_a_copy_in_another_place_and_process_has_the_same_fingerprint(large, tmp_path_factory):
    copied = shutil.copytree(large, tmp_path_factory.mktemp("copy") / "model")
    # The same, written otherwise.
    (copied / "config.json").write_text('{"model_type":"deepseek_v3",\n  "hidden_size":64}')
    (copied / "tokenizer.json").write_text("{}")
    program = "import sys; from dsjax.checkpoint.fingerprint import fingerprint; print(fingerprint(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    other = subprocess.run([sys.executable, "-c", program, copied], capture_output=True, text=True, env=environment)
    assert other.stdout.strip() == fingerprint(large)
    assert len(fingerprint(large)) == 64


@pytest.mark.parametrize("block", [0, 7, BLOCKS - 1])
def test_every_sampled_byte_counts(large, block):
    file, before = large / "model.safetensors", fingerprint(large)
    data = file.stat().st_size - (1 << 20)
    change_byte(file, data + block * ((1 << 20) - BLOCK_BYTES) // (BLOCKS - 1) + 17)
    assert fingerprint(large) != before


def test_the_last_byte_counts_and_one_between_blocks_does_not(large):
    file, before = large / "model.safetensors", fingerprint(large)
    change_byte(file, file.stat().st_size - (1 << 20) + BLOCK_BYTES)
    assert fingerprint(large) == before  # as the definition says: it is a sample
    change_byte(file, -1)
    assert fingerprint(large) != before
    assert sum(map(len, module._safetensors_items(large))) < BLOCKS * BLOCK_BYTES + 200, "it reads a bounded part"


def test_a_tensors_name_dtype_and_shape_and_the_configuration_count(large):
    found = {fingerprint(large)}
    for name, array in (("v", VALUES), ("w", VALUES.reshape(2, -1)), ("w", VALUES.view(np.int8))):
        write(large, name, array)
        found.add(fingerprint(large))
    (large / "config.json").write_text('{"hidden_size": 65, "model_type": "deepseek_v3"}')
    found.add(fingerprint(large))
    assert len(found) == 5
    (large / "config.json").write_text('{"a": 1')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        fingerprint(large)


def test_two_conversions_to_orbax_have_one_fingerprint_and_other_values_another(checkpoints, tmp_path):
    source, _ = checkpoints("bf16")
    first = fingerprint(convert_checkpoint(source, tmp_path / "a", to="orbax"))
    assert first == fingerprint(convert_checkpoint(source, tmp_path / "b", to="orbax"))
    other = make_checkpoint(tmp_path / "hf", CONFIG, make_tensors(CONFIG, seed=1))
    assert fingerprint(convert_checkpoint(other, tmp_path / "c", to="orbax")) != first != fingerprint(source)


def test_every_shard_counts_and_a_missing_one_is_named(tmp_path):
    folder = make_checkpoint(tmp_path / "model", CONFIG, make_tensors(CONFIG), max_shard_bytes=500_000)
    seen = {fingerprint(folder)}
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        change_byte(shard, -1)
        seen.add(fingerprint(folder))
    assert len(seen) == len(shards) + 1
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        fingerprint(folder)
