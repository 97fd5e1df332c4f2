"""Every collective of a compiled program: what it is, along which mesh axes, how many bytes, how often, and whether it overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsjax.dryrun.program.asynchronous import KINDS, collective_of, is_done, is_start, start_of
from dsjax.dryrun.program.groups import Groups, mesh_axes, replica_groups, source_target_pairs
from dsjax.dryrun.program.text import Operation, Program, Shape, item_bits
from dsjax.dryrun.program.walk import Executed, TripCount, executed


@dataclass(frozen=True)
class ProgramCollective:
    """One collective operation of a program, on one device.

    kind: HLO's name. axes: mesh axes it runs along, None where its groups follow none; ranks: how many devices meet;
        neighbours: how many of them are on one host, the device itself among them.
    operand: the arrays it is given, in the dtype in which they were meant to travel (see ``true_dtypes``).
    times: runs in one run of the program; data_dependent: see ``Executed``.
    bytes_inside, bytes_between: what a device sends each time to devices of its own host and to others, the most of any device.
        Every device sends to every other directly; a ring sends as much in all. Of ``ragged-all-to-all`` the most that it can
        be on the mean over devices.
    asynchronous: whether it is a start / done pair of the schedule; beside: scheduled operations between the two.
    op_name: the scopes of the model it belongs to; empty where XLA made it up.
    """

    name: str
    kind: str
    axes: tuple[str, ...] | None
    ranks: int
    neighbours: int
    operand: tuple[Shape, ...]
    times: float
    data_dependent: bool
    bytes_inside: int
    bytes_between: int
    asynchronous: bool
    beside: tuple[str, ...]
    op_name: str

    @property
    def meeting(self) -> str:
        """Who meets, in words: the mesh axes; or how many ranks, where those of a host or one of each are part of an axis."""
        if self.axes is not None:
            return "×".join(self.axes)
        if not (self.bytes_inside and self.bytes_between):
            return f"{self.ranks} of a host" if self.bytes_inside else f"{self.ranks} hosts"
        return "?"

    @property
    def operand_bytes(self) -> int:
        """Bytes that a device puts in."""
        return sum(shape.nbytes for shape in self.operand)

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave a device each time."""
        return self.bytes_inside + self.bytes_between


def program_collectives(
    program: Program,
    mesh: Mapping[str, int],
    *,
    host_devices: int,
    dtypes: TrueDtypes | None = None,
    trip_count: TripCount = lambda loop: None,
) -> tuple[ProgramCollective, ...]:
    """The collectives in the order of the schedule.

    mesh: axis → size, major first. host_devices: how many neighbours in the flattened mesh share a host's fast links.
    dtypes: what the arrays were before the backend widened them (``true_dtypes``).
    """
    devices = 1
    for size in mesh.values():
        devices *= size
    collectives = []
    for one in executed(program, trip_count):
        collective = collective_of(program, one.operation)
        if collective is None or one.times == 0:
            continue
        kind, inner = collective
        groups = (
            source_target_pairs(inner.attributes)
            if kind == "collective-permute"
            else replica_groups(inner.attributes, devices)
        )
        if kind != "collective-permute" and max(map(len, groups), default=1) < 2:
            continue
        operand = _operand(one, inner, kind, dtypes)
        inside, between = _most_sent(kind, groups, _travelling(one, kind, operand), host_devices)
        beside = _beside(program, one)
        collectives.append(
            ProgramCollective(
                name=one.operation.name,
                kind=kind,
                axes=_permutation_axes(groups, mesh) if kind == "collective-permute" else mesh_axes(groups, mesh),
                ranks=2 if kind == "collective-permute" else max(map(len, groups)),
                neighbours=_neighbours(groups, host_devices),
                operand=operand,
                times=one.times,
                data_dependent=one.data_dependent,
                bytes_inside=inside,
                bytes_between=between,
                asynchronous=beside is not None,
                beside=beside or (),
                op_name=inner.op_name or one.operation.op_name,
            )
        )
    return tuple(collectives)


TrueDtypes = Mapping[tuple[str, int, int], str]
"""``(kind, channel, elements of the result)`` → dtype."""


def true_dtypes(partitioned: Program) -> TrueDtypes:
    """The dtypes of the collectives in a program as partitioning left it, before a backend widens 16- and 8-bit floats.

    Passes keep a collective's kind and channel, and its number of elements unless they combine several.
    """
    dtypes: dict[tuple[str, int, int], str] = {}
    ambiguous = set()
    for computation in partitioned.computations.values():
        for operation in computation.operations.values():
            if operation.opcode not in KINDS or operation.channel is None:
                continue
            key = (operation.opcode, operation.channel, _elements(operation))
            if dtypes.setdefault(key, operation.shapes[0].dtype) != operation.shapes[0].dtype:
                ambiguous.add(key)
    return {key: dtype for key, dtype in dtypes.items() if key not in ambiguous}


def _operand(one: Executed, inner: Operation, kind: str, dtypes: TrueDtypes | None) -> tuple[Shape, ...]:
    """The arrays put in, sizes read from the operands, dtypes from before the backend's changes where they are known."""
    known = one.computation.operations
    names = one.operation.operands[:1] if kind == "ragged-all-to-all" else one.operation.operands
    shapes = tuple(shape for name in names for shape in known[name].shapes)
    dtype = dtypes.get((kind, inner.channel or 0, _elements(inner))) if dtypes else None
    if dtype is None:
        return shapes
    return tuple(Shape(dtype, s.dims, s.space) if item_bits(dtype) < item_bits(s.dtype) else s for s in shapes)


def _travelling(one: Executed, kind: str, operand: tuple[Shape, ...]) -> int:
    """Bytes of the operand that can be on their way, the part for the device itself included.

    A ragged exchange has buffers for the worst case. All devices together send what they receive, so that on the mean over
    devices no more can be sent than the smaller of the two buffers holds.
    """
    size = sum(shape.nbytes for shape in operand)
    if kind != "ragged-all-to-all":
        return size
    return min(size, one.computation.operations[one.operation.operands[1]].nbytes)


def _elements(operation: Operation) -> int:
    return sum(shape.size for shape in operation.shapes)


def _most_sent(kind: str, groups: Groups, operand: int, host_devices: int) -> tuple[int, int]:
    """Bytes to the own host and to others, of the device that sends most to others."""

    def host(device: int) -> int:
        return device // host_devices

    if kind == "collective-permute":
        pairs = [(int(host(a) == host(b)) * operand, int(host(a) != host(b)) * operand) for a, b in groups if a != b]
        return max(pairs, key=lambda pair: (pair[1], pair[0]), default=(0, 0))
    most = (0, 0)
    for group in groups:
        to_one = {"all-gather": operand, "collective-broadcast": operand, "all-reduce": 2 * operand / len(group)}.get(
            kind, operand / len(group)
        )
        counts: dict[int, int] = {}
        for device in group:
            counts[host(device)] = counts.get(host(device), 0) + 1
        for here in counts.values():
            sent = round(to_one * (here - 1)), round(to_one * (len(group) - here))
            most = max(most, sent, key=lambda pair: (pair[1], pair[0]))
    return most


def _neighbours(groups: Groups, host_devices: int) -> int:
    """Members of a group that share a host, where they are fewest: whose cards have most to carry for each."""
    fewest = []
    for group in groups:
        hosts = [device // host_devices for device in group]
        fewest.append(min(hosts.count(host) for host in set(hosts)))
    return min(fewest, default=1)


def _permutation_axes(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes whose index a permutation changes."""
    changed = set()
    for source, target in pairs:
        for axis in reversed(mesh):
            if source % mesh[axis] != target % mesh[axis]:
                changed.add(axis)
            source, target = source // mesh[axis], target // mesh[axis]
    return tuple(axis for axis in mesh if axis in changed)


def _beside(program: Program, one: Executed) -> tuple[str, ...] | None:
    """Names of what is scheduled between a start and its done; None for a synchronous collective."""
    if not is_start(program, one.operation):
        return None
    between: list[str] = []
    started = False
    for operation in one.computation.operations.values():
        if operation is one.operation:
            started = True
        elif (
            started
            and is_done(program, operation)
            and start_of(program, one.computation, operation) == one.operation.name
        ):
            break
        elif started and operation.opcode not in _FREE:
            between.append(operation.name)
    return tuple(between)


_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id")
