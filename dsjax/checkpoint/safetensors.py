"""Reader and writer of the safetensors file format, with a validated header and zero-copy NumPy views of a memory map.

A file is an unsigned 64-bit little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}`` padded
with spaces, and the tensors' bytes. The format requires that the offsets cover these without gap or overlap.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from dsjax.checkpoint.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Tensor(Protocol):
    """A NumPy array, or something that becomes one when sliced."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one tensor in a header, without its offsets."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


class SafetensorsFile(Mapping[str, np.ndarray]):
    """A file opened for reading: ``file[name]`` is a read-only view of the mapped bytes, never a copy.

    Raises:
        CheckpointError: lists every problem with the header and the file's length.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._open(file)
        except OSError as error:
            raise CheckpointError(self.path, [f"cannot be read: {error.strerror or error}"]) from error

    def _open(self, file) -> None:
        size = os.fstat(file.fileno()).st_size
        header, data_start = _read_header(self.path, file, size)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.specs, offsets = _validate(self.path, header, size - data_start)
        self._ranges = {name: (data_start + start, data_start + stop) for name, (start, stop) in offsets.items()}
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, name: str) -> np.ndarray:
        start, _ = self._ranges[name]
        spec = self.specs[name]
        flat = np.frombuffer(self._map, np.uint8, spec.nbytes, start) if spec.nbytes else np.empty(0, np.uint8)
        return flat.view(spec.dtype).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def ranges(self) -> Mapping[str, tuple[int, int]]:
        """Each tensor's byte range in the file, [start, stop)."""
        return self._ranges

    def release(self) -> None:
        """Drop the pages read so far from this process's resident memory; the views stay valid."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path, file, size: int) -> tuple[dict, int]:
    """Return the parsed JSON header and the offset at which the data starts."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(
            path, [f"is {size} bytes long, too short for a safetensors header: truncated or no such file"]
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            path,
            [
                f"says that its header is {length:,} bytes, over the limit of {MAX_HEADER_BYTES:,}: not a safetensors file"
            ],
        )
    if 8 + length > size:
        raise CheckpointError(
            path, [f"says that its header is {length:,} bytes, but the file is {size:,} bytes: truncated"]
        )

    def reject_duplicates(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointError(path, [f"names {key!r} twice in its header"])
            seen.add(key)
        return dict(pairs)

    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=reject_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise CheckpointError(
            path, [f"has a header that is not JSON ({error}): not a safetensors file, or damaged"]
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(path, [f"has a header that is a JSON {type(header).__name__}, expected an object"])
    return header, 8 + length


def _validate(path: Path, header: dict, data_bytes: int) -> tuple[dict[str, TensorSpec], dict[str, tuple[int, int]]]:
    """Return every tensor's specification and byte range; raise one error that lists all problems."""
    problems = []
    specs = {}
    offsets = {}
    for name, entry in header.items():
        problem = _entry_problem(entry)
        if problem:
            problems.append(f"{name}: {problem}")
            continue
        spec = TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
        start, stop = entry["data_offsets"]
        if stop - start != spec.nbytes:
            problems.append(
                f"{name}: {spec} is {spec.nbytes:,} bytes, but its offsets [{start}, {stop}] hold {stop - start:,}"
            )
        specs[name] = spec
        offsets[name] = (start, stop)
    ordered = sorted(offsets, key=lambda name: offsets[name])
    end, previous = 0, "the header"
    for name in ordered:
        start, stop = offsets[name]
        if start < end:
            problems.append(f"{name}: offsets [{start}, {stop}] overlap {previous}, which ends at {end}")
        elif start > end:
            problems.append(f"bytes [{end}, {start}] between {previous} and {name} belong to no tensor")
        if stop >= end:
            end, previous = stop, name
    if end > data_bytes:
        problems.append(f"is truncated: its tensors need {end:,} bytes after the header, found {data_bytes:,}")
    elif end < data_bytes and not problems:
        problems.append(f"has {data_bytes - end:,} bytes after its last tensor that belong to none")
    if problems:
        raise CheckpointError(path, problems, "Download or write the file again.")
    return {name: specs[name] for name in ordered}, {name: offsets[name] for name in ordered}


def _entry_problem(entry: object) -> str | None:
    """Return the problem with one tensor's header entry on its own; None if it is valid."""
    if not isinstance(entry, dict):
        return f"its entry is {entry!r}, expected an object with dtype, shape and data_offsets"
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
        return f"dtype {entry.get('dtype')!r} is not one of {', '.join(DTYPES)}"
    for key in ("shape", "data_offsets"):
        numbers = entry.get(key)
        if not isinstance(numbers, list) or any(
            type(number) is not int or not 0 <= number < 2**63 for number in numbers
        ):
            return f"{key} is {numbers!r}, expected a list of non-negative integers below 2^63"
    if len(entry["data_offsets"]) != 2 or entry["data_offsets"][0] > entry["data_offsets"][1]:
        return f"data_offsets is {entry['data_offsets']}, expected [start, stop] with start ≤ stop"
    return None


def write_file(path: str | os.PathLike, specs: Mapping[str, TensorSpec], fetch: Callable[[str], np.ndarray]) -> None:
    """Write the tensors in ``specs`` to a file atomically, fetching them one at a time.

    ``fetch(name)`` must return an array of the shape and dtype in ``specs``. The bytes go to a temporary file in the
    same folder, which is synced to disk and then renamed: a crash never leaves an incomplete ``path``.
    """
    path = Path(path)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        stop = offset + spec.nbytes
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, spec in specs.items():
                array = np.ascontiguousarray(fetch(name)).reshape(spec.shape)
                if array.dtype != spec.dtype:
                    raise TypeError(f"{name}: got {array.dtype}, the header promises {spec.dtype}")
                file.write(memoryview(array.reshape(-1).view(np.uint8)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
