"""Reader and writer of a safetensors folder: a single file, or shards with ``model.safetensors.index.json``."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.safetensors import SafetensorsFile, TensorSpec, write_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """All tensors of a folder: ``folder[name]`` is a zero-copy view, whichever file holds the tensor.

    Damaged or missing shards do not raise here: ``problems`` lists them (one line each), and ``unreadable`` names the
    tensors that the index places in them, so that one error can report them together with other problems.

    Raises:
        CheckpointError: no safetensors at all, or several files without an index.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.problems: list[str] = []
        self.unreadable: set[str] = set()
        self.files: dict[str, SafetensorsFile] = {}  # those that could be opened, by their names
        self._file_of: dict[str, SafetensorsFile] = {}  # by tensor
        if (self.folder / INDEX_NAME).exists():
            self._open_sharded(_read_index(self.folder / INDEX_NAME))
        else:
            self._open_single()

    def _open_single(self) -> None:
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE_NAME in files:
            files = [SINGLE_NAME]
        if len(files) != 1:
            found = f"found {len(files)} safetensors files and no index" if files else "found no safetensors"
            raise CheckpointError(self.folder, [f"{found}; expected {SINGLE_NAME}, or shards with {INDEX_NAME}"])
        self._add_file(files[0])

    def _open_sharded(self, weight_map: Mapping[str, str]) -> None:
        names_by_shard: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            names_by_shard.setdefault(shard, []).append(name)
        for shard, names in names_by_shard.items():
            if not os.path.exists(self.folder / shard):  # `Path.exists` raises on a name too long
                self.problems.append(f"{shard}: missing; {INDEX_NAME} places {len(names)} tensors in it")
                self.unreadable.update(names)
                continue
            try:
                file = self._add_file(shard)
            except CheckpointError as error:
                self.problems += [f"{shard}: {problem}" for problem in error.problems]
                self.unreadable.update(names)
                continue
            absent = [name for name in names if name not in file]
            self.problems += [f"{name}: {INDEX_NAME} places it in {shard}, which does not hold it" for name in absent]
            self.unreadable.update(absent)

    def _add_file(self, shard: str) -> SafetensorsFile:
        file = self.files[shard] = SafetensorsFile(self.folder / shard)
        for name in file:
            if name in self._file_of:
                self.problems.append(f"{name}: in two shards, {self._file_of[name].path.name} and {shard}")
            self._file_of[name] = file
        return file

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every readable tensor, from the headers alone."""
        return {name: file.specs[name] for name, file in self._file_of.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def release(self) -> None:
        """Drop the pages read so far from this process's resident memory."""
        for file in self.files.values():
            file.release()


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's ``weight_map``, tensor → shard; each shard must be a plain file name in the same folder."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(path, [f"is no index with a weight_map ({type(error).__name__}: {error})"]) from None
    if not valid:
        raise CheckpointError(path, ["weight_map must map tensor names to file names"])
    outside = sorted({shard for shard in weight_map.values() if Path(shard).name != shard})
    if outside:
        raise CheckpointError(
            path, [f"names {shard!r}, which is not a file name of its own folder" for shard in outside]
        )
    return weight_map


def write_folder(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    fetch: Callable[[str], np.ndarray],
    max_shard_bytes: int,
) -> list[str]:
    """Write tensors as one file, or as shards of at most ``max_shard_bytes`` with an index; return the file names.

    Tensors keep the order of ``specs``. A tensor larger than the limit gets its own shard. The index is written last.
    """
    groups: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.nbytes > max_shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.nbytes
    if len(groups) == 1:
        write_file(folder / SINGLE_NAME, groups[0], fetch)
        return [SINGLE_NAME]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for shard, group in zip(names, groups, strict=True):
        write_file(folder / shard, group, fetch)
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {name: shard for shard, group in zip(names, groups, strict=True) for name in group},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [*names, INDEX_NAME]
