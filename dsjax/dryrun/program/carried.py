"""Sums that a loop carries from iteration to iteration: ``total = total + part`` for each block, round or layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsjax.dryrun.program.text import Computation, Operation, Program

_LINEAR = {
    "bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start", "divide", "dynamic-slice", "multiply",
    "negate", "opt-barrier", "reduce-precision", "reshape", "select", "slice", "transpose",
}  # fmt: skip
"""Operations that pass on a carried value unchanged, scaled or in part."""

_Paths = frozenset[bool]
"""Paths from a carried value to an element: True for a path with an addition, False for one without."""
_NONE: _Paths = frozenset()


def carried_sums(program: Program, loop: Operation) -> tuple[Operation, ...]:
    """Return the operations that add, in floating point, to elements of a ``while``'s tuple, one per element."""
    body = program.computations[loop.computation("body")]
    root = body.root
    if root.opcode != "tuple":
        return ()
    found = []
    for index, name in enumerate(root.operands):
        made = body.operations[name]
        if not made.shapes or not is_float(made.shapes[0].dtype):
            continue

        def carried(operation: Operation, index: int = index) -> _Paths | None:
            if operation.opcode != "get-tuple-element" or operation.number("index") != index:
                return None
            source = body.operations.get(operation.operands[0])
            return frozenset({False}) if source is not None and source.opcode == "parameter" else None

        if True in _paths(program, body, name, carried, {}):
            found.append(made)
    return tuple(found)


def is_float(dtype: str) -> bool:
    """Return whether sums of the dtype are rounded, so that their order matters."""
    return dtype.startswith(("f", "bf", "c"))


def _paths(
    program: Program,
    computation: Computation,
    name: str,
    leaf: Callable[[Operation], _Paths | None],
    known: dict[str, _Paths],
) -> _Paths:
    if name in known:
        return known[name]
    known[name] = _NONE  # during the visit
    operation = computation.operations.get(name)
    result = _NONE
    if operation is not None:
        ended = leaf(operation)
        result = _of(program, computation, operation, leaf, known) if ended is None else ended
    known[name] = result
    return result


def _of(program, computation, operation, leaf, known) -> _Paths:
    def come(names) -> _Paths:
        return frozenset().union(*(_paths(program, computation, name, leaf, known) for name in names))

    opcode = operation.opcode
    if opcode in ("add", "subtract"):
        return frozenset({True}) if come(operation.operands) else _NONE
    if opcode in _LINEAR:
        return come(operation.operands)
    if opcode == "dynamic-update-slice":
        return come(operation.operands[:2])
    if opcode == "fusion":
        return _inside(program, computation, operation, 0, leaf, known)
    if opcode == "get-tuple-element":
        source = computation.operations.get(operation.operands[0])
        if source is not None and source.opcode == "fusion":
            return _inside(program, computation, source, operation.number("index"), leaf, known)
    return _NONE


def _inside(program, computation, fusion, result: int, leaf, known: Mapping[str, _Paths]) -> _Paths:
    """Follow one result of a fusion through the fusion's parameters to its operands."""
    inner = program.computations[fusion.computation("calls")]
    root = inner.root
    name = root.operands[result] if root.opcode == "tuple" else root.name
    places = {parameter.name: place for place, parameter in enumerate(inner.parameters)}

    def outside(operation: Operation) -> _Paths | None:
        if operation.opcode != "parameter":
            return None
        return _paths(program, computation, fusion.operands[places[operation.name]], leaf, known)

    return _paths(program, inner, name, outside, {})
