"""Estimate the shared memory that a Triton kernel requests for given tiles, and choose tiles that fit a device.

Triton keeps one copy of a tile's operands in shared memory per load in flight, and refuses to compile a program that requests more than
the limit per block. The number of copies depends on the tensor core instruction. ``wgmma`` (compute capability 9) and ``tcgen05`` (10, 11)
read operands of at most 16 bits from shared memory while the next ones arrive, so each pipeline stage has a copy. ``mma``, which handles
everything else, reads registers and needs one copy less. The formulas are upper bounds per kernel for Triton in the XLA of JAX 0.10.2
(``tests/dsjax/kernels/test_shared_memory.py`` checks them against the compiler).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

_BARRIERS = {"mma": 512, "wgmma": 512, "tcgen05": 2048}
"""Bytes in addition to the tiles: barriers, row maxima and page numbers."""


@dataclass(frozen=True)
class Cores:
    """A GPU's streaming multiprocessors. The default is an H100 or H200."""

    shared_memory: int = 232_448  # limit per block in bytes
    capability: tuple[int, int] = (9, 0)  # CUDA compute capability
    count: int = 132  # number of SMs

    @classmethod
    def of(cls, device: Any) -> Cores:
        """Return the cores of a JAX device or a device description; an H200's if the device does not report them."""
        found = getattr(device, "shared_memory_per_block_optin", None)
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        if not found or not major.isdigit():
            return cls()
        return cls(int(found), (int(major), int(minor or 0)), int(device.core_count))

    def instruction(self, rows: int, operand: np.dtype) -> str:
        """Return the instruction for a tile: ``mma``, ``wgmma`` or ``tcgen05``; the last two need at most 16 bits and at least 64 rows, or
        swapped operands."""
        few = rows < 64 and not self.swaps(rows, operand)
        if few or np.dtype(operand).itemsize > 2 or not 9 <= self.capability[0] < 12:
            return "mma"
        return "wgmma" if self.capability[0] == 9 else "tcgen05"

    def swaps(self, rows: int, operand: np.dtype) -> bool:
        """Whether a product of FP8 operands is computed transposed, so that ``wgmma``, which needs 64 rows, takes the columns as rows."""
        return rows < 64 and np.dtype(operand).itemsize == 1 and self.capability[0] == 9


@dataclass(frozen=True)
class ProductBytes:
    """Dtypes of a matmul, which determine the shared memory of its tiles."""

    matrices: int  # number of matrices per row (2: gate and up)
    rows: np.dtype  # storage dtype of the rows
    operand: np.dtype  # dtype of the multiplication
    # bytes per weight in shared memory, including its scale in packed formats, where each value has its own copy there
    stored: int

    def of(self, tiles: Any, cores: Cores) -> int:
        """Return the upper bound in bytes per program. ``tiles`` has ``rows``, ``columns``, ``depth`` and ``stages``."""
        instruction, operand = cores.instruction(tiles.rows, self.operand), np.dtype(self.operand).itemsize
        copies = max(1, tiles.stages - (instruction == "mma"))
        stage = (
            tiles.rows * tiles.depth * np.dtype(self.rows).itemsize
            + self.matrices * tiles.depth * tiles.columns * self.stored
        )
        # Widened weights are written back to shared memory if the instruction reads them there; float32 ones always.
        widened = self.stored < operand and (instruction != "mma" or operand == 4)
        result = tiles.rows * tiles.columns * 4
        return max(copies * stage + widened * tiles.depth * tiles.columns * operand, result) + _BARRIERS[instruction]


@dataclass(frozen=True)
class AttentionBytes:
    """Sizes of absorbed attention, which determine the shared memory of its tiles."""

    latent: int  # padded width of a cache entry's latent
    rope: int  # padded width of its rotary part
    operand: np.dtype  # dtype of the queries
    stored: np.dtype  # dtype of the cache; FP8 latents have scales and a bfloat16 rotary part

    def of(self, tiles: Any, cores: Cores) -> int:
        """Return the upper bound in bytes per program. ``tiles`` has ``rows`` and ``positions``."""
        instruction, operand = cores.instruction(tiles.rows, self.operand), np.dtype(self.operand).itemsize
        queries = tiles.rows * (self.latent + self.rope) * operand
        weights = tiles.rows * tiles.positions * operand
        block = tiles.positions * (self.latent + self.rope) * operand
        if np.dtype(self.stored).itemsize < operand:
            entry = self.latent * np.dtype(self.stored).itemsize + 2 * self.rope + 4 * -(-self.latent // 128)
            bytes_of = queries + block + tiles.positions * (entry + 2 * self.rope) + weights
        elif instruction == "mma":
            bytes_of = queries + block + weights
        else:  # Each step reads latents twice, for scores and for sums; tcgen05 also keeps the previous step's.
            copies = 2 if instruction == "wgmma" else 3
            bytes_of = queries + copies * block
        result = tiles.rows * self.latent * 4 if instruction != "mma" else 0
        return max(bytes_of, result) + _BARRIERS[instruction]


class _Bytes(Protocol):
    def of(self, tiles: Any, cores: Cores) -> int: ...


T = TypeVar("T")


def first_that_fits(candidates: Iterable[T], bytes_of: _Bytes, cores: Cores) -> T:
    """Return the first tiles that fit the device. If none fit, return the last ones, and the compiler decides."""
    found = None
    for found in candidates:
        if bytes_of.of(found, cores) <= cores.shared_memory:
            break
    return found


def shallower(tiles: T) -> Iterator[T]:
    """Yield a matmul's tiles in order of increasing change: first with fewer loads in flight, then with half the depth."""
    for depth in (tiles.depth, tiles.depth // 2, tiles.depth // 4):
        if depth >= 16:
            yield from (replace(tiles, depth=depth, stages=stages) for stages in range(tiles.stages, 1, -1))
