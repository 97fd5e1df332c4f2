"""Kernels for NVIDIA GPUs, written with Pallas (Triton): attention over the paged latent cache, and the routed experts' product."""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.kernels.pallas.tile_table import TileTable


@dataclass(frozen=True)
class PallasKernels:
    """That the kernels of this package are used.

    interpret: run by Pallas's interpreter where there is no GPU: slow, and for tests. tiles: sizes of products' tiles that were timed
    (``--kernel-config``); None, and products that it lacks: sizes reckoned from shapes.
    """

    interpret: bool = False
    tiles: TileTable | None = None
