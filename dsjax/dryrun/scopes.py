"""Parts of the model: the named scopes in the paths that JAX traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sharding.program import Operation, Program
from sharding.program.text import Computation

_MADE_BY_JAX = ("while", "body", "closed_call", "shard_map", "jit(", "eval_jaxpr", "cond", "branch", "checkpoint")
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

    An operation that XLA made up belongs to what it takes its operands from, or else to what uses it; between a part and a
    part of that part, to the whole. ``(copy)`` and the like where neither tells.
    """
    found: dict[Operation, str] = {}
    for computation in program.computations.values():
        for operation in computation.operations.values():
            name = operation.op_name or _inside(program, operation)
            found[operation] = model_part(name) if name else _beside(program, computation, operation)
    return found


def _inside(program: Program, operation: Operation) -> str:
    """The path of a fusion's own operations, its result's first."""
    names = _fused(program, operation)
    return next((name for name in names if "/" in name), "")


def _fused(program: Program, operation: Operation) -> list[str]:
    called = operation.computation("calls")
    if called not in program.computations:
        return []
    inner = program.computations[called]
    return [inner.root.op_name, *(one.op_name for one in inner.operations.values())]


def _beside(program: Program, computation: Computation, operation: Operation) -> str:
    def producer(one: Operation) -> Operation | None:
        return next((computation.operations[name] for name in one.operands if name in computation.operations), None)

    def user(one: Operation) -> Operation | None:
        return next(iter(computation.users.get(one.name, ())), None)

    before, after = (_first_named(operation, step) for step in (producer, user))
    if before is None:
        return model_part(after.op_name) if after else f"({operation.opcode})"
    part = model_part(before.op_name)
    wholes = [model_part(name) for name in (after.op_name, *_fused(program, after))] if after else []
    return next((whole for whole in wholes if part.startswith(f"{whole}/")), part)


def _first_named(operation: Operation, step: Callable[[Operation], Operation | None]) -> Operation | None:
    """The nearest operation with a path, going from one to the next."""
    at = step(operation)
    for _ in range(_FAR):
        if at is None or "/" in at.op_name:
            return at
        at = step(at)
    return None
