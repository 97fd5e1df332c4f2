"""A kernel call's order of summation, stored in the call, so that tools can read it from a compiled program.

`dsjax/dryrun/program/reductions.py` reads it: two calls with the same sizes add in the same order, and a kernel without sizes is
assumed to add in an order that depends on everything. docs/measurements/exactness-kernels.csv lists each kernel's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ROWS, MESH = "rows", "mesh"
"""What determines sizes: the tokens and rows of this shape, or a device's numbers of heads, columns and experts."""


@dataclass(frozen=True)
class KernelOrder:
    """A kernel's order of summation."""

    # by name, the chunk sizes that determine the order: ``depth`` of one product, ``splits`` that are added afterwards, ``rows`` of a tile,
    # which select the tensor core's instruction
    sizes: Mapping[str, int] = field(default_factory=dict)
    # what determines the sizes (``ROWS``, ``MESH``); empty if they are the same for every shape
    depends: tuple[str, ...] = ()
    exact: bool = False  # the kernel has no sum whose order matters

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata for ``pallas_call`` in addition to the cost's. XLA keeps it in the custom call."""
        depends = "exact" if self.exact else ".".join(self.depends)
        return {f"order_{name}": str(size) for name, size in self.sizes.items()} | {"order_depends": depends}
