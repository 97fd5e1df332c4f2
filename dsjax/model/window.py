"""``ParameterWindow``: the part of a model's parameters that one process, or one stage, holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it would import JAX, which reading stages does not need
    from dsjax.model.parameters import ParameterInfo

Region = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterWindow:
    """A range of layers for each stack, and a range of physical experts for each layer. The default is everything."""

    # stack (``moe_layers``, the first component of a parameter's path) → layers held; a stack that is not listed is held whole
    layers: Mapping[str, range] = field(default_factory=dict)
    # the physical experts held; None: all. Parameters without an expert axis are held whole
    experts: range | None = None

    def of(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, ParameterInfo]:
        """Return the parameters with their local shapes."""
        return {
            path: replace(info, shape=tuple(len(run) for run in self._runs(path, info)))
            for path, info in parameters.items()
        }

    def in_whole(self, path: str, info: ParameterInfo, region: Region) -> Region:
        """Return the region of the whole parameter ``info`` for a region of the local part."""
        return tuple(
            slice(part.start + run.start, part.stop + run.start)
            for part, run in zip(region, self._runs(path, info), strict=True)
        )

    def _runs(self, path: str, info: ParameterInfo) -> list[range]:
        """Return the local range of each axis of a parameter."""
        here = {"layers": self.layers.get(path.partition(".")[0]), "experts": self.experts}
        runs = [(here.get(axis), size) for axis, size in zip(info.logical_axes, info.shape, strict=True)]
        return [range(size) if run is None else run for run, size in runs]
