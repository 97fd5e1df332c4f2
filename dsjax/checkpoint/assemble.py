"""Assemble a region of a parameter from Hugging Face tensors: slice, check, convert and transpose strips of 128 rows.

Intermediate values, such as a dequantised float32 strip, stay in the CPU cache, so memory holds little besides the result.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np

from dsjax.checkpoint.names import PACKED_SCALE_SUFFIX, SCALE_SUFFIX, TensorNames, TensorPiece, scaled_weight
from dsjax.checkpoint.quantise import FP8, block_scales, dequantise, quantise, read_scale
from dsjax.checkpoint.safetensors import Tensor
from dsjax.model.parameters import BLOCK

# Bits that are all set in infinities and NaNs (e4m3 has no infinities, and one NaN per sign).
_EXPONENTS = {"bfloat16": (np.uint16, 0x7F80), "float8_e4m3fn": (np.uint8, 0x7F)}
# Bytes to fetch at a time from a tensor that is not in memory yet.
_FETCH_BYTES = 32 << 20
_COPIED_ROWS = 32


class Assembler:
    """Fills arrays with regions of parameters, and reports damaged values in ``problems``.

    Args:
        names: the tensors and the dtype of each parameter.
        tensors: the checkpoint, Hugging Face name → tensor; its structure must be checked (``check.check_structure``).
        executor: runs the pieces of a region in parallel; default: sequentially.
    """

    def __init__(self, names: TensorNames, tensors: Mapping[str, Tensor], executor: Executor | None = None):
        self.names = names
        self.tensors = tensors
        self._executor = executor
        self._found: dict[str, str] = {}
        self._bytes_read = 0
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far; a tensor read twice counts twice."""
        return self._bytes_read

    @property
    def problems(self) -> list[str]:
        """One line for each tensor with damaged values."""
        return [f"{name}: {problem}" for name, problem in sorted(self._found.items())]

    def fill(self, out: np.ndarray, path: str, region: Sequence[slice]) -> None:
        """Set ``out`` to ``parameter[region]``; ``out`` has the region's shape and the parameter's dtype or storage dtype."""
        info = self.names.parameters[path]
        region = [slice(*part.indices(size)[:2]) for part, size in zip(region, info.shape, strict=True)]
        values = out.view(info.dtype)
        pieces = self.names.pieces(path, region)
        if self._executor is None:
            for piece in pieces:
                self._fill_piece(values, path, piece, region)
        else:
            for _ in self._executor.map(lambda piece: self._fill_piece(values, path, piece, region), pieces):
                pass

    def tensor(self, path: str, piece: TensorPiece) -> np.ndarray:
        """Return one whole piece in Hugging Face's layout ``[out, in]``, in the parameter's dtype."""
        info = self.names.parameters[path]
        shape = piece.shape(info.shape)
        out = np.empty(shape, info.dtype)
        if len(shape) == 1:
            self._read_vector(piece.name, slice(0, shape[0]), out)
            return out
        for start, strip in self._strips(path, piece.name, slice(0, shape[0]), slice(0, shape[1]), info.dtype):
            out[start : start + len(strip)] = strip
        return out

    def _fill_piece(self, out: np.ndarray, path: str, piece: TensorPiece, region: Sequence[slice]) -> None:
        """Set the part of ``out`` that one piece covers."""
        ranges = [part for part, at in zip(region, piece.index, strict=True) if isinstance(at, slice)]
        place = tuple(
            at if isinstance(at, slice) else at - part.start for part, at in zip(region, piece.index, strict=True)
        )
        target = out[place]
        if target.ndim == 1:
            self._read_vector(piece.name, ranges[0], target)
            return
        target_dtype = target.dtype
        if piece.transposed:
            target = target.T
            ranges = ranges[::-1]
        rows, columns = ranges
        # NumPy copies unsigned integers faster than ml_dtypes' types. Transposing 32 rows at a time is twice as fast as
        # transposing whole strips: the cache lines it writes stay in L1.
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target = target.view(bits) if not piece.transposed else target.T.view(bits).T
        for start, strip in self._strips(path, piece.name, rows, columns, target_dtype):
            for row in range(0, len(strip), _COPIED_ROWS):
                run = strip[row : row + _COPIED_ROWS].view(bits)
                target[start - rows.start + row :][: len(run)] = run

    def _read_vector(self, name: str, part: slice, out: np.ndarray) -> None:
        values = self.tensors[name][(part,)]
        self._check(name, values)
        out[...] = values.astype(out.dtype)

    def _strips(
        self, path: str, name: str, rows: slice, columns: slice, dtype: np.dtype
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, values in ``dtype``) of consecutive strips of ``tensor[rows, columns]``."""
        if scaled_weight(path, self.names.parameters) is not None:
            yield from self._scale_strips(name, rows, columns)
            return
        if not name.endswith(".weight"):  # unchanged: scales of packed matrices, and unquantised parameters
            for start, block in self._read(name, rows, columns):
                yield start, block.astype(dtype, copy=False)
            return
        tensor = self.tensors[name]
        scale = self._scale(name) if tensor.dtype == FP8 else None
        if dtype == FP8 and scale is None:
            columns_read = _whole_blocks(columns, tensor.shape[1])
            for start, block in self._read(name, _whole_blocks(rows, tensor.shape[0]), columns_read):
                first, last = max(start, rows.start), min(start + len(block), rows.stop)
                inside = slice(columns.start - columns_read.start, columns.stop - columns_read.start)
                yield first, quantise(block)[0][first - start : last - start, inside]
            return
        for start, block in self._read(name, rows, columns):
            if dtype != FP8 and scale is not None:
                block = dequantise(block, scale, start, columns.start)
            yield start, block.astype(dtype, copy=False)

    def _scale_strips(self, name: str, rows: slice, columns: slice) -> Iterator[tuple[int, np.ndarray]]:
        """Yield block scales: the checkpoint's, or computed by quantising its weight. ``rows`` and ``columns`` are in blocks."""
        weight_name = name.removesuffix(SCALE_SUFFIX)
        weight = self.tensors[weight_name]
        if weight.dtype == FP8:
            yield rows.start, self._scale(weight_name)[rows, columns]
            return
        elements = [
            slice(part.start * BLOCK, min(part.stop * BLOCK, size))
            for part, size in zip((rows, columns), weight.shape, strict=True)
        ]
        for start, block in self._read(weight_name, *elements):
            yield start // BLOCK, block_scales(block)

    def _read(self, name: str, rows: slice, columns: slice) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, stored values) of strips that end at block boundaries, and check the values."""
        tensor = self.tensors[name]
        in_memory = isinstance(tensor, np.ndarray)
        row_bytes = max((columns.stop - columns.start) * tensor.dtype.itemsize, 1)
        band = rows.stop if in_memory else max(_FETCH_BYTES // row_bytes // BLOCK, 1) * BLOCK
        for top in range(rows.start - rows.start % BLOCK, rows.stop, band):
            first, last = max(top, rows.start), min(top + band, rows.stop)
            fetched = tensor[first:last, columns]
            start = first
            while start < last:
                stop = min(start - start % BLOCK + BLOCK, last)
                strip = fetched[start - first : stop - first]
                self._check(name, strip)
                yield start, strip
                start = stop

    def _scale(self, name: str) -> np.ndarray:
        """Return all block scales of an FP8 tensor, one for 16,384 values."""
        stored = self.tensors[name + SCALE_SUFFIX]
        scale, problem = read_scale(self.tensors[name], stored)
        with self._lock:
            self._bytes_read += scale.size * stored.dtype.itemsize
        if problem:
            self._report(name + SCALE_SUFFIX, problem)
        return scale

    def _check(self, name: str, values: np.ndarray) -> None:
        """Count the bytes of ``values`` as read, and report values that are not finite."""
        with self._lock:
            self._bytes_read += values.nbytes
        if not all_finite(values) or (
            values.dtype == np.uint8 and name.endswith(PACKED_SCALE_SUFFIX) and (values == 0xFF).any()
        ):
            self._report(name, "has values that are not finite (NaN or infinity)")

    def _report(self, name: str, problem: str) -> None:
        with self._lock:
            self._found.setdefault(name, problem)


def all_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite, for checkpoint dtypes."""
    if values.dtype.name in _EXPONENTS:
        unsigned, mask = _EXPONENTS[values.dtype.name]
        return not ((values.view(unsigned) & unsigned(mask)) == mask).any()
    return bool(np.isfinite(values).all())


def _whole_blocks(part: slice, size: int) -> slice:
    """Return the smallest range of whole blocks that contains ``part``."""
    return slice(part.start - part.start % BLOCK, min(-(-part.stop // BLOCK) * BLOCK, size))
