"""Parts of the model: the named scopes in the paths that JAX traced."""

from __future__ import annotations

from collections.abc import Mapping

from sharding.program import Operation, Program
from sharding.program.text import Computation

_MADE_BY_JAX = ("while", "body", "closed_call", "shard_map", "jit(", "cond", "branch", "checkpoint")
_FAR = 6
"""Operations between one without a name and the one that it takes its name from, at most."""


def model_part(op_name: str) -> str:
    """The model's own scopes in a path: ``jit(run)/while/body/closed_call/mla_output/dot_general`` → ``mla_output``.

    An operation outside all scopes is known by its primitive: ``(dynamic_slice)``.
    """
    parts = [p for p in op_name.split("/")[:-1] if not p.startswith(_MADE_BY_JAX) and "->" not in p]
    return "/".join(parts) or f"({op_name.split('/')[-1]})"


def parts_of(program: Program) -> Mapping[Operation, str]:
    """Operation → part of the model.

    An operation that XLA made up belongs to what it takes its operands from, or else to what uses it: ``(copy)`` and the
    like where neither tells.
    """
    found: dict[Operation, str] = {}
    for computation in program.computations.values():
        for operation in computation.operations.values():
            name = operation.op_name or _inside(program, operation) or _neighbour(computation, operation)
            found[operation] = model_part(name) if name else f"({operation.opcode})"
    return found


def _inside(program: Program, operation: Operation) -> str:
    """A fusion's own operations, its result's first."""
    called = operation.computation("calls")
    if called not in program.computations:
        return ""
    inner = program.computations[called]
    names = [inner.root.op_name, *(one.op_name for one in inner.operations.values())]
    return next((name for name in names if "/" in name), "")


def _neighbour(computation: Computation, operation: Operation) -> str:
    before, after = operation, operation
    for _ in range(_FAR):
        before = next((computation.operations[n] for n in before.operands if n in computation.operations), None)
        if before is None:
            break
        if "/" in before.op_name:
            return before.op_name
    for _ in range(_FAR):
        after = next(iter(computation.users.get(after.name, ())), None)
        if after is None:
            break
        if "/" in after.op_name:
            return after.op_name
    return ""
