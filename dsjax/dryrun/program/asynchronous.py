"""Start/done pairs of asynchronous operations in the schedules of GPU and TPU programs.

GPU: ``all-gather-start`` and ``all-gather-done``, or ``async-start`` of a computation. TPU: a fusion with the collective and a
custom call ``AsyncCollectiveStart``, a fusion with ``AsyncCollectiveDone``, and between them fusions that compute while they advance
the collective, each with a copy of it that has the same channel.
"""

from __future__ import annotations

from dsjax.dryrun.program.text import Computation, Operation, Program

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'
_BETWEEN = "async_collective_fusion"


def collective_of(program: Program, operation: Operation) -> tuple[str, Operation] | None:
    """Return ``(kind, the operation with the groups)`` if the operation starts or runs a collective, else None (also for a done)."""
    name = operation.opcode.removesuffix("-start")
    if name in COLLECTIVES:
        return name, operation
    if operation.opcode == "async-start":
        root = program.computations[operation.called("calls")].root
        return (root.opcode, root) if root.opcode in COLLECTIVES else None
    if operation.opcode == "fusion" and not is_done(program, operation):
        inner = program.computations[operation.called("calls")]
        collectives = [fused for fused in inner.operations.values() if fused.opcode in COLLECTIVES]
        if collectives and not inner.name.startswith(_BETWEEN):
            return collectives[0].opcode, collectives[0]
    return None


def is_start(program: Program, operation: Operation) -> bool:
    """Return whether a later ``done`` waits for the operation."""
    return operation.opcode.endswith("-start") or _calls(program, operation, _START)


def is_done(program: Program, operation: Operation) -> bool:
    """Return whether the operation waits for an earlier ``start``."""
    return operation.opcode.endswith("-done") or _calls(program, operation, _DONE)


def start_of(program: Program, computation: Computation, done: Operation) -> str:
    """Return the name of the ``start`` in the same computation that a ``done`` waits for; without one, the name of its operand."""
    if done.opcode == "fusion":
        channel = _channel(program, done)
        for operation in computation.operations.values():
            if _calls(program, operation, _START) and _channel(program, operation) == channel:
                return operation.name
    start = computation.operations.get(done.operands[0])
    while start is not None and start.opcode.endswith("-update"):
        start = computation.operations.get(start.operands[0])
    return start.name if start is not None else done.operands[0]


def _calls(program: Program, operation: Operation, target: str) -> bool:
    if operation.opcode != "fusion":
        return False
    root = program.computations[operation.called("calls")].root
    return root.opcode == "custom-call" and target in root.attributes


def _channel(program: Program, operation: Operation) -> int | None:
    inner = program.computations[operation.called("calls")]
    return next((fused.channel for fused in inner.operations.values() if fused.opcode in COLLECTIVES), None)
