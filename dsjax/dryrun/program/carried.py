"""Sums that a loop carries from iteration to iteration: ``total = total + part`` for each block, round or layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dsjax.dryrun.program.text import Computation, Operation, Program

_LINEAR = {
    "bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start", "divide", "dynamic-slice", "multiply",
    "negate", "opt-barrier", "reduce-precision", "reshape", "select", "slice", "transpose",
}  # fmt: skip
"""Operations whose result is the carried value itself, scaled, converted or rearranged, or a part of it."""

_Paths = frozenset[bool]
"""Kinds of paths from a carried value to an operation: True if a path has an addition, False if a path has none; empty without a path."""
_NONE: _Paths = frozenset()
_Leaf = Callable[[Operation], _Paths | None]
_Visited = dict[str, _Paths]


def carried_sums(program: Program, loop: Operation) -> tuple[Operation, ...]:
    """Return the operations that add, in floating point, to an element of the tuple that a ``while`` carries; at most one per element."""
    body = program.computations[loop.called("body")]
    if body.root.opcode != "tuple":
        return ()
    results = [body.operations[name] for name in body.root.operands]
    return tuple(result for index, result in enumerate(results) if _is_carried_sum(program, body, result, index))


def _is_carried_sum(program: Program, body: Computation, result: Operation, index: int) -> bool:
    """Whether a float result of a loop's body adds to element ``index`` of the tuple that the body was given."""
    if not result.shapes or not is_float(result.shapes[0].dtype):
        return False

    def carried_value(operation: Operation) -> _Paths | None:
        if operation.opcode != "get-tuple-element" or operation.integer_attribute("index") != index:
            return None
        source = body.operations.get(operation.operands[0])
        return frozenset({False}) if source is not None and source.opcode == "parameter" else None

    return True in _paths(program, body, result.name, carried_value, {})


def is_float(dtype: str) -> bool:
    """Return whether sums of the dtype are rounded, so that their order matters."""
    return dtype.startswith(("f", "bf", "c"))


def _paths(program: Program, computation: Computation, name: str, leaf_paths: _Leaf, visited: _Visited) -> _Paths:
    """Return the kinds of paths to an operation. leaf_paths: returns those of a leaf; None: follow the operation's operands."""
    if name in visited:
        return visited[name]
    visited[name] = _NONE  # until the operands are known
    operation = computation.operations.get(name)
    if operation is not None:
        paths = leaf_paths(operation)
        visited[name] = _operand_paths(program, computation, operation, leaf_paths, visited) if paths is None else paths
    return visited[name]


def _operand_paths(
    program: Program, computation: Computation, operation: Operation, leaf_paths: _Leaf, visited: _Visited
) -> _Paths:
    def through(names: Iterable[str]) -> _Paths:
        return frozenset().union(*(_paths(program, computation, name, leaf_paths, visited) for name in names))

    opcode = operation.opcode
    if opcode in ("add", "subtract"):
        return frozenset({True}) if through(operation.operands) else _NONE
    if opcode in _LINEAR:
        return through(operation.operands)
    if opcode == "dynamic-update-slice":
        return through(operation.operands[:2])
    if opcode == "fusion":
        return _fusion_paths(program, computation, operation, 0, leaf_paths, visited)
    if opcode == "get-tuple-element":
        source = computation.operations.get(operation.operands[0])
        if source is not None and source.opcode == "fusion":
            return _fusion_paths(
                program, computation, source, operation.integer_attribute("index"), leaf_paths, visited
            )
    return _NONE


def _fusion_paths(
    program: Program, computation: Computation, fusion: Operation, result: int, leaf_paths: _Leaf, visited: _Visited
) -> _Paths:
    """Return the kinds of paths to one result of a fusion: through the fused computation to its parameters, then to the operands."""
    fused = program.computations[fusion.called("calls")]
    root = fused.root
    name = root.operands[result] if root.opcode == "tuple" else root.name
    operands = {parameter.name: fusion.operands[place] for place, parameter in enumerate(fused.parameters)}

    def operand_of_parameter(operation: Operation) -> _Paths | None:
        if operation.opcode != "parameter":
            return None
        return _paths(program, computation, operands[operation.name], leaf_paths, visited)

    return _paths(program, fused, name, operand_of_parameter, {})
