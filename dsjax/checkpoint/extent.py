"""Which part of a parameter a shard holds, by layers, logical experts and a box of the other dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.model.parameters import ParameterInfo

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""
Index = tuple[slice, ...]
"""Position of a part in the shard's values; one slice per dimension."""

NO_EXPERT = -1
"""Expert number for parameters that do not belong to an expert."""


@dataclass(frozen=True, eq=False)
class Extent:
    """Which parts of a parameter a shard holds."""

    # number of stacked layers, a dimension that is never sharded; None: the parameter is not stacked
    layers: int | None
    # ``[layers, slots]``, the logical expert in each slot; None: the parameter has no expert dimension
    experts: np.ndarray | None
    box: Box  # range of each remaining dimension

    @classmethod
    def of(cls, info: ParameterInfo, region: Box, rows: np.ndarray | None) -> Extent:
        """Describe a region of a parameter. rows: ``[layers, slots]``, the logical expert in each slot of the whole parameter."""
        layers = info.shape[0] if info.logical_axes[0] == "layers" else None
        rest = region if layers is None else region[1:]
        if rows is None:
            return cls(layers, None, rest)
        (start, stop), *rest = rest
        return cls(layers, rows[:, start:stop], tuple(rest))

    @property
    def num_layers(self) -> int:
        """Number of layers; 1 if the parameter is not stacked."""
        return 1 if self.layers is None else self.layers

    @property
    def layer_size(self) -> int:
        """Number of values in one layer."""
        slots = 1 if self.experts is None else self.experts.shape[1]
        return slots * math.prod(stop - start for start, stop in self.box)

    def experts_in(self, layer: int) -> list[int]:
        """List the logical expert of each slot of a layer."""
        return [NO_EXPERT] if self.experts is None else self.experts[layer].tolist()

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Return the first slot of an expert in a layer; None if the shard does not have the expert."""
        experts = self.experts_in(layer)
        return experts.index(expert) if expert in experts else None

    def index(self, layer: int, slot: int, box: Box, slots: int = 1) -> Index:
        """Return the position of a box of consecutive slots in the shard's values."""
        lead = [] if self.layers is None else [slice(layer, layer + 1)]
        if self.experts is not None:
            lead.append(slice(slot, slot + slots))
        rest = [slice(start - own, stop - own) for (start, stop), (own, _) in zip(box, self.box, strict=True)]
        return (*lead, *rest)

    def is_like(self, other: Extent) -> bool:
        """Whether both hold the same parts in the same order."""
        return (self.layers, self.box) == (other.layers, other.box) and np.array_equal(self.experts, other.experts)


def intersection(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def difference(box: Box, inner: Box) -> list[Box]:
    """Subtract `inner`, which lies inside `box`, and return the rest as non-overlapping boxes."""
    boxes = []
    rest = list(box)
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                boxes.append((*rest[:axis], part, *rest[axis + 1 :]))
        rest[axis] = (first, last)
    return boxes


def as_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert slices of an array of this shape to a box."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
