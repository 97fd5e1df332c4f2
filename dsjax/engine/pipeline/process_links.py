"""``ProcessLinks``: what passes between the processes of a model's stages: hidden states forward, results from the last one to all others,
and to process 0 what each has found out about its own stages.

Each process listens for the others with the authenticated channel of all connections between hosts (docs/security.md). What is to be sent
is brought to the host's memory and sent in a thread, and what comes is received in others, so that a stage goes on with the next step
meanwhile. A connection begins with an `Opening`, whose ticket the listener's process has told the others of its generation alone: what any
other member of the deployment says here is no hidden state, and ends nothing but its own connection.
"""

from __future__ import annotations

import dataclasses
import hmac
import itertools
import logging
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.executor import ErrorKind, RankResults, RowResult
from dsjax.engine.pipeline.stage_executor import Made
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.secure_channel import SecureChannel, closed_on_failure, connect
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import JoinRequest, decoded

SERVICE = "stages"
_LOOK_SECONDS = 0.5
_OPENING_SECONDS = 30
_MOST_HEADER = 1 << 16
_MOST_RESULTS = 1 << 26
"""Bytes of a step's results without arrays: the scores of a prompt's tokens are most of it."""
Found = tuple[list[Any], list[np.ndarray]]
"""What a process has found out: values that MessagePack knows, and arrays."""
Part = TypeVar("Part")
HIDDEN, RESULTS, FOUND = "hidden", "results", "found by process {}"
"""Roles of connections."""
_log = logging.getLogger(__name__)


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The first message over a connection.

    role: what comes over it, `HIDDEN`, `RESULTS` or `FOUND` of a process. ticket: that the listener gave out for it.
    """

    role: str
    ticket: bytes


class Results(msgspec.Struct, frozen=True, array_like=True):
    """What came of a command at the last stage, or what a process has found out. Arrays follow, one after the other, as their shapes and
    dtypes say.

    rows: of a step, as `RankResults`; of what a process has found out, values. arrays: of a step, of each launch its outcome and its
        drafts; of a score the logits.
    """

    rows: list[Any]
    arrays: list[tuple[list[int], str] | None]


class _Inbox:
    """What has come over one connection, numbered from 0 on.

    An item is kept until a later one is asked for: who is interrupted (Ctrl-C) between getting an item and entering it gets it once more.
    """

    def __init__(self):
        self._items: dict[int, Any] = {}
        self._count, self._error, self._changed = 0, None, threading.Condition()

    def put(self, item: Any) -> None:
        """Add the next item; an exception is the last one. Any thread may call it."""
        with self._changed:
            if isinstance(item, Exception):
                self._error = self._error or item
            elif self._error is None:
                self._items[self._count] = item
                self._count += 1
            self._changed.notify_all()

    def get(self, number: int, seconds: float) -> Any:
        """Wait so long for an item, and give up those before it; in place of one that never comes, give the exception.

        Raises:
            queue.Empty: it has not come yet.
        """
        with self._changed:
            for before in [each for each in self._items if each < number]:
                del self._items[before]
            if not self._changed.wait_for(lambda: number in self._items or self._error is not None, seconds):
                raise queue.Empty
            return self._items.get(number, self._error)


class _Arriving:
    """The hidden states of the stage before, in the order in which they were sent: what a `StageExecutor` takes them from."""

    def __init__(self, take: Callable[[int], np.ndarray], send: Callable[[np.ndarray], Array]):
        self._take, self._send, self._numbers = take, send, itertools.count()

    def popleft(self) -> Array:
        """Wait for the next ones, and bring them to this stage's devices. Nothing goes on after an interrupt here."""
        return self._send(self._take(next(self._numbers)))


class ProcessLinks:
    """The connections of one process.

    Args:
        order: ids of the processes in the order of their stages.

    Attributes:
        leads: whether this is process 0. ends: whether it has the last stage.
    """

    def __init__(self, group: HostGroup, order: Sequence[int]):
        self._group = group
        own = group.options.process_id
        self.leads, self.ends = own == 0, order.index(own) == len(order) - 1
        found = [FOUND.format(number) for number in order if number] if self.leads else []
        self._inboxes = {role: _Inbox() for role in (HIDDEN, RESULTS, *found)}
        self._order, self._found_numbers = order, itertools.count()
        self._expected_found: deque[tuple[int, Callable[[], Found], Callable[[list[Found]], None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-stages")
        self._sent: Future[None] | None = None
        self._error: Exception | None = None
        self._ticket, self._lock = secrets.token_bytes(16), threading.Lock()
        self._expected = set(self._inboxes)  # each comes over one connection, of one process
        address = group.options.address
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        # One for each inbox, and for each process one that is about to be closed.
        most = len(self._inboxes) + len(order)
        try:
            self._listener = SecureListener(
                listener, group.credentials, {SERVICE: self._serve}, "dsjax-stages", most_connections=most
            )
        except BaseException:
            listener.close()
            raise
        self._channels, self._to_leader = list[SecureChannel](), list[SecureChannel]()
        try:
            self._meet(order)
        except BaseException:
            self.close()
            raise

    def _meet(self, order: Sequence[int]) -> None:
        """Learn where the others are, and connect to those that this process sends to."""
        group = self._group
        told = group.agreement.ask("stages", [self._listener.port, self._ticket])
        doors = {
            member.process_id: (member, port, ticket)
            for member, (port, ticket) in zip(group.present, told, strict=True)
        }
        own = group.options.process_id
        place = order.index(own)
        others = order[:-1] if self.ends else order[place + 1 : place + 2]
        role = RESULTS if self.ends else HIDDEN
        for other in others:
            self._channels.append(self._connect(*doors[other], role))
        if not self.leads:
            self._to_leader.append(self._connect(*doors[0], FOUND.format(own)))

    def arriving(self, send: Callable[[np.ndarray], Array]) -> _Arriving:
        """Where the first stage here takes hidden states from. send: brings them to its devices."""
        return _Arriving(lambda number: self._take(HIDDEN, number), send)

    def pass_on(self, hidden: Array) -> None:
        """Send hidden states to the process with the next stage, when they are computed."""
        self._later(lambda: self._send(self._channels, _header(hidden), [hidden]))

    def publish(self, of: Callable[[], tuple[list[RankResults], list[Made]] | np.ndarray]) -> None:
        """Send what came of a command to all other processes. of: waits for it, and gives it."""

        def send() -> None:
            found = of()
            if isinstance(found, np.ndarray):
                rows, arrays = [], [found]
            else:
                rows, made = found
                arrays = [array for one in made for array in one]
            self._send_results(self._channels, rows, arrays)

        self._later(send)

    def hear(self, number: int) -> tuple[list[RankResults], list[Made]] | np.ndarray:
        """What came of a command, from the process with the last stage.

        number: of the command among those that give anything, from 0 on. It can be heard until a later one is.
        """
        rows, arrays = self._take(RESULTS, number)
        if not rows:
            return arrays[0]
        made = [Made(*arrays[place : place + 2]) for place in range(0, len(arrays), 2)]
        return [
            RankResults([_row(one) for one in decodes], [_row(one) for one in prefills]) for decodes, prefills in rows
        ], made

    def tell(self, of: Callable[[], Found]) -> None:
        """Send process 0 what this one has found out. of: waits for it, and gives it."""
        self._later(lambda: self._send_results(self._to_leader, *of()))

    def expect(self, own: Callable[[], Found], enter: Callable[[list[Found]], None]) -> None:
        """Remember, in process 0, that all others tell something, behind what they tell before it.

        own: gives what this process has found out itself. enter: takes what all have, in the order of their stages. Both are called once
            more where an interrupt comes behind them.
        """
        self._expected_found.append((next(self._found_numbers), own, enter))

    def hear_found(self) -> None:
        """Wait for the first thing that is expected, and enter it. After an interrupt it is expected as before."""
        number, own, enter = self._expected_found[0]
        enter([self._take(FOUND.format(process), number) if process else own() for process in self._order])
        self._expected_found.popleft()

    def close(self) -> None:
        """End all connections."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        for channel in (*self._channels, *self._to_leader):
            channel.close()
        self._listener.close(connections=True)

    def _connect(self, member: JoinRequest, port: int, ticket: bytes, role: str) -> SecureChannel:
        try:
            with closed_on_failure(connect((member.address, port), SERVICE, self._group.credentials)) as channel:
                # What is being sent to a host that has gone would be waited for by `close`.
                channel.keep_alive(self._group.options.heartbeat_timeout, unacknowledged=True)
                channel.send(msgspec.msgpack.encode(Opening(role, ticket)))
            return channel
        except (OSError, EOFError) as error:
            self._group.check(error)
            raise GroupError(
                f"{member.name} cannot be reached at {member.address} port {port}, where it takes what other stages send "
                f"({error or 'it ended the connection'}); see that hosts let each other in at every port"
            ) from error

    def _later(self, send: Callable[[], None]) -> None:
        """Send in the thread, behind what it has to send already; raise what came of that."""
        if self._sent is not None and self._sent.done():
            self._raise(self._sent.exception())
        self._sent = self._thread.submit(self._send_or_end, send)

    def _send_or_end(self, send: Callable[[], None]) -> None:
        """Send; where that fails, let nobody wait for it for ever: neither this process, nor the others, which see that connections end."""
        try:
            send()
        except Exception as error:
            _log.error("The other stages are not told what they wait for, and the connections to them end: %s", error)
            for inbox in self._inboxes.values():
                inbox.put(error)
            self._end()
            raise

    def _send_results(self, channels: Sequence[SecureChannel], rows: list[Any], arrays: Sequence[Any]) -> None:
        described = [None if array is None else _described(array) for array in arrays]
        header = msgspec.msgpack.encode(Results(rows, described))
        self._send(channels, header, [array for array in arrays if array is not None])

    def _send(self, channels: Sequence[SecureChannel], header: bytes, arrays: Sequence[Array | np.ndarray]) -> None:
        values = [np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8) for array in arrays]
        for channel in channels:
            channel.send(header)
            for value in values:
                channel.send_bytes(memoryview(value))

    def _serve(self, channel: SecureChannel) -> None:
        """Receive from one process, in a thread of the listener."""
        channel.settimeout(_OPENING_SECONDS)
        role = self._admit(channel)
        channel.settimeout(None)
        inbox = self._inboxes[role]
        try:
            while True:
                inbox.put(self._receive(channel, role == HIDDEN))
        except (OSError, EOFError, ValueError, TypeError, MemoryError) as error:
            inbox.put(error)
            raise ConnectionError(str(error)) from error

    def _admit(self, channel: SecureChannel) -> str:
        """Read the opening, and give what will come.

        Raises:
            OSError, EOFError: it is none of this generation's, or is a second one.
        """
        try:
            opening = decoded(_openings, channel.receive(_MOST_HEADER))
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"{channel.peer} does not begin as a process of stages does: {error}") from error
        if not hmac.compare_digest(opening.ticket, self._ticket):
            raise ConnectionError(f"{channel.peer} has no ticket of this generation's stages")
        with self._lock:
            if opening.role not in self._expected:
                raise ConnectionError(
                    f"{channel.peer} sends {opening.role!r}, which is not expected of it, or comes already"
                )
            self._expected.remove(opening.role)
        return opening.role

    def _receive(self, channel: SecureChannel, hidden: bool) -> Any:
        header = channel.receive(_MOST_HEADER if hidden else _MOST_RESULTS)
        if hidden:
            return _read(channel, msgspec.msgpack.decode(header, type=tuple[list[int], str]))
        results = msgspec.msgpack.decode(header, type=Results)
        return results.rows, [None if one is None else _read(channel, one) for one in results.arrays]

    def _take(self, name: str, number: int) -> Any:
        while True:
            if self._error is not None:
                self._raise(self._error)
            try:
                found = self._inboxes[name].get(number, _LOOK_SECONDS)
            except queue.Empty:
                self._group.check()
                continue
            if isinstance(found, Exception):
                self._error = found  # nothing that comes behind it is what is waited for
                continue
            return found

    def _raise(self, error: BaseException | None) -> None:
        if error is None:
            return
        self._group.check(error)
        raise GroupError(f"the connection between two stages has ended: {error}") from error


def plain(part: Any) -> Found:
    """A named tuple or a dataclass, whose arrays come first, as plain values and arrays; None: nothing."""
    if part is None:
        return [], []
    fields = part if isinstance(part, tuple) else [getattr(part, field.name) for field in dataclasses.fields(part)]
    arrays = [value for value in fields if isinstance(value, np.ndarray)]
    return list(fields[len(arrays) :]), arrays


def parts_of(kind: type[Part], everybody: Sequence[Found]) -> list[Part]:
    """What was `plain`, of those processes that had any."""
    return [kind(*arrays, *values) for values, arrays in everybody if values or arrays]


_openings = msgspec.msgpack.Decoder(Opening)


def _described(array: Array | np.ndarray) -> tuple[list[int], str]:
    return list(array.shape), str(array.dtype)


def _header(hidden: Array) -> bytes:
    return msgspec.msgpack.encode(_described(hidden))


def _read(channel: SecureChannel, described: tuple[list[int], str]) -> np.ndarray:
    shape, dtype = described
    array = np.empty(shape, jnp.dtype(dtype))
    channel.receive_into(memoryview(array.reshape(-1).view(np.uint8)))
    return array


def _row(values: list[Any]) -> RowResult:
    row = RowResult(*values)
    return row if row.kind is None else row._replace(kind=ErrorKind(row.kind))
