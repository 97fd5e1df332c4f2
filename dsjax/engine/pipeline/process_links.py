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
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.executor import ExpertCounts, RankResults
from dsjax.engine.pipeline.stage_executor import LastStageOutput
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.messaging import Link, LinkListener
from dsjax.messaging.link import LinkLostError, Message

_LOOK_SECONDS = 0.5
_LINGER_SECONDS = 2.0
"""Seconds that a closed connection may take to send queued messages."""
HIDDEN, RESULTS = "hidden", "results"
"""Names of links: what they carry."""
_LOADS = "experts' loads"
_log = logging.getLogger(__name__)


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
                self.fail(
                    ConnectionError(f"{self._sender} has ended it") if isinstance(error, LinkLostError) else error
                )
                return
            with self._changed:
                self._items[number] = item
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Make every wait for a missing item return this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def get(self, number: int, seconds: float) -> Any:
        """Drop the items before `number`, and wait for item `number`. Return an exception if it will never arrive.

        Raises:
            queue.Empty: the item has not arrived in time.
        """
        with self._changed:
            for earlier in [item for item in self._items if item < number]:
                del self._items[earlier]
            if not self._changed.wait_for(lambda: number in self._items or self._error is not None, seconds):
                raise queue.Empty
            return self._items.get(number, self._error)


class _Arriving:
    """Hidden states from the previous stage, in order, as a `StageExecutor` takes them."""

    def __init__(self, take: Callable[[int], np.ndarray], send: Callable[[np.ndarray], Array]):
        self._take, self._send, self._numbers = take, send, itertools.count()

    def popleft(self) -> Array:
        """Wait for the next hidden states, and move them to this stage's devices."""
        return self._send(self._take(next(self._numbers)))


class ProcessLinks:
    """The connections of one process to the processes of the other stages.

    order: process ids in the order of the stages. leads: whether this is process 0. ends: whether it has the last stage.
    """

    def __init__(self, group: HostGroup, order: Sequence[int]):
        self._group, self._order = group, order
        own = group.options.process_id
        place = order.index(own)
        self.leads, self.ends = own == 0, place == len(order) - 1
        self._inboxes: dict[str, _Inbox] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-stages")
        self._sent: Future[None] | None = None
        self._error: Exception | None = None
        self._next: list[Link] = []
        try:
            self._meet(place)
        except BaseException:
            self.close()
            raise
        for inbox in self._inboxes.values():
            threading.Thread(target=inbox.receive, name="dsjax-stages", daemon=True).start()

    def _meet(self, place: int) -> None:
        """Listen, exchange addresses with the other processes, and connect to the receivers of this process."""
        group, order, listening = self._group, self._order, dict[str, tuple[str, bytes]]()
        senders = {} if place == 0 else {HIDDEN: order[place - 1]}
        for name, sender in (senders if self.ends else senders | {RESULTS: order[-1]}).items():
            listener = LinkListener(group.endpoint, [name], encrypted=name == RESULTS)
            self._inboxes[name] = _Inbox(listener, group.member(sender).name)
            listening[name] = listener.address, listener.ticket
        answers = group.agreement.ask("stages", listening)
        listeners = {member.process_id: answer for member, answer in zip(group.present, answers, strict=True)}
        name = RESULTS if self.ends else HIDDEN
        for other in order[:-1] if self.ends else order[place + 1 : place + 2]:
            self._next.append(group.link_to(other, listeners[other][name], name, encrypted=self.ends))

    def arriving(self, send: Callable[[np.ndarray], Array]) -> _Arriving:
        """Return the source of hidden states for this process's first stage. send: moves them to the stage's devices."""
        return _Arriving(lambda number: self._take(HIDDEN, number)[1][0], send)

    def pass_on(self, hidden: Array) -> None:
        """Send hidden states to the process with the next stage as soon as they are computed."""
        self._later(lambda: _send(self._next, [], [hidden]))

    def publish(self, read: Callable[[], tuple[list[RankResults], list[LastStageOutput]] | np.ndarray]) -> None:
        """Send a command's results to all other processes. read: waits for the results and returns them."""

        def send() -> None:
            results = read()
            if isinstance(results, np.ndarray):
                rows, arrays = [], [results]
            else:
                rows, outputs = results
                arrays = [array for output in outputs for array in output]
            _send(self._next, rows, arrays)

        self._later(send)

    def hear(self, number: int) -> tuple[list[RankResults], list[LastStageOutput]] | np.ndarray:
        """Wait for a command's results from the process with the last stage. number: counts the commands that have results."""
        rows, arrays = self._take(RESULTS, number)
        if not rows:
            return arrays[0]
        outputs = [LastStageOutput(*arrays[place : place + 2]) for place in range(0, len(arrays), 2)]
        return msgspec.convert(rows, list[RankResults]), outputs

    def gather(self, read: Callable[[], ExpertCounts | None]) -> list[ExpertCounts | None]:
        """Read this process's counts and send them to process 0. Return them, or in process 0 all processes' counts in stage order."""
        agreement = self._group.agreement
        try:
            own = read()
        except BaseException:  # keeps the number of exchanges equal in all processes
            agreement.tell(_LOADS)
            raise
        if not self.leads:
            agreement.tell(_LOADS, _plain(own))
            return [own]
        told = agreement.ask(_LOADS, _plain(own))
        counts = {member.process_id: _counts(one) for member, one in zip(self._group.present, told, strict=True)}
        return [counts[process] for process in self._order]

    def close(self) -> None:
        """End all connections."""
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        for link in (*self._next, *(inbox.listener for inbox in self._inboxes.values())):
            link.close(_LINGER_SECONDS)

    def _later(self, send: Callable[[], None]) -> None:
        """Send in the thread. Raises the error of an earlier send."""
        if self._sent is not None and self._sent.done():
            self._raise(self._sent.exception())
        self._sent = self._thread.submit(self._send_or_end, send)

    def _send_or_end(self, send: Callable[[], None]) -> None:
        """Send. On a failure end all connections, so that no process waits forever."""
        try:
            send()
        except Exception as error:
            _log.error("The other stages are not told what they wait for, and the connections to them end: %s", error)
            self._give_up(error)
            self._end()
            raise

    def _give_up(self, error: Exception) -> None:
        for inbox in self._inboxes.values():
            inbox.fail(error)

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
                self._error = found  # later items do not match any wait
                continue
            return found

    def _raise(self, error: BaseException | None) -> None:
        if error is None:
            return
        self._group.check(error)
        raise GroupError(f"the connection between two stages has ended: {error}") from error


def _plain(counts: ExpertCounts | None) -> list[Any] | None:
    values = [] if counts is None else [getattr(counts, field.name) for field in dataclasses.fields(counts)]
    return [(one.shape, one.dtype.str, one.tobytes()) if isinstance(one, np.ndarray) else one for one in values] or None


def _counts(told: list[Any] | None) -> ExpertCounts | None:
    values = [np.frombuffer(one[2], one[1]).reshape(one[0]) if isinstance(one, list) else one for one in told or ()]
    return ExpertCounts(*values) if values else None


def _send(links: Sequence[Link], values: list[Any], arrays: Sequence[Array | np.ndarray | None]) -> None:
    """Send values and arrays over each link. The header describes the buffers; the first one has the values."""
    buffers = [np.frombuffer(msgspec.msgpack.encode(values), np.uint8)]
    buffers += [None if array is None else np.asarray(array) for array in arrays]
    header = msgspec.msgpack.encode([None if one is None else (one.shape, str(one.dtype)) for one in buffers])
    for link in links:
        link.send(header, *(one for one in buffers if one is not None))


def _read(message: Message) -> tuple[list[Any], list[np.ndarray | None]]:
    """Receive the values and the arrays of a `_send`."""
    described = msgspec.msgpack.decode(message.header, type=list[tuple[list[int], str] | None])
    buffers = [None if one is None else np.empty(one[0], jnp.dtype(one[1])) for one in described]
    message.read_into(*(one for one in buffers if one is not None))
    return msgspec.msgpack.decode(buffers[0]), buffers[1:]
