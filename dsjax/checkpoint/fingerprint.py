"""`fingerprint`: identify a checkpoint by a sample of its bytes, to check that processes or machines use the same one.

The fingerprint is the SHA-256 of the following items in this order, each preceded by its length:

1. the name and version of this definition;
2. `config.json` as canonical JSON: keys sorted, no spaces. The file itself is hashed, not the parsed configuration, so the
   fingerprint stays the same when a later dsjax reads more fields;
3. for safetensors, file by file in the order of their names: the file's name; for each tensor, in the order of its offset, its
   name, dtype, shape and bytes [start, stop) of the file; then `BLOCKS` blocks of `BLOCK_BYTES` bytes each, evenly spaced over the
   tensors' bytes, including the first and the last; or all of the tensors' bytes, if there are no more than that;
4. for an Orbax directory, the manifest `dsjax.json` as canonical JSON (it has each parameter's shape and dtype); then, parameter
   by parameter in the order of their paths, the path and `RUNS` runs of neighbouring values along the last axis, of at most
   `BLOCK_BYTES` bytes each, evenly spaced, including the first and the last. Values are read through TensorStore, because the
   layout of Orbax's files differs between conversions, and the fingerprint must not.

This reads at most 64 KiB of values per safetensors file (11 MB for DeepSeek-V3's 163 files, plus about as much of headers), and
at most `RUNS` chunks of 4 MB for each of an Orbax directory's roughly 40 parameters. Changes outside the sampled blocks go
unnoticed: the fingerprint distinguishes checkpoints that differ by training, conversion or quantisation, but does not prove that
a file is undamaged. It excludes the tokenizer. It differs between the Hugging Face form and the Orbax form of one model.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.orbax_form import MANIFEST_NAME, OrbaxTensors, read_manifest
from dsjax.checkpoint.safetensors import SafetensorsFile
from dsjax.checkpoint.shards import SafetensorsFolder
from dsjax.config import load_config

DEFINITION = b"dsjax-fingerprint-1"
BLOCKS = 16
RUNS = 4
BLOCK_BYTES = 4096


def fingerprint(directory: str | Path) -> str:
    """Return the fingerprint of a checkpoint directory as 64 hexadecimal digits. The module's docstring defines it.

    Raises:
        CheckpointError: a file of the checkpoint is absent, damaged or unreadable.
    """
    directory = Path(directory)
    digest = hashlib.sha256()
    is_orbax = (directory / MANIFEST_NAME).exists()
    items = _orbax_items(directory) if is_orbax else _safetensors_items(directory)
    for item in (DEFINITION, _canonical_json(directory / "config.json"), *items):
        digest.update(len(item).to_bytes(8, "little"))
        digest.update(item)
    return digest.hexdigest()


def _canonical_json(path: Path) -> bytes:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path.parent, [f"{path.name} cannot be read as JSON: {error}"]) from None
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _safetensors_items(directory: Path) -> Iterator[bytes]:
    folder = SafetensorsFolder(directory)
    if folder.problems:
        raise CheckpointError(directory, folder.problems)
    for file_name, file in sorted(folder.files.items()):
        yield file_name.encode()
        ranges = sorted((start, stop, name) for name, (start, stop) in file.ranges.items())
        table = [(name, str(file.specs[name]), start, stop) for start, stop, name in ranges]
        yield json.dumps(table, ensure_ascii=False).encode()
        if ranges:
            yield from _blocks(file, ranges[0][0], max(stop for _, stop, _ in ranges))


def _blocks(file: SafetensorsFile, start: int, stop: int) -> Iterator[bytes]:
    """Yield the sampled blocks of a file's bytes [start, stop)."""
    size = stop - start
    try:
        with file.path.open("rb") as stream:
            if size <= BLOCKS * BLOCK_BYTES:
                stream.seek(start)
                yield stream.read(size)
                return
            for offset in _evenly_spaced(BLOCKS, size - BLOCK_BYTES):
                stream.seek(start + offset)
                yield stream.read(BLOCK_BYTES)
    except OSError as error:
        raise CheckpointError(file.path, [f"cannot be read: {error.strerror or error}"]) from error


def _orbax_items(directory: Path) -> Iterator[bytes]:
    config = load_config(directory)
    tensors = OrbaxTensors(directory, config, read_manifest(directory, config))
    yield _canonical_json(directory / MANIFEST_NAME)
    for path, info in sorted(tensors.parameters.items()):
        yield path.encode()
        *outer_shape, width = info.shape
        length = min(width, BLOCK_BYTES // info.dtype.itemsize)
        rows = _evenly_spaced(RUNS, math.prod(outer_shape) - 1)
        for row, start in zip(rows, _evenly_spaced(RUNS, width - length), strict=True):
            outer = map(int, np.unravel_index(row, outer_shape))
            values = tensors.read(path, (*outer, slice(start, start + length)))
            yield np.ascontiguousarray(values).tobytes()


def _evenly_spaced(count: int, last: int) -> list[int]:
    """Return `count` integers evenly spaced from 0 to `last`, both included."""
    return [index * last // (count - 1) for index in range(count)]
