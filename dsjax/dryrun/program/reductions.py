"""Every sum of a compiled program whose order of additions matters: what computes it, in which order, and what the order depends on.

Floating-point addition rounds, so another order of the same terms gives other bits. Maxima, minima, logical operations and integer sums
are the same in every order and are not listed; neither are sums of one or two terms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dsjax.dryrun.program.asynchronous import collective_of
from dsjax.dryrun.program.carried import carried_sums, is_float
from dsjax.dryrun.program.costs import ORDERING, call_target, gemm_dimensions
from dsjax.dryrun.program.groups import mesh_axes, replica_groups
from dsjax.dryrun.program.loops import known_trip_count
from dsjax.dryrun.program.text import Computation, Operation, Program, Shape
from dsjax.dryrun.program.tiling import NO_TILING, SEQUENCE, Tiling, tiling_of
from dsjax.dryrun.program.walk import Executed, executed

Platform = Literal["cpu", "gpu", "tpu"]
Carrier = Literal["kernel", "library", "product", "reduce", "scatter", "collective", "loop", "unknown"]

MESH, ROWS, COMPILER, LIBRARY, TIMING, VALUES = "mesh", "rows", "compiler", "library", "timing", "values"
"""What an order can depend on: the number and positions of devices; the rows of the batch's bucket; the compiler's tiling for this shape;
a library's choice; thread timing; values, through a loop's trip count."""

_MOVING_CALLS = ORDERING | {
    "AssumeGatherIndicesInBound",
    "LayoutConstraint",
    "MoveToDevice",
    "MoveToHost",
    "PadToStatic",
    "Sharding",
    "SliceToDynamic",
    "TopK",
    "X64Combine",
    "X64SplitHigh",
    "X64SplitLow",
    "__cub$DeviceRadixSort",
    "annotate_device_placement",
}
"""Custom calls that move, sort or compare values without adding any."""
_LIBRARIES = re.compile(r"cublas|cudnn|cusolver|cufft|onednn|__cub\$|triton_kernel_library", re.IGNORECASE)
_PRODUCTS = ("dot", "convolution")
_MAX_VISITED = 16
"""Maximum number of unnamed operations to search for one with a name."""


@dataclass(frozen=True)
class Reduction:
    """One sum on one device."""

    name: str  # the scheduled operation
    op_name: str  # where JAX traced it
    carrier: Carrier  # kind of what computes the sum
    # a kernel by its name, a library by its call, a product or reduce that the compiler tiles, a scatter, a collective by its kind, a loop
    # that carries the sum across iterations, or an unknown call
    what: str
    dtype: str  # of the result
    depth: int | None  # terms per element on this device; None if unknown or dependent on values
    order: str  # the order as far as the program states it
    is_complete: bool  # whether that is all, so that programs with equal ``order`` add alike
    depends: tuple[str, ...]  # what the order may depend on (``MESH`` …); empty if the program's text fixes the order
    why: str  # the reason, as text
    axes: tuple[str, ...] | None = None  # mesh axes of a collective
    times: float = 1.0  # executions per run of the program

    @property
    def signature(self) -> str:
        """Carrier, terms, dtype and order, which must be equal in two programs for the sum to be the same."""
        terms = "" if self.depth is None else f" of {self.depth}"
        order = f", {self.order}" if self.order else ""
        return f"{self.computed_by}{terms} in {self.dtype}{order}"

    @property
    def computed_by(self) -> str:
        """Carrier and its name, as text."""
        return self.what if self.carrier in (self.what, "collective") else f"{self.carrier} {self.what}"


def program_reductions(program: Program, mesh: Mapping[str, int], platform: Platform) -> tuple[Reduction, ...]:
    """Return the sums in schedule order. mesh: axis → size, major first; platform: the compiler's target."""
    devices = math.prod(mesh.values())
    reductions: list[Reduction] = []
    for run in executed(program):
        if run.times:
            reductions.extend(_operation_sums(program, run, mesh, devices, platform))
    return tuple(reductions)


def _operation_sums(
    program: Program, run: Executed, mesh: Mapping[str, int], devices: int, platform: Platform
) -> Iterator[Reduction]:
    operation = run.operation
    collective = collective_of(program, operation)
    if collective:
        if collective[0] in ("all-reduce", "reduce-scatter"):
            yield from _collective_sums(program, run, *collective, mesh, devices)
        return
    if operation.opcode == "while":
        yield from _loop_sums(program, run)
    elif operation.opcode == "custom-call":
        yield from _call_sums(run)
    elif operation.opcode == "fusion":
        inner = program.computations[operation.called("calls")]
        yield from _fusion_sums(program, run, inner, tiling_of(program, operation, platform), platform)
    else:
        yield from _arithmetic_sums(program, run, run.computation, operation, NO_TILING, platform)


def _fusion_sums(program: Program, run: Executed, inner: Computation, tiling: Tiling, platform: Platform):
    for operation in inner.operations.values():
        if operation.opcode == "fusion":
            nested = program.computations[operation.called("calls")]
            yield from _fusion_sums(program, run, nested, tiling.around(operation), platform)
        elif operation.opcode == "custom-call":
            yield from _call_sums(Executed(operation, inner, run.times, run.data_dependent))
        else:
            yield from _arithmetic_sums(program, run, inner, operation, tiling, platform)


def _arithmetic_sums(
    program: Program, run: Executed, computation: Computation, operation: Operation, tiling: Tiling, platform: Platform
):
    """Yield the sum of a product, a reduction, a window reduction or a scatter, by itself or inside a fusion."""
    opcode = operation.opcode
    if opcode not in (*_PRODUCTS, "reduce", "reduce-window", "scatter", "select-and-scatter") or not operation.shapes:
        return
    dtype = operation.shapes[0].dtype
    if not is_float(dtype):
        return
    if opcode == "scatter" or opcode == "select-and-scatter":
        yield from _scatter_sums(program, run, operation, platform)
        return
    if opcode not in _PRODUCTS and not _adds(program, operation):
        return
    depth = _depth(computation, operation)
    if depth == 1:
        return
    carrier = "product" if opcode in _PRODUCTS else "reduce"
    if carrier == "reduce" and depth == 2:
        return
    what = opcode
    if carrier == "reduce":
        # Partial sums of a product split along its depth by the compiler, or a product computed without a matrix unit.
        what = "terms of a product" if _traced_as_product(operation) else "window" if "window" in opcode else "terms"
    order = tiling.words(computation, operation)
    if order == SEQUENCE:
        depends = ()
        why = "one thread adds in sequence"
        is_complete = True
    else:
        depends = (COMPILER,)
        is_complete = tiling.is_complete and bool(order)
        why = (
            "the compiler tiles it for this shape"
            if is_complete
            else "the compiler tiles it for this shape, and the program does not tell how"
        )
    yield Reduction(
        run.operation.name, operation.op_name or run.operation.op_name, carrier, what, dtype, depth, order, is_complete,
        depends, why, times=run.times,
    )  # fmt: skip


def _traced_as_product(operation: Operation) -> bool:
    return operation.op_name.rpartition("/")[2].startswith("dot_general")


def _scatter_sums(program: Program, run: Executed, operation: Operation, platform: Platform):
    if not _adds(program, operation):
        return
    is_unique = "unique_indices=true" in operation.attributes
    if is_unique:
        order = "one term for each place"
        depends = ()
        why = "each place is added to once"
    elif platform == "gpu":
        order = "atomic"
        depends = (TIMING, ROWS)
        why = "threads add with atomic operations, in the order in which they come"
    else:
        order = "in the order of the updates"
        depends = (ROWS,)
        why = "updates of other rows stand between a row's own"
    yield Reduction(
        run.operation.name, operation.op_name or run.operation.op_name, "scatter", operation.opcode, operation.shapes[0].dtype,
        1 if is_unique else None, order, is_complete=True, depends=depends, why=why, times=run.times,
    )  # fmt: skip


def _collective_sums(
    program: Program, run: Executed, kind: str, inner: Operation, mesh: Mapping[str, int], devices: int
) -> Iterator[Reduction]:
    groups = replica_groups(inner.attributes, devices)
    ranks = max(map(len, groups), default=1)
    shapes = [shape for shape in inner.shapes if is_float(shape.dtype)]
    if ranks < 2 or not shapes or not _adds(program, inner):
        return
    yield Reduction(
        run.operation.name, inner.op_name or run.operation.op_name or _path_of_operand(run, kind), "collective",
        f"{kind} of masked values" if _is_masked(program, run) else kind,
        shapes[0].dtype, ranks, "", is_complete=False, depends=(MESH,),
        why=f"as many terms as devices ({ranks}), added in the order of the collective's algorithm",
        axes=mesh_axes(groups, mesh), times=run.times,
    )  # fmt: skip


def _is_masked(program: Program, run: Executed) -> bool:
    """Whether each device contributes either a value or zero to a collective, for example if only one device has the value."""
    if not run.operation.operands:
        return False
    computation = run.computation
    operation = computation.operations.get(run.operation.operands[0])
    while operation is not None:
        if operation.opcode == "fusion":
            computation = program.computations[operation.called("calls")]
            operation = computation.root
        elif operation.opcode in ("bitcast", "copy", "convert", "reshape"):
            operation = computation.operations.get(operation.operands[0])
        else:
            break
    if operation is None or operation.opcode != "select":
        return False
    branches = [computation.operations.get(name) for name in operation.operands[1:]]
    sources = [computation.operations.get(b.operands[0]) if b and b.opcode == "broadcast" else b for b in branches]
    return any(s is not None and s.opcode == "constant" and s.arguments_text in ("0", "-0") for s in sources)


def _path_of_operand(run: Executed, kind: str) -> str:
    """Name a collective that the compiler derived from another by its operand's scope and its kind; empty if no scope is found."""
    pending = list(run.operation.operands)
    visited = set()
    while pending:
        operation = run.computation.operations.get(pending.pop(0))
        if operation is None or operation.name in visited or len(visited) > _MAX_VISITED:
            continue
        if operation.op_name:
            return f"{operation.op_name.rpartition('/')[0]}/{kind}"
        visited.add(operation.name)
        pending.extend(operation.operands)
    return ""


def _loop_sums(program: Program, run: Executed) -> Iterator[Reduction]:
    sums = carried_sums(program, run.operation)
    if not sums:
        return
    trips = known_trip_count(program, run.computation, run.operation)
    if trips == 1:
        return
    for dtype in dict.fromkeys(operation.shapes[0].dtype for operation in sums):
        yield Reduction(
            run.operation.name, run.operation.op_name, "loop", "sum carried from turn to turn", dtype, trips, "turn by turn",
            is_complete=True, depends=() if trips is not None else (VALUES,),
            why="one turn after the other" if trips is not None else "as many turns as values ask for, of which the text tells no number",
            times=run.times,
        )  # fmt: skip


def _call_sums(run: Executed) -> Iterator[Reduction]:
    operation = run.operation
    target = call_target(operation)
    dtype = operation.shapes[0].dtype if operation.shapes else ""
    stated = stated_order(operation)
    names = (operation.name, operation.op_name)
    if stated is not None:
        if stated.exact:
            return
        why = (
            "its sizes are chosen by " + " and ".join(stated.depends)
            if stated.depends
            else "its sizes are the same for every shape"
        )
        yield Reduction(
            *names, "kernel", stated.name, dtype, None, stated.words, True, stated.depends, why, times=run.times
        )  # fmt: skip
    elif target in _MOVING_CALLS or not any(is_float(shape.dtype) for shape in operation.shapes):
        return
    elif _LIBRARIES.search(target):
        contracting = gemm_dimensions(run.computation, operation)
        left = run.computation.operations.get(operation.operands[0]) if operation.operands else None
        depth = _extent(left.shapes[0], contracting) if contracting and left is not None else None
        yield Reduction(
            *names, "library", target, dtype, depth, "", False, (LIBRARY, ROWS),
            "the library chooses an algorithm, which may split the depth, for this shape and by timing", times=run.times,
        )  # fmt: skip
    else:
        yield Reduction(
            *names, "unknown", _kernel_name(operation) or target, dtype, None, "", False, (ROWS, MESH),
            "the call says nothing of the order in which it adds", times=run.times,
        )  # fmt: skip


@dataclass(frozen=True)
class StatedOrder:
    """What a custom call states about its sums."""

    name: str
    exact: bool  # whether their order never matters
    words: str  # chunk sizes
    depends: tuple[str, ...]  # as in ``Reduction``


def stated_order(operation: Operation) -> StatedOrder | None:
    """Return the ``order_…`` fields of a custom call's metadata (Pallas's ``metadata``); None if it has none.

    ``order_depends`` lists what the chunk sizes depend on, separated by full stops (``rows.mesh``; empty: nothing), or is ``exact``.
    Every other field is a chunk size, such as ``order_depth``.
    """
    if operation.opcode != "custom-call" or "order_depends" not in operation.attributes:
        return None
    # XLA escapes the JSON's quotation marks as \22 for GPUs, and prints them unchanged for TPUs.
    fields = dict(re.findall(r'order_(\w+)(?:\\22|"): ?(?:\\22|")([\w.]*)', operation.attributes))
    depends = fields.pop("depends")
    words = ", ".join(f"{name} {size}" for name, size in sorted(fields.items()))
    chosen_by = tuple(part for part in depends.split(".") if part)
    return StatedOrder(_kernel_name(operation), depends == "exact", words, chosen_by)


def _kernel_name(operation: Operation) -> str:
    """Return a Pallas kernel's name, the scope in which it was traced; empty for other calls."""
    path = operation.op_name.split("/")
    return path[-2] if len(path) > 1 and path[-1].startswith("pallas_call") else ""


def _adds(program: Program, operation: Operation) -> bool:
    """Whether the combining function adds or multiplies. Other functions give the same result in every order."""
    name = operation.called("to_apply") or operation.called("scatter")
    combine = program.computations.get(name) if name else None
    if combine is None:
        return True
    opcodes = {inner.opcode for inner in combine.operations.values() if any(is_float(s.dtype) for s in inner.shapes)}
    return bool(opcodes & {"add", "multiply", "subtract", "fusion", "call", "custom-call"})


def _depth(computation: Computation, operation: Operation) -> int | None:
    """Return the number of terms per element; None if unknown."""
    shapes = [
        computation.operations[name].shapes[0] if name in computation.operations else None
        for name in operation.operands
    ]
    if not shapes or shapes[0] is None:
        return None
    if operation.opcode == "dot":
        return _extent(shapes[0], operation.integers_attribute("lhs_contracting_dims"))
    if operation.opcode == "reduce":
        return _extent(shapes[0], operation.integers_attribute("dimensions"))
    if operation.opcode == "reduce-window":
        window = re.search(r"window={size=([\dx]+)", operation.attributes)
        return math.prod(map(int, window.group(1).split("x"))) if window else None
    labels = re.search(r"dim_labels=\w+_(\w+)->", operation.attributes)
    if not labels or len(shapes) < 2 or shapes[1] is None:
        return None
    window = re.search(r"window={size=([\dx]+)", operation.attributes)
    spaces = math.prod(map(int, window.group(1).split("x"))) if window else 1
    features = shapes[1].dims[labels.group(1).index("i")]
    # XLA writes a product's batch dimension as a spatial dimension, of which each output reads one position.
    return features if spaces > 1 and "dilate" in operation.attributes + "stride" else features * spaces


def _extent(shape: Shape, axes: tuple[int, ...]) -> int:
    return math.prod(shape.dims[axis] for axis in axes)
