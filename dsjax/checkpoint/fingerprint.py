"""`fingerprint`: whether two processes, or two machines, compute with the same checkpoint, without reading all of it.

It is the SHA-256 of the following, in this order, each item preceded by its length:

1. the name of this definition, with its version;
2. `config.json` as canonical JSON: keys sorted, no spaces. The file itself is taken, and not what we read from it, so that a
   field that a later dsjax begins to read does not change the fingerprint;
3. of safetensors, file by file in the order of their names: the file's name; for each tensor, in the order of their places, its
   name, dtype, shape and bytes [start, stop) of the file; then `BLOCKS` blocks of `BLOCK_BYTES` bytes each, evenly spaced over the
   tensors' bytes, the first and the last among them. Where the tensors have no more bytes than that, all of them;
4. of an Orbax directory, the manifest `dsjax.json` as canonical JSON (it has each parameter's shape and dtype); then, parameter
   by parameter in the order of their paths, the path and `RUNS` runs of neighbouring values along the last axis, of at most
   `BLOCK_BYTES` bytes each, evenly spaced, the first and the last among them. Values are read through TensorStore: how Orbax
   lays them into files differs from one conversion to the next, and the fingerprint does not.

So at most 64 KiB of values are read of each safetensors file: 11 MB of DeepSeek-V3's 163 files, and about as much of headers;
of an Orbax directory at most `RUNS` chunks of 4 MB of each of some 40 parameters. A change of a byte that no block covers is not
seen: the fingerprint tells checkpoints apart that differ by training, conversion or quantisation, and does not prove that
a file is undamaged. The tokenizer is not part of it. The Hugging Face form and the Orbax form of one model differ.
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
    """The fingerprint of a checkpoint's directory, as 64 hexadecimal digits; the module's docstring defines it.

    Raises:
        CheckpointError: a file of the checkpoint is absent, damaged or unreadable.
    """
    directory = Path(directory)
    digest = hashlib.sha256()
    items = _orbax(directory) if (directory / MANIFEST_NAME).exists() else _safetensors(directory)
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


def _safetensors(directory: Path) -> Iterator[bytes]:
    folder = SafetensorsFolder(directory)
    if folder.problems:
        raise CheckpointError(directory, folder.problems)
    for name, file in sorted(folder.files.items()):
        yield name.encode()
        tensors = sorted((start, stop, tensor) for tensor, (start, stop) in file.ranges.items())
        table = [(tensor, str(file.specs[tensor]), start, stop) for start, stop, tensor in tensors]
        yield json.dumps(table, ensure_ascii=False).encode()
        if tensors:
            yield from _blocks(file, tensors[0][0], max(stop for _, stop, _ in tensors))


def _blocks(file: SafetensorsFile, start: int, stop: int) -> Iterator[bytes]:
    """The sample of a file's bytes [start, stop)."""
    size = stop - start
    try:
        with file.path.open("rb") as opened:
            if size <= BLOCKS * BLOCK_BYTES:
                opened.seek(start)
                yield opened.read(size)
                return
            for index in range(BLOCKS):
                opened.seek(start + _spaced(index, BLOCKS, size - BLOCK_BYTES))
                yield opened.read(BLOCK_BYTES)
    except OSError as error:
        raise CheckpointError(file.path, [f"cannot be read: {error.strerror or error}"]) from error


def _orbax(directory: Path) -> Iterator[bytes]:
    config = load_config(directory)
    tensors = OrbaxTensors(directory, config, read_manifest(directory, config))
    yield _canonical_json(directory / MANIFEST_NAME)
    for path, info in sorted(tensors.parameters.items()):
        yield path.encode()
        *outer, width = info.shape
        length = min(width, BLOCK_BYTES // info.dtype.itemsize)
        for index in range(RUNS):
            row = np.unravel_index(_spaced(index, RUNS, math.prod(outer) - 1), outer)
            begin = _spaced(index, RUNS, width - length)
            values = tensors.read(path, (*map(int, row), slice(begin, begin + length)))
            yield np.ascontiguousarray(values).tobytes()


def _spaced(index: int, count: int, last: int) -> int:
    """Number `index` of `count` integers that are evenly spaced from 0 to `last`, both among them."""
    return index * last // (count - 1)
