"""FP4 matrices of a checkpoint under one set of names, and whatever else a model in FP4 wants made of what is there.

A matrix is stored by one of four conventions (docs/fp4.md), or in bf16, FP8 or another FP4 format; a model wants it in one.
``as_wanted`` gives tensors that are what the model wants: bytes as they are stored where the format is the same, else
tensors that decode or encode when they are sliced. Names are ModelOpt's: ``X.weight``, ``X.weight_scale`` and, in NVFP4,
``X.weight_scale_2``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.names import PACKED_GLOBAL_SUFFIX, PACKED_SCALE_SUFFIX, SCALE_SUFFIX, TensorNames
from dsjax.checkpoint.quantise import FP8, read_scale
from dsjax.checkpoint.quantise import dequantise as dequantise_fp8
from dsjax.checkpoint.safetensors import Tensor, TensorSpec
from dsjax.fp4 import host
from dsjax.fp4.formats import MXFP4, NVFP4, UNQUANTISED, FP4Format

_PACKED = ("uint8", "int8")
_E8M0 = ("uint8", "float8_e8m0fnu")
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".weight_shape")
# A part of a matrix: what ModelOpt and Quark call it, what compressed-tensors does, and DeepSeek-V4 in transformers.
_PACKED_SUFFIX, _CT_GLOBAL_SUFFIX = "_packed", "_global_scale"


class Found(NamedTuple):
    """Tensors of a checkpoint by name, and what was found wrong with them; fields as of ``Checkpoint``."""

    tensors: Mapping[str, Tensor]
    specs: Mapping[str, TensorSpec]
    problems: tuple[str, ...]
    unreadable: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Names:
    """Which tensors hold an FP4 matrix. whole_inverted: the tensor's scale is stored as its reciprocal."""

    values: str
    scale: str | None
    whole: str | None
    whole_inverted: bool

    @property
    def all(self) -> tuple[str, ...]:
        """Those that are there."""
        return tuple(name for name in (self.values, self.scale, self.whole) if name is not None)


def stored_format(specs: Mapping[str, TensorSpec]) -> str | None:
    """What ``--weights`` calls a checkpoint with FP4 matrices; None where it has none. Routed experts decide, if any of them is FP4."""
    matrices = _stored(specs)
    if not matrices:
        return None
    experts = [names for matrix, names in matrices.items() if ".experts." in matrix] or [*matrices.values()]
    form = _format(specs, experts[0])
    fp8 = any(spec.dtype == FP8 and name.endswith(".weight") for name, spec in specs.items())
    return form.name + ("" if fp8 else UNQUANTISED)


def as_wanted(names: TensorNames, found: Found) -> Found:
    """Tensors as the model of ``names`` wants them; ``found`` itself where neither has anything in FP4."""
    stored = _stored(found.specs)
    wanted = {
        name: path for name, (path, _) in names.places().items() if names.parameters[path].packed > 1 or name in stored
    }
    if not wanted and not stored:
        return found
    tensors, specs, problems = _Tensors(found.tensors), dict(found.specs), [*found.problems]
    for matrix in stored.values():
        for name in matrix.all:
            specs.pop(name, None)
    specs = {name: spec for name, spec in specs.items() if not name.endswith(_OF_ACTIVATIONS)}
    for matrix, path in wanted.items():
        info, kept = names.parameters[path], stored.get(matrix)
        source = None
        if kept is not None:
            problem = _problem(found.specs, kept)
            if problem and not set(kept.all) & found.unreadable:
                problems.append(problem)
            if problem:
                specs[matrix] = TensorSpec(np.dtype(np.float32), _matrix_shape(found.specs, kept))
                continue
            source = _Decoded.of(found, kept)
        if info.packed == 1:
            tensors.made[matrix] = source
            specs[matrix] = TensorSpec(np.dtype(np.float32), source.shape)
            continue
        form = NVFP4 if info_has_global(names, path) else MXFP4
        if source is None:
            if matrix not in found.specs or found.specs[matrix].dtype.name in _PACKED:
                continue  # the check of structure says what is missing
            scale = matrix + SCALE_SUFFIX if found.specs[matrix].dtype == FP8 else None
            if scale is not None and scale not in found.specs:
                continue
            source = _Widened(matrix, found.tensors[matrix], found.tensors[scale] if scale is not None else None)
            specs.pop(scale, None)
        if source.shape[-1] % form.block:
            specs[matrix] = TensorSpec(np.dtype(np.uint8), source.shape)
            problems.append(
                f"{matrix}: shape {list(source.shape)}, and {form.name} keeps blocks of {form.block} along the last dimension, which does "
                "not divide it; choose other --weights"
            )
            continue
        parts = source.parts() if isinstance(source, _Decoded) and source.form == form else _encoded(source, form)
        for suffix, tensor in parts.items():
            tensors.made[matrix + suffix] = tensor
            specs[matrix + suffix] = TensorSpec(np.dtype(tensor.dtype), tuple(tensor.shape))
    return found._replace(tensors=tensors, specs=specs, problems=tuple(problems))


def info_has_global(names: TensorNames, path: str) -> bool:
    """Whether a packed parameter has a scale of the whole tensor beside it."""
    return path.removesuffix("weight") + "global_scale" in names.parameters


class _Tensors(Mapping):
    """The checkpoint's tensors, those in ``made`` in their place."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors, self.made = tensors, {}

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name] if name in self.made else self._tensors[name]

    def __iter__(self):
        return iter({**self._tensors, **self.made})

    def __len__(self) -> int:
        return len({*self._tensors, *self.made})


def _stored(specs: Mapping[str, TensorSpec]) -> dict[str, _Names]:
    """The FP4 matrices of a checkpoint, by the name of the matrix."""
    found = {}
    for name, spec in specs.items():
        matrix = name.removesuffix(_PACKED_SUFFIX)
        if not matrix.endswith(".weight") or spec.dtype.name not in _PACKED or len(spec.shape) != 2:
            continue
        scale = next((matrix + end for end in (PACKED_SCALE_SUFFIX, SCALE_SUFFIX) if matrix + end in specs), None)
        ends = ((PACKED_GLOBAL_SUFFIX, False), (_CT_GLOBAL_SUFFIX, True))
        whole, inverted = next(((matrix + end, way) for end, way in ends if matrix + end in specs), (None, False))
        if scale is not None or whole is not None or name != matrix:
            found[matrix] = _Names(name, scale, whole, inverted)
    return found


def _format(specs: Mapping[str, TensorSpec], names: _Names) -> FP4Format:
    return NVFP4 if names.scale is not None and specs[names.scale].dtype == FP8 else MXFP4


def _matrix_shape(specs: Mapping[str, TensorSpec], names: _Names) -> tuple[int, int]:
    rows, half = specs[names.values].shape
    return rows, 2 * half


def _problem(specs: Mapping[str, TensorSpec], names: _Names) -> str | None:
    """What is wrong with the scales of an FP4 matrix."""
    if names.scale is None:
        return f"{names.values}: FP4 without scales; expected {names.values.removesuffix(_PACKED_SUFFIX)}{PACKED_SCALE_SUFFIX}"
    form, scale = _format(specs, names), specs[names.scale]
    if form is MXFP4 and scale.dtype.name not in _E8M0:
        return f"{names.scale}: dtype {scale.dtype.name}, expected float8_e4m3fn (NVFP4) or one of {', '.join(_E8M0)} (MXFP4)"
    rows, columns = _matrix_shape(specs, names)
    if scale.shape != (rows, columns // form.block):
        return f"{names.scale}: shape {list(scale.shape)}, expected {[rows, columns // form.block]}, one scale per {form.block} values"
    if form.has_global and names.whole is None:
        matrix = names.values.removesuffix(_PACKED_SUFFIX)
        return f"{names.values}: NVFP4 without the scale of the tensor; expected {matrix}{PACKED_GLOBAL_SUFFIX}"
    if form.has_global and (specs[names.whole].dtype != np.float32 or math.prod(specs[names.whole].shape) != 1):
        return f"{names.whole}: {specs[names.whole]}, expected one float32"
    return None


@dataclasses.dataclass(frozen=True)
class _Widened:
    """A matrix in floating point, or in FP8 with block scales, as float32."""

    name: str
    tensor: Tensor
    scale: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        values = np.asarray(self.tensor[index])
        if self.scale is None:
            return values.astype(np.float32)
        rows, columns = (part.indices(size) for part, size in zip(index, self.shape, strict=True))
        scale, problem = read_scale(self.tensor, self.scale)
        if problem:
            raise CheckpointError(self.name + SCALE_SUFFIX, [problem])
        return dequantise_fp8(values, scale, rows[0], columns[0])


@dataclasses.dataclass(frozen=True)
class _Decoded:
    """A matrix that is stored in FP4, as float32."""

    form: FP4Format
    values: Tensor
    scale: Tensor
    whole: np.float32 | _Whole
    dtype = np.dtype(np.float32)

    @classmethod
    def of(cls, found: Found, names: _Names) -> _Decoded:
        """The matrix of these tensors."""
        form = _format(found.specs, names)
        values, whole = _Bytes(found.tensors[names.values]), np.float32(1)
        if form.has_global:
            whole = _Whole(names.whole, found.tensors[names.whole], names.whole_inverted, values)
        return cls(form, values, _scale_of(form, found.tensors[names.scale]), whole)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], 2 * self.values.shape[1]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        start, stop, _ = columns.indices(self.shape[1])
        block = self.form.block
        first, last = start // block, -(-stop // block)
        packed = self.values[rows, slice(first * block // 2, last * block // 2)]
        scale = np.asarray(self.scale[rows, slice(first, last)])
        whole = self.whole if isinstance(self.whole, np.float32) else self.whole[(slice(0, 1),)][0]
        return host.decode(packed, self.form, scale, whole)[:, start - first * block : stop - first * block]

    def parts(self) -> dict[str, Tensor]:
        """The tensors as they are stored, by suffix."""
        parts = {"": self.values, PACKED_SCALE_SUFFIX: self.scale}
        return parts | ({PACKED_GLOBAL_SUFFIX: self.whole} if self.form.has_global else {})


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """A tensor of one-byte elements, as unsigned bytes."""

    tensor: Tensor
    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(self.tensor[index]).view(np.uint8)


def _scale_of(form: FP4Format, tensor: Tensor) -> Tensor:
    return tensor if form.has_global else _Bytes(tensor)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """NVFP4's scale of a tensor, ``[1]``, as what values are multiplied by. packed: the values."""

    name: str
    tensor: Tensor
    inverted: bool
    packed: _Bytes
    shape = (1,)
    dtype = np.dtype(np.float32)

    def __getitem__(self, index: tuple[slice]) -> np.ndarray:
        stored = self.tensor[tuple(slice(None) for _ in self.tensor.shape)] if self.tensor.shape else self.tensor[()]
        value = np.asarray(stored, np.float32).reshape(1)
        if value == 0 and (self.packed[:, :] & 0x77).any():  # -0 is zero
            raise CheckpointError(self.name, ["a scale of zero, and the weights of the tensor are not zero"])
        with np.errstate(divide="ignore"):
            return (np.float32(1) / value if self.inverted else value)[index]


def _encoded(source: _Widened | _Decoded, form: FP4Format) -> dict[str, Tensor]:
    encoder = _Encoder(source, form)
    parts = {"": _EncodedValues(encoder), PACKED_SCALE_SUFFIX: _EncodedScales(encoder)}
    return parts | ({PACKED_GLOBAL_SUFFIX: _EncodedWhole(encoder)} if form.has_global else {})


class _Encoder:
    """A matrix that becomes FP4 when its parts are sliced."""

    def __init__(self, source: _Widened | _Decoded, form: FP4Format):
        self.source, self.form = source, form

    @cached_property
    def whole(self) -> np.float32:
        """The scale of the tensor, for which all of it is read once; 1 in a format that has none."""
        return host.global_scale(self.source[:, :]) if self.form.has_global else np.float32(1)

    def strip(self, rows: slice, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [first, last) of some rows, and their scales."""
        values = self.source[rows, slice(first * self.form.block, last * self.form.block)]
        return values, host.block_scales(values, self.form, self.whole)


@dataclasses.dataclass(frozen=True)
class _EncodedValues:
    encoder: _Encoder
    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.encoder.source.shape
        return rows, columns // 2

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = index[1].indices(self.shape[1])
        half = self.encoder.form.block // 2
        first, last = start // half, -(-stop // half)
        values, scales = self.encoder.strip(index[0], first, last)
        packed = host.encode(values, self.encoder.form, scales, self.encoder.whole)
        return packed[:, start - first * half : stop - first * half]


@dataclasses.dataclass(frozen=True)
class _EncodedScales:
    encoder: _Encoder

    @property
    def dtype(self) -> np.dtype:
        return FP8 if self.encoder.form.has_global else np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.encoder.source.shape
        return rows, columns // self.encoder.form.block

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = index[1].indices(self.shape[1])
        return self.encoder.strip(index[0], start, stop)[1]


@dataclasses.dataclass(frozen=True)
class _EncodedWhole:
    encoder: _Encoder
    shape = (1,)
    dtype = np.dtype(np.float32)

    def __getitem__(self, index: tuple[slice]) -> np.ndarray:
        return np.array([self.encoder.whole], np.float32)[index]
