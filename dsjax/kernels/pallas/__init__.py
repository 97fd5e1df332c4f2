"""Kernels written with Pallas: for NVIDIA GPUs (Triton) and, in the files ``tpu_…``, for TPUs (Mosaic).

``pl``, ``plgpu`` and ``pltpu`` are JAX's modules, imported when a kernel is first traced. A process that has not traced a
kernel, as on CPUs, thus starts with a sixth of a second less CPU time.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.pallas.tile_table import TileTable


class _LazyModule:
    """A proxy for a module, which it imports at the first attribute access."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # introspection must not import the module
        return getattr(importlib.import_module(self._name), attribute)


pl: Any = _LazyModule("jax.experimental.pallas")
plgpu: Any = _LazyModule("jax.experimental.pallas.triton")
pltpu: Any = _LazyModule("jax.experimental.pallas.tpu")


@dataclass(frozen=True)
class PallasKernels:
    """Selects the kernels of this package."""

    platform: Literal["gpu", "tpu"] = "gpu"  # whose kernels to use
    interpret: bool = False  # run them in Pallas's interpreter, without such a device (slow, for tests)
    # tile sizes tuned by timing (``--kernel-config``); if None, or for shapes not in it, sizes are computed from the shape
    tiles: TileTable | None = None
    cores: Cores = Cores()  # the GPU's multiprocessors, whose shared memory bounds the tiles
