"""What a device holds while the step runs, exactly, and what a model is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsjax.dryrun.compilation import CompiledStep
from dsjax.model.parameters import component, device_bytes
from dsjax.model.step import Step


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    weights: by component. cache: of its DP rank's pages. inputs: the packed integers of the step's rows. arguments, outputs,
    aliased, temporaries: as the compiler counts them; the cache is an argument and, aliased, an output.
    """

    weights: dict[str, int]
    cache: int
    inputs: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @classmethod
    def of(cls, compiled: CompiledStep) -> DeviceMemory:
        """Read a compiled step."""
        stats = compiled.compiled.memory_analysis()
        return cls(
            weights=device_bytes(compiled.params),
            cache=sum(device_bytes(compiled.cache).values()),
            inputs=4 * sum(shape.packed_width for shape in compiled.shapes),
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        """All weights of a device."""
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """The most that the device holds at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def parameters_by_component(step: Step) -> dict[str, int]:
    """How many numbers each part of the model has: one copy of each logical expert, no block scales, nothing derived."""
    found: dict[str, int] = {}
    physical, logical = step.placement.n_physical, step.config.n_routed_experts
    for path, info in step.table.infos.items():
        if info.init in ("derived", "scale"):
            continue
        name, count = component(path), math.prod(info.shape)
        if name == "routed experts":
            count = count // physical * logical
        found[name] = found.get(name, 0) + count
    return found
