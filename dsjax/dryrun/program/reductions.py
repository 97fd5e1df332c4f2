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
    """One sum on one device.

    name: the scheduled operation. op_name: where JAX traced it. carrier, what: what computes the sum: a ``kernel`` by its name, a
    ``library`` by its call, a ``product`` or ``reduce`` that the compiler tiles, a ``scatter``, a ``collective`` by its kind, a
    ``loop`` that carries the sum across iterations, or an ``unknown`` call.
    dtype: of the result. depth: terms per element on this device; None if unknown or dependent on values.
    order: the order as far as the program states it. is_complete: whether that is all, so that programs with equal ``order`` add alike.
    depends: what the order may depend on (``MESH`` …); empty if the program's text fixes the order. why: the reason, as text.
    axes: mesh axes of a collective. times: executions per run of the program.
    """

    name: str
    op_name: str
    carrier: Carrier
    what: str
    dtype: str
    depth: int | None
    order: str
    is_complete: bool
    depends: tuple[str, ...]
    why: str
    axes: tuple[str, ...] | None = None
    times: float = 1.0

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
    found: list[Reduction] = []
    for one in executed(program):
        if one.times:
            found.extend(_operation_sums(program, one, mesh, devices, platform))
    return tuple(found)


def _operation_sums(
    program: Program, one: Executed, mesh: Mapping[str, int], devices: int, platform: Platform
) -> Iterator[Reduction]:
    operation = one.operation
    collective = collective_of(program, operation)
    if collective:
        if collective[0] in ("all-reduce", "reduce-scatter"):
            yield from _collective_sums(program, one, *collective, mesh, devices)
        return
    if operation.opcode == "while":
        yield from _loop_sums(program, one)
    elif operation.opcode == "custom-call":
        yield from _call_sums(one)
    elif operation.opcode == "fusion":
        inner = program.computations[operation.computation("calls")]
        yield from _fusion_sums(program, one, inner, tiling_of(program, operation, platform), platform)
    else:
        yield from _arithmetic_sums(program, one, one.computation, operation, NO_TILING, platform)


def _fusion_sums(program: Program, one: Executed, inner: Computation, tiling: Tiling, platform: Platform):
    for operation in inner.operations.values():
        if operation.opcode == "fusion":
            nested = program.computations[operation.computation("calls")]
            yield from _fusion_sums(program, one, nested, tiling.around(operation), platform)
        elif operation.opcode == "custom-call":
            yield from _call_sums(Executed(operation, inner, one.times, one.data_dependent))
        else:
            yield from _arithmetic_sums(program, one, inner, operation, tiling, platform)


def _arithmetic_sums(
    program: Program, one: Executed, computation: Computation, operation: Operation, tiling: Tiling, platform: Platform
):
    """Yield the sum of a product, a reduction, a window reduction or a scatter, by itself or inside a fusion."""
    opcode = operation.opcode
    if opcode not in (*_PRODUCTS, "reduce", "reduce-window", "scatter", "select-and-scatter") or not operation.shapes:
        return
    dtype = operation.shapes[0].dtype
    if not is_float(dtype):
        return
    if opcode == "scatter" or opcode == "select-and-scatter":
        yield from _scatter_sums(program, one, operation, platform)
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
        depends, why, is_complete = (), "one thread adds in sequence", True
    else:
        depends, is_complete = (COMPILER,), tiling.is_complete and bool(order)
        why = (
            "the compiler tiles it for this shape"
            if is_complete
            else "the compiler tiles it for this shape, and the program does not tell how"
        )
    yield Reduction(
        one.operation.name, operation.op_name or one.operation.op_name, carrier, what, dtype, depth, order, is_complete,
        depends, why, times=one.times,
    )  # fmt: skip


def _traced_as_product(operation: Operation) -> bool:
    return operation.op_name.rpartition("/")[2].startswith("dot_general")


def _scatter_sums(program: Program, one: Executed, operation: Operation, platform: Platform):
    if not _adds(program, operation):
        return
    unique = "unique_indices=true" in operation.attributes
    if unique:
        order, depends, why = "one term for each place", (), "each place is added to once"
    elif platform == "gpu":
        order, depends, why = (
            "atomic",
            (TIMING, ROWS),
            "threads add with atomic operations, in the order in which they come",
        )
    else:
        order, depends, why = "in the order of the updates", (ROWS,), "updates of other rows stand between a row's own"
    yield Reduction(
        one.operation.name, operation.op_name or one.operation.op_name, "scatter", operation.opcode, operation.shapes[0].dtype,
        1 if unique else None, order, True, depends, why, times=one.times,
    )  # fmt: skip


def _collective_sums(
    program: Program, one: Executed, kind: str, inner: Operation, mesh: Mapping[str, int], devices: int
) -> Iterator[Reduction]:
    groups = replica_groups(inner.attributes, devices)
    ranks = max(map(len, groups), default=1)
    shapes = [shape for shape in inner.shapes if is_float(shape.dtype)]
    if ranks < 2 or not shapes or not _adds(program, inner):
        return
    yield Reduction(
        one.operation.name, inner.op_name or one.operation.op_name or _path_of_operand(one, kind), "collective",
        f"{kind} of masked values" if _is_masked(program, one) else kind,
        shapes[0].dtype, ranks, "", False, (MESH,),
        f"as many terms as devices ({ranks}), added in the order of the collective's algorithm",
        axes=mesh_axes(groups, mesh), times=one.times,
    )  # fmt: skip


def _is_masked(program: Program, one: Executed) -> bool:
    """Whether each device contributes either a value or zero to a collective, for example if only one device has the value."""
    if not one.operation.operands:
        return False
    computation, operation = one.computation, one.computation.operations.get(one.operation.operands[0])
    while operation is not None:
        if operation.opcode == "fusion":
            computation = program.computations[operation.computation("calls")]
            operation = computation.root
        elif operation.opcode in ("bitcast", "copy", "convert", "reshape"):
            operation = computation.operations.get(operation.operands[0])
        else:
            break
    if operation is None or operation.opcode != "select":
        return False
    branches = [computation.operations.get(name) for name in operation.operands[1:]]
    sources = [computation.operations.get(b.operands[0]) if b and b.opcode == "broadcast" else b for b in branches]
    return any(s is not None and s.opcode == "constant" and s.literal in ("0", "-0") for s in sources)


def _path_of_operand(one: Executed, kind: str) -> str:
    """Name a collective that the compiler derived from another by its operand's scope and its kind; empty if no scope is found."""
    pending, seen = list(one.operation.operands), set()
    while pending:
        operation = one.computation.operations.get(pending.pop(0))
        if operation is None or operation.name in seen or len(seen) > _MAX_VISITED:
            continue
        if operation.op_name:
            return f"{operation.op_name.rpartition('/')[0]}/{kind}"
        seen.add(operation.name)
        pending.extend(operation.operands)
    return ""


def _loop_sums(program: Program, one: Executed) -> Iterator[Reduction]:
    sums = carried_sums(program, one.operation)
    if not sums:
        return
    trips = known_trip_count(program, one.computation, one.operation)
    if trips == 1:
        return
    for dtype in dict.fromkeys(made.shapes[0].dtype for made in sums):
        yield Reduction(
            one.operation.name, one.operation.op_name, "loop", "sum carried from turn to turn", dtype, trips, "turn by turn", True,
            () if trips is not None else (VALUES,),
            "one turn after the other" if trips is not None else "as many turns as values ask for, of which the text tells no number",
            times=one.times,
        )  # fmt: skip


def _call_sums(one: Executed) -> Iterator[Reduction]:
    operation = one.operation
    target, dtype = call_target(operation), operation.shapes[0].dtype if operation.shapes else ""
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
            *names, "kernel", stated.name, dtype, None, stated.words, True, stated.depends, why, times=one.times
        )  # fmt: skip
    elif target in _MOVING_CALLS or not any(is_float(shape.dtype) for shape in operation.shapes):
        return
    elif _LIBRARIES.search(target):
        contracting = gemm_dimensions(one.computation, operation)
        left = one.computation.operations.get(operation.operands[0]) if operation.operands else None
        depth = _extent(left.shapes[0], contracting) if contracting and left is not None else None
        yield Reduction(
            *names, "library", target, dtype, depth, "", False, (LIBRARY, ROWS),
            "the library chooses an algorithm, which may split the depth, for this shape and by timing", times=one.times,
        )  # fmt: skip
    else:
        yield Reduction(
            *names, "unknown", _kernel_name(operation) or target, dtype, None, "", False, (ROWS, MESH),
            "the call says nothing of the order in which it adds", times=one.times,
        )  # fmt: skip


@dataclass(frozen=True)
class StatedOrder:
    """What a custom call states about its sums. exact: none whose order matters. words: chunk sizes; depends: as in ``Reduction``."""

    name: str
    exact: bool
    words: str
    depends: tuple[str, ...]


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
    name = operation.computation("to_apply") or operation.computation("scatter")
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
        return _extent(shapes[0], operation.integers("lhs_contracting_dims"))
    if operation.opcode == "reduce":
        return _extent(shapes[0], operation.integers("dimensions"))
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
