"""Costs of a compiled program on one device: FLOPs of matrix products and bytes of memory traffic, multiplied by trip counts.

A fusion reads its parameters and writes its result. If it only slices a parameter, only the slices count; if its result updates part of
a parameter, only that part counts. XLA's ``HloCostAnalysis`` counts the same, but a loop's body only once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsjax.dryrun.program.asynchronous import COLLECTIVES, collective_of, is_done
from dsjax.dryrun.program.convolutions import convolution_flops
from dsjax.dryrun.program.text import Computation, Operation, Program
from dsjax.dryrun.program.walk import TripCount, executed

FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id", "while",
    "conditional", "call", "iota", "domain", "opt-barrier",
}  # fmt: skip
"""Operations that only name, pass on or order values. Computations that they call are counted separately."""
ORDERING = {
    "AllocateBuffer",
    "ConcatBitcast",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
}
"""Custom calls of TPU programs that only name buffers or order asynchronous operations."""
_RENAMES = ("bitcast", "reshape", "copy", "transpose")
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of one device in one run of the program."""

    flops: float  # of matrix products, two for a multiply-add
    flops_by_dtype: dict[str, float]  # the same by operand dtype
    bytes: float  # read and written by scheduled operations
    flops_assumed: float  # the part in loops whose trip count was assumed
    bytes_assumed: float  # likewise
    uncounted: dict[str, float] = field(default_factory=dict)  # custom call that hides its operations → number of runs


def program_costs(program: Program, *, trip_count: TripCount = lambda loop: None) -> ProgramCosts:
    """Add up the costs of all scheduled operations."""
    by_dtype: dict[str, float] = {}
    uncounted: dict[str, float] = {}
    flops = moved = flops_assumed = bytes_assumed = 0.0
    for run in executed(program, trip_count):
        stated = stated_cost(run.operation)
        is_assumed = run.data_dependent or bool(stated and stated.assumed)
        for dtype, count in products(program, run.computation, run.operation):
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + run.times * count
            flops += run.times * count
            flops_assumed += run.times * count if is_assumed else 0.0
        size = run.times * bytes_moved(program, run.computation, run.operation)
        moved += size
        bytes_assumed += size if is_assumed else 0.0
        is_counted = stated or gemm_dimensions(run.computation, run.operation)
        if run.operation.opcode == "custom-call" and not is_counted:
            name = call_target(run.operation)
            if name not in ORDERING:
                uncounted[name] = uncounted.get(name, 0.0) + run.times
    return ProgramCosts(flops, by_dtype, moved, flops_assumed, bytes_assumed, uncounted)


def bytes_moved(program: Program, computation: Computation, operation: Operation) -> int:
    """Return the bytes of main memory that one scheduled operation reads and writes; 0 for ``FREE`` operations and collectives."""
    opcode = operation.opcode
    if opcode in FREE or opcode.endswith(("-start", "-done", "-update")) or opcode in COLLECTIVES:
        return 0
    stated = stated_cost(operation)
    if stated:
        return round(stated.bytes)
    if opcode == "custom-call" and call_target(operation) in ORDERING:
        return 0
    if opcode == "fusion":
        if collective_of(program, operation) or is_done(program, operation):
            return 0
        inner = program.computations[operation.called("calls")]
        return sum(_read(program, inner, parameter) for parameter in inner.parameters) + _written(inner, operation)
    if opcode in _SLICES:
        return 2 * operation.memory_bytes
    if opcode in _UPDATES:
        return 2 * _update_operand(computation, operation).memory_bytes
    operands = [computation.operations[name] for name in operation.operands if name in computation.operations]
    return operation.memory_bytes + sum(operand.memory_bytes for operand in operands)


def _update_operand(computation: Computation, operation: Operation) -> Operation:
    """Return the values that one of ``_UPDATES`` writes: operand 1 of a dynamic-update-slice, the last of a scatter."""
    return computation.operations[operation.operands[1 if operation.opcode == "dynamic-update-slice" else -1]]


def _read(program: Program, inner: Computation, parameter: Operation) -> int:
    """Return the bytes that a fusion reads of a parameter: only the slices, if it is only sliced."""
    read = 0
    pending = [parameter]
    while pending:
        value = pending.pop()
        for user in inner.users.get(value.name, ()):
            only_as_base = user.operands[0] == value.name and value.name not in user.operands[1:]
            if user.opcode in _SLICES and only_as_base:
                read += user.nbytes
            elif user.opcode in _UPDATES and only_as_base:
                continue  # updated in place: ``_written`` counts the update
            elif user.opcode in _RENAMES:
                pending.append(user)
            elif user.opcode == "fusion":
                nested = program.computations[user.called("calls")]
                same = [nested.parameters[i] for i, name in enumerate(user.operands) if name == value.name]
                read += sum(_read(program, nested, nested_parameter) for nested_parameter in same)
            elif user.opcode in COLLECTIVES or (user is inner.root and user.opcode == "tuple"):
                continue  # moved by the collective, or passed on
            else:
                return parameter.memory_bytes
    return min(read, parameter.memory_bytes)


def _written(inner: Computation, fusion: Operation) -> int:
    root = inner.root
    results = [inner.operations[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = 0
    # A root with several results that is not a tuple operation counts once, with all its bytes: then there are more shapes.
    for result, shape in zip(results, fusion.shapes, strict=False):
        while result.opcode in _RENAMES and result.operands:
            result = inner.operations[result.operands[0]]
        if shape.space or result.opcode == "parameter" or result.opcode in COLLECTIVES:
            continue
        if result.opcode in _UPDATES:
            written += _update_operand(inner, result).nbytes
        else:
            written += result.nbytes
    return written


def products(program: Program, computation: Computation, operation: Operation) -> Iterator[tuple[str, int]]:
    """Yield ``(dtype of the left operand, FLOPs)`` of the matrix products in one scheduled operation."""
    if operation.opcode == "fusion":
        inner = program.computations[operation.called("calls")]
        for fused in inner.operations.values():
            yield from products(program, inner, fused)
        return
    stated = stated_cost(operation)
    if stated:
        if stated.flops:
            yield stated.dtype, round(stated.flops)
    elif operation.opcode == "convolution":
        left, right = (computation.operations[name].shapes[0] for name in operation.operands)
        yield left.dtype, convolution_flops(operation, left, right)
    elif operation.opcode == "dot":
        yield _product_flops(computation, operation, operation.integers_attribute("lhs_contracting_dims"))
    elif (contracting := gemm_dimensions(computation, operation)) is not None:
        yield _product_flops(computation, operation, contracting)


def _product_flops(computation: Computation, product: Operation, contracting: tuple[int, ...]) -> tuple[str, int]:
    """Return ``(dtype, FLOPs)`` of a product that contracts these dimensions of its left operand."""
    left = computation.operations[product.operands[0]].shapes[0]
    depth = math.prod(left.dims[axis] for axis in contracting)
    return left.dtype, 2 * product.shapes[0].size * depth


@dataclass(frozen=True)
class StatedCost:
    """Costs in a custom call's metadata."""

    flops: float  # of its products
    bytes: float  # of main memory
    dtype: str  # of the products' operands
    assumed: bool  # whether the figures depend on values and are therefore assumptions


def stated_cost(operation: Operation) -> StatedCost | None:
    """Read ``cost_flops``, ``cost_bytes``, ``cost_dtype`` and ``cost_assumed`` from a custom call's metadata (Pallas's ``metadata``).

    Return None if it has none.
    """
    if operation.opcode != "custom-call" or "cost_flops" not in operation.attributes:
        return None
    # XLA escapes the quotation marks of the metadata's JSON as \22 for GPUs, and leaves them unescaped for TPUs.
    fields = dict(re.findall(r'cost_(\w+)(?:\\22|"): ?(?:\\22|")([\w.]+)', operation.attributes))
    return StatedCost(float(fields["flops"]), float(fields["bytes"]), fields["dtype"], fields["assumed"] == "1")


def call_target(operation: Operation) -> str:
    """Return the target of a custom call."""
    target = re.search(r'custom_call_target="([^"]*)"', operation.attributes)
    return target.group(1) if target else "custom-call"


def gemm_dimensions(computation: Computation, operation: Operation) -> tuple[int, ...] | None:
    """Return the contracted dimensions of the left operand of a GEMM custom call; None for other operations."""
    if operation.opcode == "custom-call" and call_target(operation) == "__cudnn$blockScaledDot":
        return (len(computation.operations[operation.operands[0]].shapes[0].dims) - 1,)
    dimensions = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', operation.attributes)
    if operation.opcode != "custom-call" or not dimensions:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", dimensions.group(1)))
