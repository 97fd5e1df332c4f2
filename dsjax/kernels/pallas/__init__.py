"""Kernels written with Pallas: for NVIDIA GPUs (Triton) and, in the files ``tpu_…``, for TPUs (Mosaic).

``pl``, ``plgpu`` and ``pltpu`` are JAX's modules, imported when a kernel is first traced: a process on CPUs, or one that has not come to
its first kernel, starts a sixth of a second of processor time sooner.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.pallas.tile_table import TileTable


class _LazyModule:
    """Has what a module has, and imports it when asked for any of it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # who looks an object over has no need of the module
        return getattr(importlib.import_module(self._name), attribute)


pl: Any = _LazyModule("jax.experimental.pallas")
plgpu: Any = _LazyModule("jax.experimental.pallas.triton")
pltpu: Any = _LazyModule("jax.experimental.pallas.tpu")


@dataclass(frozen=True)
class PallasKernels:
    """That the kernels of this package are used.

    platform: whose kernels. interpret: run by Pallas's interpreter where there is no such device: slow, and for tests. tiles: sizes
    that were timed (``--kernel-config``); where it is None or lacks a shape, sizes are reckoned from the shape. cores: of the GPUs, whose
    shared memory bounds the tiles.
    """

    platform: Literal["gpu", "tpu"] = "gpu"

    interpret: bool = False
    tiles: TileTable | None = None
    cores: Cores = Cores()
