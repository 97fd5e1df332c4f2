"""Write checkpoints: convert between forms and weight formats, or save in-memory parameters."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from dsjax.checkpoint.assemble import Assembler
from dsjax.checkpoint.check import check_copies, check_structure
from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.load import to_hf_tensors
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.orbax_form import MANIFEST_NAME, Manifest, config_hash, write_manifest, write_params
from dsjax.checkpoint.place import Advance, aligned_empty
from dsjax.checkpoint.publish import publish
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import INDEX_NAME, write_folder
from dsjax.checkpoint.source import Checkpoint, open_checkpoint, tensors_to_write
from dsjax.config import ModelConfig
from dsjax.config.hugging_face import text_part, without_aliases
from dsjax.config.quantization import QUANTIZATION_FILES, quantization_files
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.model.parameter_table import abstract_parameters
from dsjax.model.parameters import Weights
from dsjax.progress import report_bytes

Form = Literal["orbax", "hf"]
MAX_SHARD_BYTES = 5 * 10**9
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md", "")
_ADAPTED_FIELDS = ("num_nextn_predict_layers", "tie_word_embeddings")
"""Fields of `config.json` whose values come from the opened checkpoint, which adapts them to its tensors."""
_NOT_COPIED = ("config.json", INDEX_NAME, MANIFEST_NAME, *QUANTIZATION_FILES)


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    to: Form,
    weights: Weights | Literal["auto"] = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Convert the checkpoint in ``source`` and write it atomically to ``destination``; return the destination.

    Args:
        source: an Orbax or Hugging Face directory.
        destination: must not exist, unless ``overwrite``.
        to: ``orbax`` (holds one copy of the parameters in memory), or ``hf`` (one tensor at a time).
        weights: format of the matrices; ``auto``: the source's format, which keeps every tensor bit-identical.
        max_shard_bytes: maximum size of a Hugging Face shard.

    Raises:
        CheckpointError: the source cannot be used, a value is not finite, or the destination exists.
    """
    checkpoint = open_checkpoint(source)
    fields = json.loads((checkpoint.directory / "config.json").read_text(encoding="utf-8"))
    fields = without_aliases(text_part(fields))
    fields |= {name: getattr(checkpoint.config, name) for name in _ADAPTED_FIELDS if fields.get(name)}
    return _write(
        checkpoint,
        Path(destination),
        to,
        checkpoint.stored_weights if weights == "auto" else weights,
        fields,
        _companions(checkpoint.directory),
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        progress=progress,
    )


def save(
    config: ModelConfig,
    params: Mapping[str, np.ndarray | jax.Array],
    destination: str | Path,
    *,
    to: Form = "orbax",
    companions: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write in-memory parameters atomically as a checkpoint; return the destination.

    Args:
        config: the model's configuration; becomes ``config.json``.
        params: ``{path: array}`` as from ``load`` or ``from_hf_tensors``, in storage or true dtypes, with
            one copy of each expert. Sharded arrays must be addressable from this process.
        destination, to, max_shard_bytes, overwrite: as for ``convert_checkpoint``.
        companions: other files and folders to copy: tokenizer, chat template, licence.

    Raises:
        CheckpointError: the parameters do not match the configuration or are not finite, or the destination exists.
    """
    tensors = to_hf_tensors(config, params)
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    checkpoint = Checkpoint(Path("in memory"), "memory", config, tensors, specs)
    return _write(
        checkpoint,
        Path(destination),
        to,
        checkpoint.stored_weights,
        config.to_dict(),
        companions,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def _write(
    checkpoint: Checkpoint,
    destination: Path,
    to: Form,
    weights: Weights,
    config_fields: dict,
    companions: Iterable[Path],
    *,
    max_shard_bytes: int,
    overwrite: bool,
    progress: bool = False,
) -> Path:
    # `platform` is not "cpu": files hold true dtypes, not the storage dtypes of XLA's CPU backend.
    names = TensorNames(checkpoint.config, abstract_parameters(checkpoint.config, weights=weights, platform="any"))
    is_requantised = weights != checkpoint.stored_weights
    checkpoint = checkpoint.in_format_of(names)
    check_structure(
        checkpoint.directory,
        names,
        checkpoint.specs,
        problems=checkpoint.problems,
        unreadable=checkpoint.unreadable,
    )
    check_copies(checkpoint.directory, names, checkpoint.tensors)
    assembler = Assembler(names, checkpoint.tensors)
    copies = tuple(name for name in names.copies() if name in checkpoint.specs or name in checkpoint.copies)
    source_dtypes = {} if is_requantised else _narrower_dtypes(checkpoint, names)
    total = sum(info.nbytes for info in names.parameters.values())
    with (
        publish(destination, overwrite=overwrite) as folder,
        report_bytes(f"Converting to {to}", total, progress) as advance,
    ):
        if to == "orbax":
            write_params(folder, names.parameters, _assemble_all(checkpoint, assembler, advance))
        else:
            specs, fetch = _hf_tensors(checkpoint, assembler, copies, source_dtypes, advance)
            write_folder(folder, specs, fetch, max_shard_bytes)
        if assembler.problems:
            raise CheckpointError(
                checkpoint.directory, assembler.problems, "The values are damaged; nothing was written."
            )
        for companion in companions:
            copy = shutil.copytree if companion.is_dir() else shutil.copyfile
            copy(companion, folder / companion.name)
        # Write last the files that make the directory loadable.
        config = _build_config(config_fields, weights, is_requantised=is_requantised)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, fields in quantization_files(config.get("quantization_config") or {}).items():
            (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if to == "orbax":
            write_manifest(folder, Manifest(weights, config_hash(folder), copies, source_dtypes), names.parameters)
    return destination


def _assemble_all(checkpoint: Checkpoint, assembler: Assembler, advance: Advance) -> dict[str, np.ndarray]:
    """Assemble every parameter, unsharded, in host memory."""
    values = {}
    for path, info in assembler.names.parameters.items():
        values[path] = aligned_empty(info.shape, info.dtype)
        assembler.fill(values[path], path, tuple(slice(0, size) for size in info.shape))
        checkpoint.release()
        advance(info.nbytes)
    return values


def _hf_tensors(
    checkpoint: Checkpoint,
    assembler: Assembler,
    copies: Sequence[str],
    source_dtypes: Mapping[str, str],
    advance: Advance,
) -> tuple[dict[str, TensorSpec], Callable[[str], np.ndarray]]:
    """Return the specs of all tensors to write, in layer order, and a function that makes a tensor by name."""
    names = assembler.names
    places = names.places()
    specs, recipes = {}, {}
    for name, (path, piece) in sorted(places.items(), key=lambda item: _layer_order(item[0])):
        info = names.parameters[path]
        spec = TensorSpec(np.dtype(source_dtypes.get(path, info.dtype)), piece.shape(info.shape))
        for tensor_name, (tensor_spec, make) in tensors_to_write(names, path, name, spec).items():
            specs[tensor_name] = tensor_spec
            recipes[tensor_name] = (path, piece, make)
    specs.update({copy: specs[names.copies()[copy]] for copy in copies})

    def fetch(name: str) -> np.ndarray:
        path, piece, make = recipes[names.copies().get(name, name)]
        value = make(lambda: assembler.tensor(path, piece)).astype(specs[name].dtype, copy=False)
        checkpoint.release()
        advance(value.nbytes)
        return value

    return specs, fetch


def _narrower_dtypes(checkpoint: Checkpoint, names: TensorNames) -> dict[str, str]:
    """Return path → source dtype for parameters whose source tensors share one dtype that is narrower than the parameter's."""
    dtypes: dict[str, set[np.dtype]] = {}
    for name, (path, _) in names.places().items():
        if name in checkpoint.specs:
            dtypes.setdefault(path, set()).add(checkpoint.specs[name].dtype)
    narrower = dict(checkpoint.narrow)
    for path, source_dtypes in dtypes.items():
        first, *others = source_dtypes
        if not others and first.itemsize < names.parameters[path].dtype.itemsize:
            narrower.setdefault(path, first.name)
    return narrower


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _companions(directory: Path) -> list[Path]:
    """Return the files besides the weights: tokenizer, chat template, prompt encoder, generation settings, licence."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.name == "encoding" or (path.is_file() and _is_companion(path.name, path.suffix))
    ]


def _is_companion(name: str, suffix: str) -> bool:
    return suffix in _COPIED_SUFFIXES and name not in _NOT_COPIED and not name.startswith(".")


def _build_config(fields: Mapping, weights: Weights, *, is_requantised: bool) -> dict:
    """Return ``config.json`` for these weights, with the quantisation and dtype of the written files."""
    fields = dict(fields)
    quantization = WEIGHT_FORMATS[weights].quantization_config(fields.get("first_k_dense_replace") or 0)
    if quantization is None:
        fields.pop("quantization_config", None)
    elif is_requantised or fields.get("quantization_config") is None:
        fields["quantization_config"] = quantization
    if is_requantised:
        fields["dtype" if "dtype" in fields else "torch_dtype"] = "float32" if weights == "f32" else "bfloat16"
    return fields
