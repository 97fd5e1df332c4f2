"""Memory of a device of either side in a step with disaggregated attention and experts. Exact except for the compiler's temporaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from dsjax.dryrun.apart_compilation import ApartStep
from dsjax.dryrun.compilation import CompiledProgram
from dsjax.model.parameters import device_bytes


@dataclass(frozen=True)
class SideMemory:
    """Bytes of one device of a side.

    weights: by component. cache, state, inputs: as in `DeviceMemory`; 0 on the expert side. travelling: buffers between a layer's programs
    (rows to send and received answers), for all micro-batches. temporaries: of the most demanding program. outputs: of the programs
    outside the layers, except the cache.
    """

    weights: Mapping[str, int]
    cache: int
    state: int
    inputs: int
    travelling: int
    temporaries: int
    outputs: int

    @property
    def weight_bytes(self) -> int:
        """Total bytes of the weights."""
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """Peak memory of the device."""
        held = self.weight_bytes + self.cache + self.state + self.inputs
        return held + self.temporaries + max(self.travelling, self.outputs)


def attention_memory(compiled: ApartStep) -> SideMemory:
    """Return the memory of an attention device."""
    state = dataclasses.replace(compiled.state, cache={})
    arrays = {str(index): array for index, array in enumerate(jax.tree.leaves(state))}
    travelling = 0
    for _, made in compiled.passes:
        of_pass = 0
        for programs in made.programs:
            of_pass += _given(programs.attend) + _given(programs.share)
            between = programs.way.between
            of_pass += sum(_local(one) for one in between.described_returns)
            if programs.further:  # terms of further rounds and their initial values, allocated for every shape
                of_pass += 2 * _local(between.described_kept)
        travelling = max(travelling, of_pass)
    each = [programs for _, made in compiled.passes for programs in made.programs]
    of_layers = [run for one in each for run in (one.attend, one.share, one.receive)]
    of_layers += [
        run for one in each if one.further for run in (one.further.pack, one.further.keep, one.further.receive)
    ]
    pieces = [program.compiled for _, program in compiled.pieces]
    return SideMemory(
        weights=device_bytes(compiled.params),
        cache=sum(device_bytes(compiled.state.cache).values()),
        state=sum(device_bytes(arrays).values()),
        inputs=4 * compiled.shape.packed_width,
        travelling=travelling,
        temporaries=_temporaries([*of_layers, *pieces]),
        outputs=max(_given(run) for run in pieces),
    )


def expert_memory(compiled: ApartStep) -> SideMemory:
    """Return the memory of an expert device."""
    side, travelling = compiled.experts, 0
    for _, made in compiled.passes:
        each = []
        for programs in made.programs:
            between, answers = programs.way.between, _given(programs.way.program)
            each.append(between.senders * between.capacity * between.wire.row_bytes + answers)
        # In one process, both micro-batches are in flight; between two processes, calls are sequential.
        travelling = max(travelling, sum(each) if compiled.one_process else max(each))
    programs = [programs.way.program for _, made in compiled.passes for programs in made.programs]
    return SideMemory(device_bytes(side.described()), 0, 0, 0, travelling, _temporaries(programs), 0)


def _given(run: jax.stages.Compiled) -> int:
    """Return the bytes of a program's results that do not alias an argument."""
    stats = run.memory_analysis()
    return stats.output_size_in_bytes - stats.alias_size_in_bytes


def _temporaries(runs: Iterable[jax.stages.Compiled]) -> int:
    return max(run.memory_analysis().temp_size_in_bytes for run in runs)


def _local(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def program_bytes(program: CompiledProgram) -> dict[str, int]:
    """Return one program's bytes on a device, as the compiler counts them."""
    stats = program.compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
