"""Our Orbax form: a directory with ``config.json``, tokenizer files, ``params/`` and the manifest ``dsjax.json``.

``params/`` is a plain Orbax ``StandardCheckpointer`` checkpoint of ``{path: array}`` in the parameters' true dtypes;
Orbax alone can restore it, into any sharding. It is chunked by layer, expert and gate/up, and further to 4 MB, so a
device that needs a part reads little else. We read it through TensorStore, slice by slice, with the same code that
reads safetensors, so parameters can be cast, dequantised and placed on redundant slots while loading. The manifest
is written last: a directory without it is not a complete checkpoint of this form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.names import TensorNames, TensorPiece
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.model.parameter_table import abstract_parameters
from dsjax.model.parameters import ParameterInfo, Weights

MANIFEST_NAME = "dsjax.json"
PARAMS_NAME = "params"
FORMAT = "dsjax-orbax"
VERSION = 1
_CHUNK_BYTES = 4 << 20
# Dimensions that readers slice: a chunk never spans two layers, two experts, or gate and up.
_CHUNKED_AXES = ("layers", "experts", "stack")


@dataclass(frozen=True)
class Manifest:
    """Contents of ``dsjax.json``."""

    weights: Weights
    config_sha256: str
    copies: tuple[str, ...] = ()
    """Hugging Face tensors of the source that duplicate another; written again when converting back."""
    narrow: Mapping[str, str] | None = None
    """Path → the source's dtype, for parameters that were widened (exactly) to the float32 we keep."""

    def to_json(self, parameters: Mapping[str, ParameterInfo]) -> str:
        """The file's text."""
        table = {path: {"shape": list(info.shape), "dtype": info.dtype.name} for path, info in parameters.items()}
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "weights": self.weights,
            "config_sha256": self.config_sha256,
            "copies": list(self.copies),
            "narrow": dict(self.narrow or {}),
            "parameters": table,
        }
        return json.dumps(fields, indent=1) + "\n"


def write_params(folder: Path, parameters: Mapping[str, ParameterInfo], values: Mapping[str, np.ndarray]) -> None:
    """Write ``folder/params`` from host arrays in the parameters' true dtypes, aligned for JAX (``aligned_empty``)."""
    import orbax.checkpoint as ocp

    # Orbax copies NumPy arrays before writing, but writes JAX arrays that alias the same memory without a copy.
    host = jax.devices("cpu")[0]
    tree = {path: jax.device_put(values[path], host, may_alias=True) for path in parameters}
    options = {}
    for path, info in parameters.items():
        axes = tuple(axis for axis, name in enumerate(info.logical_axes) if name in _CHUNKED_AXES)
        options[path] = ocp.SaveArgs(shard_axes=axes, chunk_byte_size=_CHUNK_BYTES)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / PARAMS_NAME, tree, save_args=options)
        checkpointer.wait_until_finished()


def write_manifest(folder: Path, manifest: Manifest, parameters: Mapping[str, ParameterInfo]) -> None:
    """Mark a directory complete. Call last."""
    (folder / MANIFEST_NAME).write_text(manifest.to_json(parameters), encoding="utf-8")


def config_hash(folder: Path) -> str:
    """SHA-256 of a directory's ``config.json``."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def read_manifest(folder: Path, config: ModelConfig) -> Manifest:
    """Read and check ``dsjax.json`` against the configuration beside it.

    Raises:
        CheckpointError: wrong format or version, ``config.json`` was changed, or parameters that do not match it.
    """
    try:
        fields = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        version_found = (fields["format"], fields["version"])
        if version_found != (FORMAT, VERSION):
            raise CheckpointError(
                folder,
                [
                    f"{MANIFEST_NAME} is {version_found[0]} version {version_found[1]}, expected {FORMAT} version {VERSION}"
                ],
            )
        for name, kind in (("copies", list), ("narrow", dict), ("parameters", dict)):
            if not isinstance(fields[name], kind):
                raise TypeError(f"{name} is a {type(fields[name]).__name__}, expected a {kind.__name__}")
        manifest = Manifest(fields["weights"], fields["config_sha256"], tuple(fields["copies"]), fields["narrow"])
        table = fields["parameters"]
        expected = abstract_parameters(config, weights=manifest.weights)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(folder, [f"{MANIFEST_NAME} is damaged ({type(error).__name__}: {error})"]) from None
    if config_hash(folder) != manifest.config_sha256:
        raise CheckpointError(
            folder, ["config.json is not the one that was converted with these parameters; convert again"]
        )
    written = {path: {"shape": list(info.shape), "dtype": info.dtype.name} for path, info in expected.items()}
    if table != written:
        differing = sorted(path for path in {*table, *written} if table.get(path) != written.get(path))
        raise CheckpointError(
            folder,
            [f"{path}: {table.get(path, 'missing')}, expected {written.get(path, 'nothing')}" for path in differing],
        )
    return manifest


class OrbaxTensors(Mapping[str, "StoredTensor"]):
    """Parameters of ``folder/params`` under Hugging Face's names, as tensors that are read when sliced."""

    def __init__(self, folder: Path, config: ModelConfig, manifest: Manifest):
        self.folder = folder
        self._names = TensorNames(config, abstract_parameters(config, weights=manifest.weights))
        self._places = self._names.places()
        self._stores: dict[str, object] = {}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of each tensor."""
        infos = self._names.parameters
        return {
            name: TensorSpec(infos[path].dtype, piece.shape(infos[path].shape))
            for name, (path, piece) in self._places.items()
        }

    @property
    def parameters(self) -> Mapping[str, ParameterInfo]:
        """The stored parameters, by their paths."""
        return self._names.parameters

    def __getitem__(self, name: str) -> StoredTensor:
        path, piece = self._places[name]
        return StoredTensor(self, path, piece, self._names.parameters[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Read ``parameter[index]`` from disk; only the chunks that contain it are read."""
        import tensorstore

        try:
            if path not in self._stores:
                base = f"file://{(self.folder / PARAMS_NAME).resolve()}/"
                kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
                self._stores[path] = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
            return self._stores[path][index].read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(self.folder, [f"{path}: cannot be read: {error}"]) from error


@dataclass(frozen=True)
class StoredTensor:
    """One Hugging Face tensor inside a stored parameter; slicing it reads it."""

    source: OrbaxTensors
    path: str
    piece: TensorPiece
    info: ParameterInfo

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in Hugging Face's orientation."""
        return self.piece.shape(self.info.shape)

    def __getitem__(self, index: tuple[slice, ...] | slice) -> np.ndarray:
        parts = iter((index if isinstance(index, tuple) else (index,))[:: -1 if self.piece.transposed else 1])
        place = tuple(next(parts) if isinstance(i, slice) else i for i in self.piece.index)
        values = self.source.read(self.path, place)
        return values.T if self.piece.transposed else values
