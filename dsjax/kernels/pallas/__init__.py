"""Kernels for NVIDIA GPUs, written with Pallas (Triton): attention over the paged latent cache, and the routed experts' product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PallasKernels:
    """That the kernels of this package are used. interpret: run by Pallas's interpreter where there is no GPU: slow, and for tests."""

    interpret: bool = False
