"""`ProcessLinks`: carries hidden states between the processes of a model's stages, and results from the last one to all others.

Threads send and receive in host memory while a stage computes the next step. Results are always encrypted, hidden states only with
`--encrypt-bulk`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.executor import ExpertCounts, RankResults
from dsjax.engine.pipeline.stage_executor import LastStageOutput
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.messaging import Link, LinkListener
from dsjax.messaging.link import LinkLostError, Message

_POLL_SECONDS = 0.5
_LINGER_SECONDS = 2.0
"""Seconds that a closed connection may take to send queued messages."""
HIDDEN, RESULTS = "hidden", "results"
"""Names of links: what they carry."""
_EXPERT_LOADS = "experts' loads"
_log = logging.getLogger(__name__)

Results = tuple[list[RankResults], list[LastStageOutput]] | np.ndarray
"""A step's results and the last stage's outputs that they come from, or the logits of a `Score`."""


class _Inbox:
    """Items received over one link, numbered from 0. An item is kept until a later one is requested, so an interrupt loses nothing."""

    def __init__(self, listener: LinkListener, sender: str):
        self.listener, self._sender = listener, sender
        self._items: dict[int, Any] = {}
        self._error, self._changed = None, threading.Condition()

    def receive(self) -> None:
        """Receive items, in a thread, until the listener is closed or an item cannot be read."""
        for number in itertools.count():
            try:
                item = _read(self.listener.receive())
            except Exception as error:
                has_ended = isinstance(error, LinkLostError)
                self.fail(ConnectionError(f"{self._sender} has ended it") if has_ended else error)
                return
            with self._changed:
                self._items[number] = item
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Make every wait for a missing item raise this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def get(self, number: int, seconds: float) -> Any:
        """Drop the items before `number`, and wait for item `number`.

        Raises:
            queue.Empty: the item has not arrived in time. Any other error: it will never arrive.
        """
        with self._changed:
            for earlier in [item for item in self._items if item < number]:
                del self._items[earlier]
            if not self._changed.wait_for(lambda: number in self._items or self._error is not None, seconds):
                raise queue.Empty
            if number not in self._items:
                raise self._error
            return self._items[number]


class _IncomingHidden:
    """Hidden states from the previous stage, in order, as a `StageExecutor` takes them.

    receive: waits for a message by number; returns it like `_read`. put: moves hidden states to the devices of this process's first stage.
    """

    def __init__(
        self, receive: Callable[[int], tuple[list[Any], list[np.ndarray]]], put: Callable[[np.ndarray], Array]
    ):
        self._receive, self._put, self._numbers = receive, put, itertools.count()

    def popleft(self) -> Array:
        """Wait for the next hidden states, and move them to this stage's devices."""
        _, [hidden] = self._receive(next(self._numbers))
        return self._put(hidden)


class ProcessLinks:
    """The connections of one process to the processes of the other stages.

    order: process ids in the order of their stages. is_leader: whether this is process 0. is_last: whether it has the last stage.
    """

    def __init__(self, group: HostGroup, order: Sequence[int]):
        self._group, self._order = group, order
        own = group.options.process_id
        position = order.index(own)
        self.is_leader, self.is_last = own == 0, position == len(order) - 1
        self._inboxes: dict[str, _Inbox] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-stages")
        self._last_send: Future[None] | None = None
        self._error: Exception | None = None
        self._outgoing: list[Link] = []
        try:
            self._connect(position)
        except BaseException:
            self.close()
            raise
        for inbox in self._inboxes.values():
            threading.Thread(target=inbox.receive, name="dsjax-stages", daemon=True).start()

    def _connect(self, position: int) -> None:
        """Listen, exchange addresses with the other processes, and connect to the receivers of this process. position: in the order."""
        group, order = self._group, self._order
        senders: dict[str, int] = {}  # by link name
        if position > 0:
            senders[HIDDEN] = order[position - 1]
        if not self.is_last:
            senders[RESULTS] = order[-1]
        own_listeners: dict[str, tuple[str, bytes]] = {}
        for name, sender in senders.items():
            listener = LinkListener(group.endpoint, [name], encrypted=name == RESULTS)
            self._inboxes[name] = _Inbox(listener, group.member(sender).name)
            own_listeners[name] = listener.address, listener.ticket
        gathered = group.agreement.all_gather("stages", own_listeners)
        listeners = {member.process_id: answer for member, answer in zip(group.present, gathered, strict=True)}
        if self.is_last:
            name, receivers = RESULTS, order[:-1]
        else:
            name, receivers = HIDDEN, [order[position + 1]]
        for receiver in receivers:
            link = group.link_to(receiver, listeners[receiver][name], name, encrypted=self.is_last)
            self._outgoing.append(link)

    def incoming(self, put: Callable[[np.ndarray], Array]) -> _IncomingHidden:
        """Return the source of hidden states for this process's first stage. put: moves them to the stage's devices."""
        return _IncomingHidden(partial(self._receive, HIDDEN), put)

    def send_hidden(self, hidden: Array) -> None:
        """Send hidden states to the process with the next stage as soon as they are computed."""
        self._send_in_thread(lambda: _send(self._outgoing, [], [hidden]))

    def send_results(self, read: Callable[[], Results]) -> None:
        """Send a command's results to all other processes. read: waits for the results and returns them."""

        def send() -> None:
            results = read()
            if isinstance(results, np.ndarray):
                rows, arrays = [], [results]
            else:
                rows, outputs = results
                arrays = [array for output in outputs for array in output]
            _send(self._outgoing, rows, arrays)

        self._send_in_thread(send)

    def receive_results(self, number: int) -> Results:
        """Wait for a command's results from the process with the last stage. number: counts the commands that have results."""
        rows, arrays = self._receive(RESULTS, number)
        if not rows:  # logits
            return arrays[0]
        outputs = [LastStageOutput(*arrays[index : index + 2]) for index in range(0, len(arrays), 2)]
        return msgspec.convert(rows, list[RankResults]), outputs

    def gather_counts(self, read: Callable[[], ExpertCounts | None]) -> list[ExpertCounts | None]:
        """Read this process's counts and send them to process 0. Return them, or in process 0 all processes' counts in stage order."""
        agreement = self._group.agreement
        try:
            own = read()
        except BaseException:  # keeps the number of exchanges equal in all processes
            agreement.contribute(_EXPERT_LOADS)
            raise
        if not self.is_leader:
            agreement.contribute(_EXPERT_LOADS, _encode_counts(own))
            return [own]
        gathered = agreement.all_gather(_EXPERT_LOADS, _encode_counts(own))
        by_process = {
            member.process_id: None if values is None else ExpertCounts(*map(_decode_value, values))
            for member, values in zip(self._group.present, gathered, strict=True)
        }
        return [by_process[process_id] for process_id in self._order]

    def close(self) -> None:
        """End all connections."""
        self._thread.shutdown(cancel_futures=True)
        self._close_connections()

    def _close_connections(self) -> None:
        for link in (*self._outgoing, *(inbox.listener for inbox in self._inboxes.values())):
            link.close(_LINGER_SECONDS)

    def _send_in_thread(self, send: Callable[[], None]) -> None:
        """Send in the thread. Raises the error of an earlier send."""
        if self._last_send is not None and self._last_send.done():
            error = self._last_send.exception()
            if error is not None:
                self._raise_lost(error)
        self._last_send = self._thread.submit(self._send_or_close, send)

    def _send_or_close(self, send: Callable[[], None]) -> None:
        """Send. On a failure end all connections, so that no process waits forever."""
        try:
            send()
        except Exception as error:
            _log.error("Sending to the other stages failed; their connections are closed: %s", error)
            for inbox in self._inboxes.values():
                inbox.fail(error)
            self._close_connections()
            raise

    def _receive(self, name: str, number: int) -> Any:
        while self._error is None:
            try:
                return self._inboxes[name].get(number, _POLL_SECONDS)
            except queue.Empty:
                self._group.check()
            except Exception as error:
                self._error = error  # later items do not match any wait
        self._raise_lost(self._error)

    def _raise_lost(self, error: BaseException) -> NoReturn:
        self._group.check(error)
        raise GroupError(f"the connection between two stages has ended: {error}") from error


def _encode_counts(counts: ExpertCounts | None) -> list[Any] | None:
    if counts is None:
        return None
    values = (getattr(counts, field.name) for field in dataclasses.fields(counts))
    return [
        (value.shape, value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values
    ]


def _decode_value(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    shape, dtype, data = value
    return np.frombuffer(data, dtype).reshape(shape)


class _ArraySpec(NamedTuple):
    """Shape and dtype of an array in a message."""

    shape: tuple[int, ...]
    dtype: str


def _send(links: Sequence[Link], values: list[Any], arrays: Sequence[Array | np.ndarray | None]) -> None:
    """Send values and arrays over each link. The header describes the buffers; the first one has the values."""
    buffers = [np.frombuffer(msgspec.msgpack.encode(values), np.uint8)]
    buffers += [None if array is None else np.asarray(array) for array in arrays]
    specs = [None if buffer is None else _ArraySpec(buffer.shape, str(buffer.dtype)) for buffer in buffers]
    header = msgspec.msgpack.encode(specs)
    for link in links:
        link.send(header, *(buffer for buffer in buffers if buffer is not None))


def _read(message: Message) -> tuple[list[Any], list[np.ndarray | None]]:
    """Receive the values and the arrays of a `_send`."""
    specs = msgspec.msgpack.decode(message.header, type=list[_ArraySpec | None])
    buffers = [None if spec is None else np.empty(spec.shape, jnp.dtype(spec.dtype)) for spec in specs]
    message.read_into(*(buffer for buffer in buffers if buffer is not None))
    values, *arrays = buffers
    return msgspec.msgpack.decode(values), arrays
