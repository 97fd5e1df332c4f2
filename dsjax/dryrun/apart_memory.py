"""Memory of a device of either side in a step with disaggregated attention and experts. Exact except for the compiler's temporaries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from dsjax.dryrun.apart_compilation import ApartStep
from dsjax.dryrun.memory import state_bytes
from dsjax.model.parameters import device_bytes


@dataclass(frozen=True, kw_only=True)
class SideMemory:
    """Bytes of one device of a side."""

    weights: Mapping[str, int]  # by component
    cache: int = 0  # 0 on the expert side, as are the next two; all three as in `DeviceMemory`
    state: int = 0
    inputs: int = 0
    travelling: int  # buffers between a layer's programs (rows to send and received answers), for all micro-batches
    temporaries: int  # of the most demanding program
    outputs: int = 0  # of the programs outside the layers, except the cache

    @property
    def weight_bytes(self) -> int:
        """Total bytes of the weights."""
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """Peak memory of the device."""
        persistent = self.weight_bytes + self.cache + self.state + self.inputs
        return persistent + self.temporaries + max(self.travelling, self.outputs)


def attention_memory(compiled: ApartStep) -> SideMemory:
    """Return the memory of an attention device."""
    layer_programs: list[jax.stages.Compiled] = []
    pass_buffers: list[int] = []
    for _, compiled_pass in compiled.experts.passes:
        buffers = 0
        for programs in compiled_pass.programs:
            between = programs.way.between
            further = programs.further
            buffers += _output_bytes(programs.attend) + _output_bytes(programs.share)
            buffers += sum(_device_bytes(array) for array in between.described_returns)
            layer_programs += [programs.attend, programs.share, programs.receive]
            if further:
                # Terms of further rounds and their initial values, allocated for every shape.
                buffers += 2 * _device_bytes(between.described_terms)
                layer_programs += [further.pack, further.keep, further.receive]
        pass_buffers.append(buffers)
    outer_programs = [program.compiled for _, program in compiled.outer_programs]
    return SideMemory(
        weights=device_bytes(compiled.params),
        cache=sum(device_bytes(compiled.state.cache).values()),
        state=state_bytes(compiled.state),
        inputs=4 * compiled.shape.packed_width,
        travelling=max(pass_buffers, default=0),
        temporaries=_most_temporaries([*layer_programs, *outer_programs]),
        outputs=max(map(_output_bytes, outer_programs)),
    )


def expert_memory(compiled: ApartStep) -> SideMemory:
    """Return the memory of an expert device."""
    expert_programs: list[jax.stages.Compiled] = []
    pass_buffers: list[int] = []
    for _, compiled_pass in compiled.experts.passes:
        micro_batches = []
        for programs in compiled_pass.programs:
            between, program = programs.way.between, programs.way.program
            rows = between.senders * between.capacity * between.wire.row_bytes
            micro_batches.append(rows + _output_bytes(program))
            expert_programs.append(program)
        # In one process, both micro-batches are in flight; between two processes, calls are sequential.
        pass_buffers.append(sum(micro_batches) if compiled.one_process else max(micro_batches))
    return SideMemory(
        weights=device_bytes(compiled.experts.described()),
        travelling=max(pass_buffers, default=0),
        temporaries=_most_temporaries(expert_programs),
    )


def _output_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of a program's results that do not alias an argument."""
    stats = program.memory_analysis()
    return stats.output_size_in_bytes - stats.alias_size_in_bytes


def _most_temporaries(programs: Iterable[jax.stages.Compiled]) -> int:
    return max(program.memory_analysis().temp_size_in_bytes for program in programs)


def _device_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of one device's shard."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
