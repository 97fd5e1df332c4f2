"""How much of a core's shared memory a Triton kernel asks for with given tiles, and tiles that a device has room for.

Triton keeps a tile's operands in shared memory, in as many copies as loads are under way, and refuses to compile a program that asks for
more than a block may have. How many copies there are depends on the tensor cores' instruction. ``wgmma`` (compute capability 9) and
``tcgen05`` (10, 11) read operands of at most 16 bits from shared memory while the next ones arrive, so that there is a copy for each stage;
``mma``, which everything else is multiplied by, reads registers and needs one copy less. The formulas are upper bounds of what Triton in
XLA of JAX 0.10.2 asks for, kernel by kernel (``tests/dsjax/kernels/test_shared_memory.py`` holds them to the compiler).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

_BARRIERS = {"mma": 512, "wgmma": 512, "tcgen05": 2048}
"""Bytes beside tiles: barriers, row maxima and page numbers."""


@dataclass(frozen=True)
class Cores:
    """A GPU's streaming multiprocessors. The default is an H100 or H200.

    shared_memory: most bytes that a block may ask for. capability: CUDA's compute capability. count: how many there are.
    """

    shared_memory: int = 232_448
    capability: tuple[int, int] = (9, 0)
    count: int = 132

    @classmethod
    def of(cls, device: Any) -> Cores:
        """The cores of a JAX device, or of a described one; an H200's where the device does not say."""
        found = getattr(device, "shared_memory_per_block_optin", None)
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        if not found or not major.isdigit():
            return cls()
        return cls(int(found), (int(major), int(minor or 0)), int(device.core_count))

    def instruction(self, rows: int, operand: np.dtype) -> str:
        """What multiplies a tile of so many rows: ``mma``, ``wgmma`` or ``tcgen05``; the last two take 64 rows and no float32."""
        if rows < 64 or np.dtype(operand).itemsize > 2 or not 9 <= self.capability[0] < 12:
            return "mma"
        return "wgmma" if self.capability[0] == 9 else "tcgen05"


@dataclass(frozen=True)
class ProductBytes:
    """Dtypes of a product, which decide what its tiles take.

    matrices: that each row is multiplied with (2: gate and up). rows: dtype that rows lie in; operand: that they are multiplied in.
    stored: bytes of a weight in shared memory, with its share of a packed block's scale where each value has its own there.
    """

    matrices: int
    rows: np.dtype
    operand: np.dtype
    stored: int

    def of(self, tiles: Any, cores: Cores) -> int:
        """Most bytes that a program asks for; ``tiles`` has ``rows``, ``columns``, ``depth`` and ``stages``."""
        instruction, operand = cores.instruction(tiles.rows, self.operand), np.dtype(self.operand).itemsize
        copies = max(1, tiles.stages - (instruction == "mma"))
        stage = (
            tiles.rows * tiles.depth * np.dtype(self.rows).itemsize
            + self.matrices * tiles.depth * tiles.columns * self.stored
        )
        # Widened weights are written back where the instruction reads them; float32 ones always.
        widened = self.stored < operand and (instruction != "mma" or operand == 4)
        result = tiles.rows * tiles.columns * 4
        return max(copies * stage + widened * tiles.depth * tiles.columns * operand, result) + _BARRIERS[instruction]


@dataclass(frozen=True)
class AttentionBytes:
    """Sizes of absorbed attention, which decide what its tiles take.

    latent, rope: padded widths of a cache entry. operand: dtype of queries; stored: of the cache, whose FP8 latents have scales and whose
    rotary part is then bfloat16.
    """

    latent: int
    rope: int
    operand: np.dtype
    stored: np.dtype

    def of(self, tiles: Any, cores: Cores) -> int:
        """Most bytes that a program asks for; ``tiles`` has ``rows`` and ``positions``."""
        instruction, operand = cores.instruction(tiles.rows, self.operand), np.dtype(self.operand).itemsize
        queries = tiles.rows * (self.latent + self.rope) * operand
        weights = tiles.rows * tiles.positions * operand
        block = tiles.positions * (self.latent + self.rope) * operand
        if np.dtype(self.stored).itemsize < operand:
            entry = self.latent * np.dtype(self.stored).itemsize + 2 * self.rope + 4 * -(-self.latent // 128)
            bytes_of = queries + block + tiles.positions * (entry + 2 * self.rope) + weights
        elif instruction == "mma":
            bytes_of = queries + block + weights
        else:  # Latents are read twice a step, for scores and for sums; tcgen05 keeps those of the step before as well.
            copies = 2 if instruction == "wgmma" else 3
            bytes_of = queries + copies * block
        result = tiles.rows * self.latent * 4 if instruction != "mma" else 0
        return max(bytes_of, result) + _BARRIERS[instruction]


class _Bytes(Protocol):
    def of(self, tiles: Any, cores: Cores) -> int: ...


T = TypeVar("T")


def first_that_fits(candidates: Iterable[T], bytes_of: _Bytes, cores: Cores) -> T:
    """The first tiles that a device has room for; the last ones, which the compiler will judge, where it has for none."""
    found = None
    for found in candidates:
        if bytes_of.of(found, cores) <= cores.shared_memory:
            break
    return found


def shallower(tiles: T) -> Iterator[T]:
    """A product's tiles, then with fewer loads under way, then with half the depth: what changes no more than it must."""
    for depth in (tiles.depth, tiles.depth // 2, tiles.depth // 4):
        if depth >= 16:
            yield from (replace(tiles, depth=depth, stages=stages) for stages in range(tiles.stages, 1, -1))
