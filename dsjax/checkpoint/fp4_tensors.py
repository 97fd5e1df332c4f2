"""Convert a checkpoint's packed (4-bit) matrices to one set of names and to the format that the model keeps.

A checkpoint stores a matrix ``X.weight``, ``[out, in]``, by one of six packed conventions, or in bf16 or FP8; the model wants one format.
Values are ``U8 [out, in / 2]``, elements of even index in the lower four bits of a byte; scales are ``[out, in / block]``:

- ModelOpt, NVFP4: ``X.weight``, ``X.weight_scale`` (F8_E4M3), global scale in ``X.weight_scale_2``
- compressed-tensors, NVFP4: ``X.weight_packed``, ``X.weight_scale`` (F8_E4M3), 1 ÷ the global scale in ``X.weight_global_scale``
- Quark, MXFP4: ``X.weight``, ``X.weight_scale`` (U8)
- compressed-tensors, MXFP4: ``X.weight_packed``, ``X.weight_scale`` (U8)
- DeepSeek-V4 in transformers, MXFP4: ``X.weight`` (I8), ``X.weight_scale_inv`` (F8_E8M0)
- compressed-tensors, INT4: ``X.weight_packed`` (I32 ``[out, in / 8]``) beside ``X.weight_shape``, ``X.weight_scale`` (BF16)

``as_wanted`` returns tensors in the model's format: the stored bytes if the formats match, else tensors that decode or encode
when sliced. Names are ModelOpt's: ``X.weight``, ``X.weight_scale`` and, in NVFP4, ``X.weight_scale_2``. ``as_written`` returns
INT4 with the names and 32-bit words of compressed-tensors, the only convention that has INT4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.names import PACKED_GLOBAL_SUFFIX, PACKED_SCALE_SUFFIX, SCALE_SUFFIX, TensorNames
from dsjax.checkpoint.quantise import FP8, read_scale
from dsjax.checkpoint.quantise import dequantise as dequantise_fp8
from dsjax.checkpoint.safetensors import Tensor, TensorSpec
from dsjax.fp4 import host
from dsjax.fp4.formats import INT4, MXFP4, NVFP4, UNQUANTISED, PackedFormat, with_scales_of

_PACKED = ("uint8", "int8")
_WORD = np.dtype(np.int32)
"""A word of packed INT4: eight values, the first in the lowest bits. Its bytes are laid out as in the other formats."""
_E8M0 = ("uint8", "float8_e8m0fnu")
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
# Suffixes of compressed-tensors.
_PACKED_SUFFIX, _CT_GLOBAL_SUFFIX, _SHAPE_SUFFIX = "_packed", "_global_scale", "_shape"


class Found(NamedTuple):
    """A checkpoint's tensors by name, and their problems; the fields have the meaning of ``Checkpoint``'s."""

    tensors: Mapping[str, Tensor]
    specs: Mapping[str, TensorSpec]
    problems: tuple[str, ...]
    unreadable: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of the tensors that hold a packed matrix."""

    values: str
    scale: str | None
    whole: str | None  # its global scale
    whole_inverted: bool  # stored as the reciprocal

    @property
    def all(self) -> tuple[str, ...]:
        """Names that are not None."""
        return tuple(name for name in (self.values, self.scale, self.whole) if name is not None)


def stored_format(specs: Mapping[str, TensorSpec]) -> str | None:
    """Return the ``--weights`` value for a checkpoint with packed matrices, judged by its routed experts if packed; None without any."""
    matrices = _stored(specs)
    if not matrices:
        return None
    experts = [names for matrix, names in matrices.items() if ".experts." in matrix] or [*matrices.values()]
    form = _format(specs, experts[0])
    fp8 = any(spec.dtype == FP8 and name.endswith(".weight") for name, spec in specs.items())
    return form.name + ("" if fp8 else UNQUANTISED)


def as_wanted(names: TensorNames, found: Found) -> Found:
    """Return the tensors in the format of ``names``'s model; ``found`` itself if neither has packed matrices."""
    stored = _stored(found.specs)
    wanted = {
        name: path for name, (path, _) in names.places().items() if names.parameters[path].packed > 1 or name in stored
    }
    if not wanted and not stored:
        return found
    tensors = _Tensors(found.tensors)
    specs = dict(found.specs)
    problems = [*found.problems]
    for matrix in stored.values():
        for name in matrix.all:
            specs.pop(name, None)
    specs = {
        name: spec for name, spec in specs.items() if not name.endswith((*_OF_ACTIVATIONS, f".weight{_SHAPE_SUFFIX}"))
    }
    for matrix, path in wanted.items():
        info = names.parameters[path]
        kept = stored.get(matrix)
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
        form = with_scales_of(names.parameters[f"{path.removesuffix('weight')}scale"].dtype.name)
        if source is None:
            if matrix not in found.specs or found.specs[matrix].dtype.name in _PACKED:
                continue  # `check_structure` reports missing tensors
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


Make = Callable[[Callable[[], np.ndarray]], np.ndarray]
"""Makes a tensor from the array that its argument, a function, reads."""


def as_written(name: str, scales: np.dtype, values: TensorSpec) -> dict[str, tuple[TensorSpec, Make]]:
    """Return the tensors to write for a packed matrix called ``name``, except its scales.

    scales: dtype of its scales. values: shape and dtype of its bytes, ``[out, in / 2]``.
    """
    if not with_scales_of(scales.name).integers:
        return {name: (values, lambda read: read())}
    rows, half = values.shape
    shape = np.array([rows, 2 * half], np.int32)
    return {
        name + _PACKED_SUFFIX: (TensorSpec(_WORD, (rows, half // 4)), lambda read: read().view(_WORD)),
        name + _SHAPE_SUFFIX: (TensorSpec(shape.dtype, shape.shape), lambda read: shape),
    }


class _Tensors(Mapping):
    """The checkpoint's tensors; those in ``made`` replace them."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.made = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name] if name in self.made else self._tensors[name]

    def __iter__(self):
        return iter({**self._tensors, **self.made})

    def __len__(self) -> int:
        return len({*self._tensors, *self.made})


def _stored(specs: Mapping[str, TensorSpec]) -> dict[str, _Names]:
    """Return a checkpoint's packed matrices by the matrix's name."""
    found = {}
    for name, spec in specs.items():
        matrix = name.removesuffix(_PACKED_SUFFIX)
        dtypes = _PACKED if name == matrix else (*_PACKED, _WORD.name)
        if not matrix.endswith(".weight") or spec.dtype.name not in dtypes or len(spec.shape) != 2:
            continue
        scale = next((matrix + end for end in (PACKED_SCALE_SUFFIX, SCALE_SUFFIX) if matrix + end in specs), None)
        ends = ((PACKED_GLOBAL_SUFFIX, False), (_CT_GLOBAL_SUFFIX, True))
        whole, inverted = next(((matrix + end, way) for end, way in ends if matrix + end in specs), (None, False))
        if scale is not None or whole is not None or name != matrix:
            found[matrix] = _Names(name, scale, whole, inverted)
    return found


def _format(specs: Mapping[str, TensorSpec], names: _Names) -> PackedFormat:
    scale = None if names.scale is None else specs[names.scale].dtype.name
    if specs[names.values].dtype == _WORD or scale == INT4.scale_dtype:
        return INT4
    return NVFP4 if scale == NVFP4.scale_dtype else MXFP4


def _matrix_shape(specs: Mapping[str, TensorSpec], names: _Names) -> tuple[int, int]:
    rows, elements = specs[names.values].shape
    return rows, 2 * elements * specs[names.values].dtype.itemsize


def _problem(specs: Mapping[str, TensorSpec], names: _Names) -> str | None:
    """Return the first problem with a packed matrix's scales; None if they are valid."""
    if names.scale is None:
        return f"{names.values}: four bits without scales; expected {names.values.removesuffix(_PACKED_SUFFIX)}{PACKED_SCALE_SUFFIX}"
    form = _format(specs, names)
    scale = specs[names.scale]
    if form is MXFP4 and scale.dtype.name not in _E8M0:
        return f"{names.scale}: dtype {scale.dtype.name}, expected float8_e4m3fn (NVFP4) or one of {', '.join(_E8M0)} (MXFP4)"
    if form is INT4 and scale.dtype.name != form.scale_dtype:
        return f"{names.scale}: dtype {scale.dtype.name}, expected {form.scale_dtype} (INT4)"
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
    """A floating-point matrix, or an FP8 matrix with block scales, read as float32."""

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
    """A matrix stored in a packed format, read as float32."""

    form: PackedFormat
    values: Tensor
    scale: Tensor
    whole: np.float32 | _Whole
    dtype = np.dtype(np.float32)

    @classmethod
    def of(cls, found: Found, names: _Names) -> _Decoded:
        """Return the matrix stored in these tensors."""
        form = _format(found.specs, names)
        values = _Bytes(found.tensors[names.values])
        whole = np.float32(1)
        if form.has_global:
            whole = _Whole(names.whole, found.tensors[names.whole], names.whole_inverted, values)
        scale = found.tensors[names.scale]
        return cls(form, values, _Bytes(scale) if form is MXFP4 else scale, whole)

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
        """Return the stored tensors by suffix, undecoded."""
        parts = {"": self.values, PACKED_SCALE_SUFFIX: self.scale}
        return parts | ({PACKED_GLOBAL_SUFFIX: self.whole} if self.form.has_global else {})


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """A matrix of one-byte elements or four-byte words, read as uint8."""

    tensor: Tensor
    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns * self.tensor.dtype.itemsize

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        size = self.tensor.dtype.itemsize
        start, stop, _ = index[1].indices(self.shape[1])
        first = start // size
        elements = np.ascontiguousarray(self.tensor[index[0], slice(first, -(-stop // size))])
        return elements.view(np.uint8)[:, start - first * size : stop - first * size]


@dataclasses.dataclass(frozen=True)
class _Whole:
    """NVFP4's global scale, ``[1]``, as a multiplier even if stored inverted."""

    name: str
    tensor: Tensor
    inverted: bool
    packed: _Bytes  # the packed values
    shape = (1,)
    dtype = np.dtype(np.float32)

    def __getitem__(self, index: tuple[slice]) -> np.ndarray:
        stored = self.tensor[tuple(slice(None) for _ in self.tensor.shape)] if self.tensor.shape else self.tensor[()]
        value = np.asarray(stored, np.float32).reshape(1)
        if value == 0 and (self.packed[:, :] & 0x77).any():  # -0 is zero
            raise CheckpointError(self.name, ["a scale of zero, and the weights of the tensor are not zero"])
        with np.errstate(divide="ignore"):
            return (np.float32(1) / value if self.inverted else value)[index]


def _encoded(source: _Widened | _Decoded, form: PackedFormat) -> dict[str, Tensor]:
    encoder = _Encoder(source, form)
    parts = {"": _EncodedValues(encoder), PACKED_SCALE_SUFFIX: _EncodedScales(encoder)}
    return parts | ({PACKED_GLOBAL_SUFFIX: _EncodedWhole(encoder)} if form.has_global else {})


class _Encoder:
    """A matrix that is encoded when its packed values or scales are sliced."""

    def __init__(self, source: _Widened | _Decoded, form: PackedFormat):
        self.source, self.form = source, form

    @cached_property
    def whole(self) -> np.float32:
        """The global scale, which takes one read of the whole tensor; 1 if the format has none."""
        return host.global_scale(self.source[:, :]) if self.form.has_global else np.float32(1)

    def strip(self, rows: slice, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of blocks [first, last) of some rows, and the blocks' scales."""
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
        return np.dtype(self.encoder.form.scale_dtype)

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
