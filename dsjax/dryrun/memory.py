"""What a device holds while the step runs, exactly, and what a model is made of."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax

from dsjax.dryrun.compilation import CompiledStep
from dsjax.engine.device.expert_programs import staging_bytes
from dsjax.model.parameters import component, device_bytes
from dsjax.model.step import ModelStep


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device.

    weights: by component. cache: of its DP rank's pages. state: what else stays on the device from step to step: page tables,
    sampling parameters, counts of tokens, the placement of experts, with speculative decoding drafts and a byte for each cache slot.
    inputs: the packed integers of the step's rows. arguments, outputs, aliased, temporaries: as the compiler counts them for the
    step's main program; cache and state are arguments and, aliased, outputs. drafting: outputs that are not aliased and temporaries
    of the program that drafts; 0 without one. staging: the buffer of experts that move while serving; 0 where they stay. moving:
    temporaries, and outputs that are not aliased, of the programs that move them.
    """

    weights: dict[str, int]
    cache: int
    state: int
    inputs: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    drafting: int = 0
    staging: int = 0
    moving: int = 0

    @classmethod
    def of(cls, compiled: CompiledStep) -> DeviceMemory:
        """Read a compiled step."""
        stats = compiled.main.compiled.memory_analysis()
        state = dataclasses.replace(compiled.state, cache={})
        arrays = {str(index): array for index, array in enumerate(jax.tree.leaves(state))}
        after = compiled.drafts.compiled.memory_analysis() if compiled.drafts else None
        return cls(
            weights=device_bytes(compiled.params),
            cache=sum(device_bytes(compiled.state.cache).values()),
            state=sum(device_bytes(arrays).values()),
            inputs=4 * compiled.shape.packed_width,
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            drafting=after.output_size_in_bytes - after.alias_size_in_bytes + after.temp_size_in_bytes if after else 0,
            staging=staging_bytes(compiled.step) if compiled.exchange else 0,
            moving=compiled.exchange.temporaries if compiled.exchange else 0,
        )

    @property
    def weight_bytes(self) -> int:
        """All weights of a device."""
        return sum(self.weights.values())

    @property
    def held(self) -> int:
        """What lies on the device when a step begins, whether its program reads it or not."""
        return self.weight_bytes + self.cache + self.state + self.inputs + self.staging

    @property
    def total(self) -> int:
        """The most that the device holds at once: weights, cache, state, inputs and staging, and what the most demanding program adds."""
        added = max(self.outputs - self.aliased + self.temporaries, self.drafting, self.moving)
        return max(self.arguments + self.staging, self.held) + added


def parameters_by_component(step: ModelStep) -> dict[str, int]:
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
