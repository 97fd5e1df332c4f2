"""Kernels written with Pallas: for NVIDIA GPUs (Triton) and, in the files ``tpu_…``, for TPUs (Mosaic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsjax.kernels.pallas.tile_table import TileTable


@dataclass(frozen=True)
class PallasKernels:
    """That the kernels of this package are used.

    platform: whose kernels. interpret: run by Pallas's interpreter where there is no such device: slow, and for tests. tiles: sizes of
    tiles that were timed (``--kernel-config``); None, and shapes that it lacks: sizes reckoned from shapes.
    """

    platform: Literal["gpu", "tpu"] = "gpu"

    interpret: bool = False
    tiles: TileTable | None = None
