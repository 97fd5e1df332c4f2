"""``RemoteExperts``: experts in other processes, which may die and restart while the attention side keeps its caches and requests.

``RemoteExpertsPart``: the executor part that switches to other expert processes on command.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.expert_link import Errand, ExpertLink, LinkClosedError, check_reachable
from dsjax.engine.afd.layer_programs import OnHost, Side, rounds_of
from dsjax.engine.afd.messages import COMPILE, PLACE, STAGE, Call, Compile, ExpertLinks, LinkCounts, Open, Place, Stage
from dsjax.engine.contract.commands import ConnectExperts
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.errors import UserError
from dsjax.model.apart import LayerPass
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.arrays import own_parts, put_own_parts
from sharding.dispatch.between import Between

_log = logging.getLogger(__name__)


class RemoteExperts(Side):
    """The expert backend in other processes. Each process has consecutive expert devices; calls to all processes run concurrently.

    Each attention process has its own ``RemoteExperts``, and sends the rows of its own devices.

    Args:
        addresses: ``HOST:PORT`` of the processes, in the order of their devices. waits: see ``Side``. patience: see ``ExpertLink``.
        attention: the processes of the attention side; all make the same calls. space (compatibility fingerprint), change: see ``Open``.
        placement: ``[MoE layers, slots]``; a restarted process reads these experts from the checkpoint.
    """

    def __init__(
        self,
        spec: MeshSpec,
        addresses: Sequence[str],
        attention: AttentionProcesses,
        space: dict[str, Any],
        placement: np.ndarray,
        *,
        waits: bool,
        patience: float,
        change: int = 0,
    ):
        super().__init__(spec, waits=waits)
        self.attention, self.placement, self.change, self._space = attention, placement, change, space
        self.numbers_of_calls = itertools.count()
        self.give_up = attention.give_up
        self.links = [
            ExpertLink(attention.endpoint, address, partial(self._opening, part), patience=patience)
            for part, address in enumerate(addresses)
        ]
        for link in self.links:
            attention.add(link)

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """Counters of the link to each process."""
        return [link.counts for link in self.links]

    def check(self, addresses: Sequence[str] = ()) -> None:
        """Check that a process answers at each address (default: the current addresses). Errors: see ``check_reachable``."""
        for address in addresses or [link.address for link in self.links]:
            check_reachable(self.attention.endpoint, address)

    def _opening(self, part: int) -> Open:
        attention, placement = self.attention, self.placement.astype("<i4").tobytes()
        first, process = part * (self.spec.ep_size // len(self.links)), (attention.index, attention.count)
        return Open(self._space, placement, attention.name, first, attention.epoch, *process, self.change)

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Make the processes send experts of a layer to their next devices. Only the leader requests it: calls do not depend on it."""
        if self.attention.is_leader:
            self._request_all(STAGE, Stage(row, np.array(moves, "<i4").tobytes()))

    def place(self, row: int, experts: np.ndarray) -> None:
        """Make the slots of a layer hold these logical experts in all processes. A process that restarts meanwhile loads the new placement.

        Only the leader sends the request, after all attention processes have the answers to earlier calls (``WayToProcesses.returned``).
        All attention processes wait until it is done.
        """
        placement = self.placement.copy()
        placement[row] = experts
        self.placement = placement
        try:
            if self.attention.is_leader:
                self._request_all(PLACE, Place(row, experts.astype("<i4").tobytes()))
            self.attention.arrive(0)
            self.attention.wait(0)
        except BaseException:
            self.give_up()
            raise

    def _request_all(self, service: str, body: Compile | Stage | Place) -> None:
        """Send a request to all processes concurrently and wait for all answers."""
        for done in [link.ask(service, body) for link in self.links]:
            _result(done)

    def connect(self, *, known: bool = False) -> None:
        """Connect to all processes. known, errors: see ``ExpertLink.connect``."""
        for link in self.links:
            link.connect(known=known)

    def way(self, through: LayerPass) -> WayToProcesses:
        """Make all expert processes compile for the rows of a pass, concurrently."""
        between = through.between()
        process = jax.process_index()
        indices = [index for index, device in enumerate(between.mesh.devices.flat) if device.process_index == process]
        self._request_all(COMPILE, Compile(through.stack, between.tokens, between.senders * between.capacity))
        return WayToProcesses(self, through.stack, between, np.array(indices))

    def close(self) -> None:
        """Close the links to the experts and end their threads. The links between attention processes stay open."""
        for link in self.links:
            self.attention.remove(link)


def _result(done: Future[None]) -> None:
    """Wait for an expert call or request. Raise the errors of ``ExpertLink``, and `LinkClosedError` if it was cancelled."""
    try:
        done.result()
    except CancelledError as error:
        raise LinkClosedError("the link to the experts was closed under a call") from error


@dataclass(frozen=True, eq=False)
class WayToProcesses:
    """``Way`` to other processes; sends filled cells only, and receives their answers."""

    side: RemoteExperts
    stack: str
    between: Between
    own: np.ndarray  # indices of this process's token devices

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> list[_CallOfPart]:
        """Start sending each process its rows. All attention processes number their calls identically."""
        calls, number = [], next(self.side.numbers_of_calls)
        for part, link in enumerate(self.side.links):
            call = _CallOfPart(self, layer, part, r, number, rows[part], counts)
            call.done = link.begin(call.prepare)
            calls.append(call)
        return calls

    def returned(self, away: list[_CallOfPart]) -> tuple[list[Array], int]:
        """Wait until all attention processes have their answers. Return the own ones on the devices, and the most rounds of any process.

        The barrier is needed because an expert process that dies may have answered only some processes. The copy overlaps with it.

        Raises:
            RuntimeError: the experts cannot compute the call, or another attention process has exited or failed.
        """
        for call in away:
            _result(call.done)
        own_rounds = rounds_of(self.between, away[0].counts)
        self.side.attention.arrive(own_rounds)
        expected = self.between.described_returns
        arrays = [put_own_parts(call.in_cells(), like) for call, like in zip(away, expected, strict=True)]
        return arrays, self.side.attention.wait(own_rounds)


@dataclass(eq=False)
class _CallOfPart:
    """One call to one expert process, and its answers. Only filled cells travel, sorted by expert device, token device and place."""

    way: WayToProcesses
    layer: int  # index in the stack
    part: int  # index of the expert process
    r: int  # number of the round
    number: int  # the same in all attention processes
    rows: Array  # from ``Between.pack``; the link's thread waits for them in ``prepare``
    counts: OnHost  # likewise
    done: Future[None] | None = None  # resolves when the answers have arrived

    def prepare(self) -> Errand:
        """Gather the filled cells from the rows of this process's devices."""
        way, between = self.way, self.way.between
        devices, C, wire = between.part_devices, between.capacity, between.wire
        counts_of_part = self.counts.values[:, self.part * devices : (self.part + 1) * devices].T
        filled = np.zeros((devices, between.senders), "<i4")  # filled cells of round r
        filled[:, way.own] = np.clip(counts_of_part - self.r * C, 0, C)
        device, self._senders, c = np.nonzero(np.arange(C) < filled[:, :, None])
        self._cells = device * C + c  # index in a sender's array of packed rows
        filled_rows = np.empty((len(device), wire.row_words), wire.word)
        for sender, packed in zip(way.own, own_parts(self.rows), strict=True):
            from_sender = self._senders == sender
            filled_rows[from_sender] = np.asarray(packed)[self._cells[from_sender]]
        self._answers = np.empty((len(device), between.columns, wire.width), wire.dtype)
        call = Call(way.stack, self.layer, between.tokens, between.senders * C, filled.tobytes(), self.number)
        return call, filled_rows, self._answers

    def in_cells(self) -> list[np.ndarray]:
        """Return the answers for each device of this process in the cells that ``Between.add`` reads; other cells are zero."""
        between, by_device = self.way.between, []
        for sender in self.way.own:
            from_sender = self._senders == sender
            answers = np.zeros((between.part_devices * between.capacity, *self._answers.shape[1:]), self._answers.dtype)
            answers[self._cells[from_sender]] = self._answers[from_sender]
            by_device.append(answers.reshape(-1, between.wire.width))
        return by_device


class RemoteExpertsPart(DevicePart):
    """Connects to another expert side between two steps. Caches and requests are kept.

    With several attention processes, all of them carry out the command between the same two steps. Either all continue with the new
    side, or all stay with the current one.

    another: makes the new side, ``(command, device, current side) -> (model, side)``, with the command's experts but not yet connected.
    """

    def __init__(
        self,
        device: DeviceAccess,
        another: Callable[[ConnectExperts, DeviceAccess, RemoteExperts], tuple[ModelStep, RemoteExperts]],
    ):
        self._device, self._make_side = device, another

    def register(self, table: CommandTable) -> None:
        """Register the command that connects to another side."""
        table.add(ConnectExperts, Handler(self._connect, lambda pending: pending.error))

    def extension(self, kind: type) -> Any:
        """Return the side as `ExpertLinks`, for metrics and for the check before a mesh change."""
        return self._side if kind is ExpertLinks else None

    def close(self) -> None:
        """Close all links, including the links between attention processes."""
        self._side.attention.close()

    @property
    def _side(self) -> RemoteExperts:
        return self._device.programs.experts

    def _connect(self, pending: Pending, command: ConnectExperts) -> Running:
        pending.error = self._change_to(command)
        yield from ()  # no program runs

    def _change_to(self, command: ConnectExperts) -> str | None:
        """Connect and compile. Return the reason why the current side stays, or None if the new side has taken over."""
        device, current = self._device, self._side
        model, new = self._make_side(command, device, current)
        attention, error, programs = current.attention, None, None
        try:
            try:
                new.connect()
                programs = device.programs.with_experts(model, new)
            except (UserError, RuntimeError, ValueError) as caught:
                error = str(caught) if isinstance(caught, UserError) else f"{type(caught).__name__}: {caught}"
                _log.warning("The current expert processes stay, because the new ones cannot take over: %s", error)
            attention.arrive(int(error is not None))
            if attention.wait(int(error is not None)):
                return error or "another attention process could not connect to them"
            device.replace_programs(model, programs)
        finally:
            (new if self._side is current else current).close()
        return None
