"""In which order one call of a kernel adds, written into the call, so that whoever reads a compiled program can judge it.

`dsjax/dryrun/program/reductions.py` reads it: two calls that name the same sizes add alike, and a kernel that names nothing is taken for
one whose order depends on everything. docs/measurements/exactness-kernels.csv has each kernel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROWS, MESH = "rows", "mesh"
"""What sizes are chosen by: the tokens and rows of this shape; what a device has of heads, columns and experts."""


@dataclass(frozen=True)
class KernelOrder:
    """The order of a kernel's sums.

    sizes: of the chunks that order them, by name: ``depth`` of one product, ``splits`` that are added afterwards, ``rows`` of a tile, which
    decide the tensor core's instruction. depends: what chose the sizes (``ROWS``, ``MESH``); nothing where they are the same for every
    shape. exact: the kernel has no sum whose order matters.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    depends: tuple[str, ...] = ()
    exact: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """For ``pallas_call``, beside the cost's: XLA keeps it in the custom call."""
        depends = "exact" if self.exact else ".".join(self.depends)
        return {f"order_{name}": str(size) for name, size in self.sizes.items()} | {"order_depends": depends}
