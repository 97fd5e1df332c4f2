"""Check from the headers alone that a checkpoint holds the tensors a model needs, before anything is loaded."""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping

import numpy as np

from dsjax.checkpoint.errors import CheckpointError, CheckpointWarning
from dsjax.checkpoint.names import EMBEDDING, HEAD, SCALE_SUFFIX, TensorNames, mtp_layers
from dsjax.checkpoint.quantise import FP8
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.config import ModelConfig
from dsjax.model.parameters import blocks

_FLOATS = ("float32", "bfloat16", "float16")
_SCALES = ("float32", "float8_e8m0fnu")
_INTEGERS = ("int64", "int32")
_MTP_TENSORS = {"eh_proj.weight", "e_proj.weight"}
"""Tensors that only an MTP module has; the second is DeepSeek-V4's."""
_MAX_LISTED = 20


def check_structure(
    source: object,
    names: TensorNames,
    specs: Mapping[str, TensorSpec],
    *,
    problems: Iterable[str] = (),
    unreadable: Iterable[str] = (),
) -> None:
    """Compare the checkpoint's names, shapes and dtypes with the model's; warn of harmless extra tensors.

    Args:
        source: the checkpoint's name in messages.
        names: the tensors that the model needs.
        specs: shapes and dtypes from the checkpoint's headers.
        problems: problems found on opening, listed in the same error.
        unreadable: tensors in damaged files, which are not reported as missing too.

    Raises:
        CheckpointError: listing every problem.
    """
    places = {name: place for name, place in names.places().items() if not name.endswith(SCALE_SUFFIX)}
    expected = {name: piece.shape(names.parameters[path].shape) for name, (path, piece) in places.items()}
    copies = names.copies()
    unreadable = set(unreadable)
    scales = set()
    problems = [*problems]
    for name, shape in expected.items():
        if name in specs:
            path, piece = places[name]
            info = names.parameters[path]
            is_matrix = piece.transposed or info.depth_last
            problems += _mismatches(name, shape, specs[name], is_matrix, info.dtype)
            if specs[name].dtype == FP8 and is_matrix and name.endswith(".weight"):
                scales.add(name + SCALE_SUFFIX)
                problems += _scale_mismatches(name, specs, unreadable)
        elif name not in unreadable:
            problems.append(f"{name}: missing, expected shape {list(shape)}")
    for name, original in copies.items():
        if name in specs and original in expected and specs[name].shape != expected[original]:
            problems.append(
                f"{name}: shape {list(specs[name].shape)}, expected {original}'s, {list(expected[original])}"
            )
    extras = [
        name
        for name in specs
        if name not in expected and name not in copies and name not in scales and not names.is_computed(name)
    ]
    problems += _contradictions(names, [*specs, *unreadable], extras)
    if problems:
        raise CheckpointError(
            source, problems, "Check that config.json and the safetensors belong together and are complete."
        )
    _warn_of_extras(source, [name for name in extras if not names.belongs_to_mtp(name)])


def check_copies(source: object, names: TensorNames, tensors: Mapping[str, np.ndarray]) -> None:
    """Warn if a copy (an MTP module's own embedding or head) differs from its original. The model does not use the copy.

    Raises:
        CheckpointError: the configuration ties the head to the embedding, but they differ; see ``settle_head``.
    """
    for name, original in names.copies().items():
        if name in tensors and original in tensors and not _equal(tensors[name], tensors[original]):
            if name == HEAD:
                raise CheckpointError(source, [f"{HEAD}: differs from {EMBEDDING}, expected tie_word_embeddings=false"])
            message = f"checkpoint {source}: {name} differs from {original}; the model uses {original} for both"
            warnings.warn(message, CheckpointWarning, stacklevel=3)


def settle_mtp(source: object, config: ModelConfig, present: Iterable[str]) -> ModelConfig:
    """Return the configuration without MTP modules, with a warning, if the checkpoint has no MTP tensors.

    transformers saves ``num_nextn_predict_layers: 1`` but drops the module itself.
    """
    if not config.num_nextn_predict_layers:
        return config
    for name in present:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match.group(1)) >= config.num_hidden_layers:
            return config
    message = (
        f"checkpoint {source}: config.json has num_nextn_predict_layers={config.num_nextn_predict_layers}, but there is no "
        f"tensor of layer {config.num_hidden_layers}; going on without multi-token prediction"
    )
    warnings.warn(message, CheckpointWarning, stacklevel=3)
    return dataclasses.replace(config, num_nextn_predict_layers=0)


def settle_head(source: object, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> ModelConfig:
    """Return the configuration with an untied LM head, with a warning, if the checkpoint's head differs from the embedding.

    transformers does not tie them in this case either. Reads both matrices, but only if the configuration ties them.
    """
    if not config.tie_word_embeddings or HEAD not in tensors or EMBEDDING not in tensors:
        return config
    if tensors[HEAD].shape != tensors[EMBEDDING].shape or _equal(tensors[HEAD], tensors[EMBEDDING]):
        return config
    message = f"checkpoint {source}: config.json ties {HEAD} to {EMBEDDING}, but they differ; both are used"
    warnings.warn(message, CheckpointWarning, stacklevel=3)
    return dataclasses.replace(config, tie_word_embeddings=False)


def _mismatches(name: str, shape: tuple[int, ...], spec: TensorSpec, is_matrix: bool, dtype: np.dtype) -> list[str]:
    """Return shape and dtype problems of one tensor. dtype: the parameter's dtype; the bytes of a packed format must match it."""
    problems = []
    if spec.shape != shape:
        problems.append(f"{name}: shape {list(spec.shape)}, expected {list(shape)}")
    allowed = (*_FLOATS, FP8.name) if is_matrix else _FLOATS
    if dtype == np.uint8:
        allowed = (dtype.name,)
    if dtype == np.int32:
        allowed = _INTEGERS
    if spec.dtype.name not in allowed:
        problems.append(f"{name}: dtype {spec.dtype.name}, expected one of {', '.join(allowed)}")
    return problems


def _scale_mismatches(name: str, specs: Mapping[str, TensorSpec], unreadable: set[str]) -> list[str]:
    """Return the problems with an FP8 weight's block scales."""
    scale = name + SCALE_SUFFIX
    shape = tuple(blocks(size) for size in specs[name].shape)
    if scale in unreadable:
        return []
    if scale not in specs:
        return [f"{scale}: missing, and {name} is FP8; expected float32{list(shape)}, one scale per 128 × 128 block"]
    if specs[scale].shape != shape:
        return [f"{scale}: shape {list(specs[scale].shape)}, expected {list(shape)}, one per 128 × 128 block"]
    if specs[scale].dtype.name not in _SCALES:
        return [f"{scale}: dtype {specs[scale].dtype.name}, expected {' or '.join(_SCALES)}"]
    return []


def _contradictions(names: TensorNames, present: list[str], extras: list[str]) -> list[str]:
    """Return problems where extra tensors contradict the configuration: more experts, or more or fewer layers."""
    config = names.config
    problems = []
    experts = [int(match.group(1)) for name in extras if (match := re.search(r"\.mlp\.experts\.(\d+)\.", name))]
    if experts and max(experts) >= config.n_routed_experts:
        problems.append(
            f"config.json has n_routed_experts={config.n_routed_experts}, but there are tensors of expert {max(experts)}"
        )
    layers = {}
    last = config.num_hidden_layers
    copies = names.copies()
    for name in present:
        if (match := re.match(r"model\.layers\.(\d+)\.(.+)", name)) and name not in copies:
            layers.setdefault(int(match.group(1)), set()).add(match.group(2))
    modules = {layer for layer, parts in layers.items() if parts & _MTP_TENSORS}
    if ordinary := {layer for layer in layers if layer >= last} - modules:
        problems.append(
            f"config.json has num_hidden_layers={last}, but there are tensors of layer {max(ordinary)}, "
            "which is no multi-token prediction module (it has no eh_proj or e_proj)"
        )
    if modules and min(modules) < last:
        problems.append(
            f"config.json has num_hidden_layers={last}, but layer {min(modules)} is a multi-token prediction "
            f"module (it has an eh_proj or e_proj), which follows the last layer; the model has {min(modules)}"
        )
    if config.num_nextn_predict_layers and modules and max(modules) >= mtp_layers(config).stop:
        problems.append(
            f"config.json has num_hidden_layers={last} and num_nextn_predict_layers={config.num_nextn_predict_layers}, but layer "
            f"{max(modules)} is a multi-token prediction module too"
        )
    return problems


def _warn_of_extras(source: object, extras: list[str]) -> None:
    if extras:
        listed = ", ".join(sorted(extras)[:_MAX_LISTED])
        more = f" and {len(extras) - _MAX_LISTED} more" if len(extras) > _MAX_LISTED else ""
        message = (
            f"checkpoint {source}: {len(extras)} tensors are not part of the model and are ignored: {listed}{more}"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=4)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two matrices are bitwise equal, compared in bands of rows."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = f"u{one.dtype.itemsize}"
    band = max((32 << 20) // max(one.shape[1] * one.dtype.itemsize, 1), 1)
    for row in range(0, one.shape[0], band):
        rows = slice(row, row + band)
        first, second = (np.ascontiguousarray(matrix[rows, :]).view(bits) for matrix in (one, other))
        if not np.array_equal(first, second):
            return False
    return True
