"""``ParameterWindow``: the part of a model's parameters that one process, or one stage, holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it brings JAX in, which stages are read without
    from dsjax.model.parameters import ParameterInfo

Region = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterWindow:
    """A run of the layers of each stack, and a run of the physical experts of each layer. The default is everything.

    layers: the layers that are here, by stack (``moe_layers``, the beginning of a parameter's path); a stack that is not named is whole.
    experts: the physical experts that are here; None: all. Parameters without an axis of experts are whole.
    """

    layers: Mapping[str, range] = field(default_factory=dict)
    experts: range | None = None

    def of(self, parameters: Mapping[str, ParameterInfo]) -> dict[str, ParameterInfo]:
        """The parameters with the shapes of what is here."""
        return {
            path: replace(info, shape=tuple(len(run) for run in self._runs(path, info)))
            for path, info in parameters.items()
        }

    def in_whole(self, path: str, info: ParameterInfo, region: Region) -> Region:
        """Where a region of what is here lies in the whole parameter ``info``."""
        return tuple(
            slice(part.start + run.start, part.stop + run.start)
            for part, run in zip(region, self._runs(path, info), strict=True)
        )

    def _runs(self, path: str, info: ParameterInfo) -> list[range]:
        """What is here of each axis of a parameter."""
        here = {"layers": self.layers.get(path.partition(".")[0]), "experts": self.experts}
        runs = [(here.get(axis), size) for axis, size in zip(info.logical_axes, info.shape, strict=True)]
        return [range(size) if run is None else run for run, size in runs]
