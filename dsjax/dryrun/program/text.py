"""HLO text as data: computations, operations, shapes. Reads what ``Compiled.as_text()`` prints, for any backend.

The text is XLA's own long form: one operation a line, ``%name = shape opcode(operands), attribute=value, …``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_ITEM_BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (4, 8, 16, 32, 64)} | {
    f"f{b}": b for b in (16, 32, 64)
}
# A bound of a dynamic dimension is printed as "<=8", an unbounded dimension as "?".
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ?]*)\](?:{([\d,]*)[^}]*})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_METADATA_LINES = re.compile(r'\n(?="|\}\})')
"""Line ends within a TPU kernel's metadata, which is printed over several lines."""


class ProgramTextError(ValueError):
    """The text is not a program in XLA's format."""


@dataclass(frozen=True)
class Shape:
    """One array."""

    dtype: str  # XLA's name: ``bf16``, ``f8e4m3fn``, ``pred``
    dims: tuple[int, ...]
    space: int = 0  # memory space: 0 is the device's main memory, others are a TPU core's own
    layout: tuple[int, ...] = field(default=(), compare=False)  # dimensions from minor to major; empty if not printed

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for dim in self.dims:
            size *= dim
        return size

    @property
    def nbytes(self) -> int:
        """Bytes, without layout padding."""
        return -(-self.size * item_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def item_bits(dtype: str) -> int:
    """Bits of one element."""
    if dtype in _ITEM_BITS:
        return _ITEM_BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    if dtype.startswith("f4"):
        return 4
    raise ProgramTextError(f"dtype {dtype!r} in a program's text; expected one of {', '.join(_ITEM_BITS)}, f8…, f4…")


@dataclass(frozen=True, eq=False)
class Operation:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the result's arrays, in order (several for a tuple)
    operands: tuple[str, ...]  # names in the same computation
    attributes: str  # the rest of the line, as printed
    arguments_text: str  # text between the parentheses: operands, a constant's value, a parameter's number
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the result in the device's main memory."""
        return sum(shape.nbytes for shape in self.shapes if not shape.space)

    @cached_property
    def op_name(self) -> str:
        """Path of named scopes and transformations from JAX's trace; empty if XLA created the operation."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def channel(self) -> int | None:
        """Channel id, which the parts of a collective share and compiler passes keep."""
        return self.integer_attribute("channel_id")

    def integer_attribute(self, attribute: str) -> int | None:
        """Return an integer attribute, or None."""
        match = re.search(rf"\b{attribute}=(\d+)", self.attributes)
        return int(match.group(1)) if match else None

    def integers_attribute(self, attribute: str) -> tuple[int, ...]:
        """Return a list attribute such as ``dimensions={0,1}``; empty if missing."""
        match = re.search(rf"\b{attribute}={{([\d,]*)}}", self.attributes)
        return tuple(int(part) for part in match.group(1).split(",") if part) if match else ()

    def called(self, attribute: str) -> str | None:
        """Return the name of a called computation: ``calls``, ``to_apply``, ``body``, ``condition``."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations that a ``conditional`` chooses among."""
        match = re.search(r"branch_computations={([^}]*)}", self.attributes)
        if match:
            return tuple(part.strip().lstrip("%") for part in match.group(1).split(","))
        pair = self.called("true_computation"), self.called("false_computation")
        return tuple(name for name in pair if name)

    @property
    def trip_count(self) -> int | None:
        """Trip count of a ``while``, if XLA has determined it."""
        match = re.search(r'"known_trip_count":\s*{"n":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else None


@dataclass(frozen=True, eq=False)
class Computation:
    """Operations by name, in printed order, which is the schedule order in a compiled program."""

    name: str
    operations: Mapping[str, Operation]

    @cached_property
    def root(self) -> Operation:
        """The operation whose result is the computation's."""
        roots = [operation for operation in self.operations.values() if operation.is_root]
        return roots[0] if roots else next(reversed(self.operations.values()))

    @cached_property
    def parameters(self) -> tuple[Operation, ...]:
        """``parameter(0)``, ``parameter(1)``, …"""
        parameters = [operation for operation in self.operations.values() if operation.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda operation: int(operation.arguments_text)))

    @cached_property
    def users(self) -> Mapping[str, tuple[Operation, ...]]:
        """Name → the operations that read it."""
        users: dict[str, list[Operation]] = {}
        for operation in self.operations.values():
            for operand in dict.fromkeys(operation.operands):
                users.setdefault(operand, []).append(operation)
        return {name: tuple(operations) for name, operations in users.items()}


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled program, parsed from its text."""

    computations: Mapping[str, Computation]
    entry: Computation

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parse ``Compiled.as_text()``.

        Raises:
            ProgramTextError: no entry computation, or a line that is not in XLA's format.
        """
        computations: dict[str, Computation] = {}
        operations: dict[str, Operation] = {}
        entry = name = None  # name: of the computation that the line belongs to
        for line in _METADATA_LINES.sub(" ", text).splitlines():
            if name is None:
                header = _COMPUTATION.match(line)
                if header:
                    name = header.group(2)
                    operations = {}
                    entry = name if header.group(1) else entry
            elif line.startswith("}"):
                computations[name] = Computation(name, operations)
                name = None
            else:
                operation = _parse_operation(line)
                operations[operation.name] = operation
        if entry is None or entry not in computations:
            raise ProgramTextError("found no ENTRY computation; expected the text of a compiled program")
        return cls(computations, computations[entry])


def _parse_operation(line: str) -> Operation:
    match = _OPERATION.match(line)
    if not match:
        raise ProgramTextError(f"cannot read the line {line[:120]!r} as an operation")
    root, name, result = match.groups()
    end = _closing(result, 0) + 1 if result.startswith("(") else result.index(" ")
    call = result[end:].lstrip()
    opcode = _OPCODE.match(call)
    if not opcode:
        raise ProgramTextError(f"cannot find the opcode in {line[:120]!r}")
    close = _closing(call, opcode.end() - 1)
    arguments = call[opcode.end() : close]
    return Operation(
        name=name,
        opcode=opcode.group(1),
        shapes=_shapes(result[:end]),
        operands=tuple(_NAME.findall(arguments)),
        attributes=call[close + 1 :].lstrip(", "),
        arguments_text=arguments,
        is_root=bool(root),
    )


def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for match in _SHAPE.finditer(text):
        dtype, dims, layout = match.groups()
        space = _SPACE.search(match.group())
        shapes.append(
            Shape(
                dtype,
                dims=tuple(int(dim.lstrip("<= ")) for dim in dims.split(",") if dim),
                space=int(space.group(1)) if space else 0,
                layout=tuple(int(dim) for dim in (layout or "").split(",") if dim),
            )
        )
    return tuple(shapes)


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at ``start``, ignoring those in strings."""
    depth = 0
    is_quoted = False
    for index in range(start, len(text)):
        char = text[index]
        if char == '"' and text[index - 1] != "\\":
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if not depth:
                return index
    raise ProgramTextError(f"unbalanced parentheses in {text[:120]!r}")
