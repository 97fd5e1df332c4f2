"""Trip counts of ``while`` loops, from XLA's ``known_trip_count`` or from a counter that runs up to a constant."""

from __future__ import annotations

from dsjax.dryrun.program.text import Computation, Operation, Program

_COPIES = ("bitcast", "copy", "copy-done", "copy-start", "reshape")


def known_trip_count(program: Program, computation: Computation, loop: Operation) -> int | None:
    """Return the trip count of a loop of ``computation``; None if it depends on values.

    GPU and CPU programs carry XLA's ``known_trip_count``. In TPU programs, which do not, the condition compares a
    counter with a constant, and the body adds one to the counter, which starts at a constant.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = (program.computations[loop.called(part)] for part in ("condition", "body"))
    compared = condition.root
    if compared.opcode != "compare" or "direction=LT" not in compared.attributes:
        return None
    counter, limit = (_origin(condition, name) for name in compared.operands)
    if counter is None or limit is None or counter.opcode != "get-tuple-element":
        return None
    index = counter.integer_attribute("index")
    before = _element(computation, loop.operands[0], index)
    first = _integer(before)
    last = _integer(limit)
    if limit.opcode == "get-tuple-element" and _is_unchanged(body, limit.integer_attribute("index")):
        last = _integer(_element(computation, loop.operands[0], limit.integer_attribute("index")))
    if first is None or last is None or not _adds_one(body, index):
        return None
    return max(0, last - first)


def _origin(computation: Computation, name: str) -> Operation | None:
    """Return the operation that produced a value, looking through copies, bitcasts and reshapes."""
    operation = computation.operations.get(name)
    while operation is not None and operation.opcode in _COPIES:
        operation = computation.operations.get(operation.operands[0])
    return operation


def _element(computation: Computation, name: str, index: int) -> Operation | None:
    producer = computation.operations[name]
    return _origin(computation, producer.operands[index]) if producer.opcode == "tuple" else None


def _integer(operation: Operation | None) -> int | None:
    if operation is None or operation.opcode != "constant":
        return None
    return int(operation.arguments_text) if operation.arguments_text.lstrip("-").isdigit() else None


def _is_unchanged(body: Computation, index: int) -> bool:
    """Whether the body returns an element of its tuple unchanged."""
    operation = _element(body, body.root.name, index)
    return (
        operation is not None
        and operation.opcode == "get-tuple-element"
        and operation.integer_attribute("index") == index
    )


def _adds_one(body: Computation, index: int) -> bool:
    added = _element(body, body.root.name, index)
    if added is None or added.opcode != "add":
        return False
    terms = [_origin(body, name) for name in added.operands]
    counters = [term for term in terms if term is not None and term.opcode == "get-tuple-element"]
    indices = [counter.integer_attribute("index") for counter in counters]
    return indices == [index] and 1 in map(_integer, terms)
