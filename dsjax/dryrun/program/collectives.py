"""Collectives of a compiled program: kind, mesh axes, bytes, number of runs, and overlap with other operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsjax.dryrun.program.asynchronous import COLLECTIVES, collective_of, is_done, is_start, start_of
from dsjax.dryrun.program.groups import Groups, mesh_axes, replica_groups, source_target_pairs
from dsjax.dryrun.program.text import Operation, Program, Shape, item_bits
from dsjax.dryrun.program.walk import Executed, TripCount, executed


@dataclass(frozen=True)
class ProgramCollective:
    """One collective operation of a program, on one device."""

    name: str
    kind: str  # HLO's name
    axes: tuple[str, ...] | None  # mesh axes it runs along, None if its groups follow no axes
    ranks: int  # devices in a group
    neighbours: int  # how many of them are on one host, including the device itself
    operand: tuple[Shape, ...]  # its input arrays, in the dtype before the backend widened them (see ``true_dtypes``)
    times: float  # runs in one run of the program
    data_dependent: bool  # see ``Executed``
    # bytes per run that a device sends to its own host, the maximum over devices. Every device sends directly to every other; a ring sends
    # as many bytes in total. For ``ragged-all-to-all``: the upper bound of the mean over devices
    bytes_inside: int
    bytes_between: int  # the same to other hosts
    asynchronous: bool  # whether it is a start / done pair of the schedule
    beside: tuple[str, ...]  # operations scheduled between the two
    op_name: str  # the model's scopes; empty if XLA created the operation

    @property
    def participants(self) -> str:
        """The participants as text: the mesh axes, or else the number of ranks if all are on one host or each is on another host."""
        if self.axes is not None:
            return "×".join(self.axes)
        if not (self.bytes_inside and self.bytes_between):
            return f"{self.ranks} of a host" if self.bytes_inside else f"{self.ranks} hosts"
        return "?"

    @property
    def operand_bytes(self) -> int:
        """Bytes of a device's operands."""
        return sum(shape.nbytes for shape in self.operand)

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends per run."""
        return self.bytes_inside + self.bytes_between


def program_collectives(
    program: Program,
    mesh: Mapping[str, int],
    *,
    host_devices: int,
    dtypes: TrueDtypes | None = None,
    trip_count: TripCount = lambda loop: None,
) -> tuple[ProgramCollective, ...]:
    """Return the collectives in schedule order.

    mesh: axis → size, major first. host_devices: number of consecutive devices in the flattened mesh that share a host's fast links.
    dtypes: of the arrays before the backend widened them (``true_dtypes``).
    """
    devices = 1
    for size in mesh.values():
        devices *= size
    collectives = []
    for run in executed(program, trip_count):
        collective = collective_of(program, run.operation)
        if collective is None or run.times == 0:
            continue
        kind, inner = collective
        groups = (
            source_target_pairs(inner.attributes)
            if kind == "collective-permute"
            else replica_groups(inner.attributes, devices)
        )
        if kind != "collective-permute" and max(map(len, groups), default=1) < 2:
            continue
        operand = _operand(run, inner, kind, dtypes)
        inside, between = _most_sent(kind, groups, _sendable_bytes(run, kind, operand), host_devices)
        beside = _operations_until_done(program, run)
        collectives.append(
            ProgramCollective(
                name=run.operation.name,
                kind=kind,
                axes=_permutation_axes(groups, mesh) if kind == "collective-permute" else mesh_axes(groups, mesh),
                ranks=2 if kind == "collective-permute" else max(map(len, groups)),
                neighbours=_fewest_on_host(groups, host_devices),
                operand=operand,
                times=run.times,
                data_dependent=run.data_dependent,
                bytes_inside=inside,
                bytes_between=between,
                asynchronous=beside is not None,
                beside=beside or (),
                op_name=inner.op_name or run.operation.op_name,
            )
        )
    return tuple(collectives)


TrueDtypes = Mapping[tuple[str, int, int], str]
"""``(kind, channel, elements of the result)`` → dtype."""


def true_dtypes(partitioned: Program) -> TrueDtypes:
    """Return the collectives' dtypes in a partitioned program, before a backend widens 16- and 8-bit floats.

    Compiler passes keep a collective's kind and channel, and its number of elements unless they combine collectives.
    """
    dtypes: dict[tuple[str, int, int], str] = {}
    ambiguous = set()
    for computation in partitioned.computations.values():
        for operation in computation.operations.values():
            if operation.opcode not in COLLECTIVES or operation.channel is None:
                continue
            key = (operation.opcode, operation.channel, _elements(operation))
            if dtypes.setdefault(key, operation.shapes[0].dtype) != operation.shapes[0].dtype:
                ambiguous.add(key)
    return {key: dtype for key, dtype in dtypes.items() if key not in ambiguous}


def _operand(run: Executed, inner: Operation, kind: str, dtypes: TrueDtypes | None) -> tuple[Shape, ...]:
    """Return the input arrays, with sizes from the operands, and dtypes from before the backend's changes where known."""
    known = run.computation.operations
    names = run.operation.operands[:1] if kind == "ragged-all-to-all" else run.operation.operands
    shapes = tuple(shape for name in names for shape in known[name].shapes)
    dtype = dtypes.get((kind, inner.channel or 0, _elements(inner))) if dtypes else None
    if dtype is None:
        return shapes
    return tuple(Shape(dtype, s.dims, s.space) if item_bits(dtype) < item_bits(s.dtype) else s for s in shapes)


def _sendable_bytes(run: Executed, kind: str, operand: tuple[Shape, ...]) -> int:
    """Return the bytes of the operand that can be sent, including the device's part for itself.

    A ragged exchange has buffers for the worst case. In total, devices send as much as they receive, so the mean over devices is at
    most the smaller of the two buffers.
    """
    size = sum(shape.nbytes for shape in operand)
    if kind != "ragged-all-to-all":
        return size
    return min(size, run.computation.operations[run.operation.operands[1]].nbytes)


def _elements(operation: Operation) -> int:
    return sum(shape.size for shape in operation.shapes)


def _most_sent(kind: str, groups: Groups, operand: int, host_devices: int) -> tuple[int, int]:
    """Return the bytes to the same host and to other hosts, for the device that sends most to other hosts."""

    def host(device: int) -> int:
        return device // host_devices

    if kind == "collective-permute":
        pairs = [(int(host(a) == host(b)) * operand, int(host(a) != host(b)) * operand) for a, b in groups if a != b]
        return max(pairs, key=lambda pair: (pair[1], pair[0]), default=(0, 0))
    most = (0, 0)
    for group in groups:
        if kind in ("all-gather", "collective-broadcast"):
            to_one = operand
        else:
            to_one = (2 if kind == "all-reduce" else 1) * operand / len(group)
        counts: dict[int, int] = {}
        for device in group:
            counts[host(device)] = counts.get(host(device), 0) + 1
        for on_host in counts.values():
            sent = round(to_one * (on_host - 1)), round(to_one * (len(group) - on_host))
            most = max(most, sent, key=lambda pair: (pair[1], pair[0]))
    return most


def _fewest_on_host(groups: Groups, host_devices: int) -> int:
    """Return the fewest members of a group on one host: that host's NICs carry the most per member."""
    fewest = []
    for group in groups:
        hosts = [device // host_devices for device in group]
        fewest.append(min(hosts.count(host) for host in set(hosts)))
    return min(fewest, default=1)


def _permutation_axes(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the axes whose index a permutation changes."""
    changed = set()
    for source, target in pairs:
        for axis in reversed(mesh):
            if source % mesh[axis] != target % mesh[axis]:
                changed.add(axis)
            source, target = source // mesh[axis], target // mesh[axis]
    return tuple(axis for axis in mesh if axis in changed)


def _operations_until_done(program: Program, run: Executed) -> tuple[str, ...] | None:
    """Return the names of the operations scheduled between a start and its done; None for a synchronous collective."""
    if not is_start(program, run.operation):
        return None
    scheduled = list(run.computation.operations.values())
    names: list[str] = []
    for operation in scheduled[scheduled.index(run.operation) + 1 :]:
        if is_done(program, operation) and start_of(program, run.computation, operation) == run.operation.name:
            break
        if operation.opcode not in _FREE:
            names.append(operation.name)
    return tuple(names)


_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
