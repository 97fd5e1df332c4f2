"""`EventPublisher`: events of pages over ZeroMQ, as vLLM publishes them, for routers such as Dynamo's and llm-d's.

Each DP rank has a PUB socket, at the endpoint's port + the rank. A message has three frames: the topic, a sequence number of eight
big-endian bytes from 0 on, and an `EventBatch` in MessagePack. With a replay endpoint each rank also has a ROUTER socket: who sends a
sequence number there (frames: empty, number) gets all batches from it on that are still kept, each as (empty, number, batch), and
then the number −1 with an empty batch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from dsjax.background import contained, start_thread
from dsjax.engine.contract.executor import Executor
from dsjax.engine.contract.json_option import JsonOption
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_events import AllBlocksCleared, Event, EventBatch, EventSink
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.errors import UserError

FLAG = "--kv-events-config"
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
_POLL_SECONDS = 0.05
_END_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig(JsonOption):
    """Whether and where events of pages are published, with vLLM's names for its fields. Checked when made.

    Attributes:
        enable_kv_cache_events: whether there are any.
        publisher: `zmq`, or `null` for none; None: `zmq` where events are enabled.
        endpoint: of DP rank 0; rank r has the port + r, or the name with `_dp` and r. One with `*`, and every `ipc://` and
            `inproc://`, is bound; any other is connected to.
        replay_endpoint: likewise, always bound; None: nothing is replayed.
        buffer_steps: batches of each rank that are kept for it.
        hwm: of the PUB socket: messages that wait for a subscriber that is too slow, before further ones are lost to it.
        max_queue_size: batches that wait for the publisher's thread. Further ones are lost, which subscribers see by the numbers.
        topic: the first frame.

    Raises:
        UserError: a value that cannot be; or pyzmq is not installed.
    """

    flag: ClassVar[str] = FLAG
    example: ClassVar[str] = '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\''

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self):
        self.check_flags("enable_kv_cache_events")
        self.check(self.publisher in (None, "zmq", "null"), "publisher", "zmq or null")
        self._check_endpoint("endpoint")
        if self.replay_endpoint is not None:
            self._check_endpoint("replay_endpoint")
        self.check_integers("buffer_steps", "hwm", "max_queue_size", least=1)
        self.check(isinstance(self.topic, str), "topic", "text")
        if self.publishes and importlib.util.find_spec("zmq") is None:
            raise UserError(f"{FLAG} publishes over ZeroMQ, which needs pyzmq: pip install 'dsjax[kv-events]'")

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def _check_endpoint(self, name: str) -> None:
        endpoint = getattr(self, name)
        is_right = isinstance(endpoint, str) and endpoint.startswith(("tcp://", "ipc://", "inproc://"))
        if is_right and endpoint.startswith("tcp://"):
            is_right = endpoint.rpartition(":")[2].isdecimal()
        self.check(is_right, name, "tcp://HOST:PORT, tcp://*:PORT, ipc://PATH or inproc://NAME")


class EventPublisher:
    """Publishes in a thread of its own; the engine never waits for it.

    Raises:
        UserError: an endpoint cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, num_ranks: int):
        import zmq

        self._zmq, self._topic = zmq, config.topic.encode()
        self._queue: queue.Queue[tuple[int, int, EventBatch] | None] = queue.Queue(config.max_queue_size)
        self._next = [0] * num_ranks
        self._kept: list[deque[tuple[int, bytes]]] = [deque(maxlen=config.buffer_steps) for _ in range(num_ranks)]
        self._warned: set[str] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets, self._replays = [], []
        context = zmq.Context.instance()
        try:
            for rank in range(num_ranks):
                socket = context.socket(zmq.PUB)
                self._sockets.append(socket)
                socket.set_hwm(config.hwm)
                _open(socket, endpoint_of(config.endpoint, rank))
                if config.replay_endpoint is not None:
                    socket = context.socket(zmq.ROUTER)
                    self._replays.append(socket)
                    _open(socket, endpoint_of(config.replay_endpoint, rank), bound=True)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = start_thread("cache events", self._run, name="dsjax-kv-events")

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Publish a rank's events as one batch. What there is no room for is lost, and its number with it."""
        if rank >= len(self._next):  # the mesh has grown beyond the one of the start, whose ranks have a port each
            self._warn_once(
                "DP ranks beyond the first %d have no port; what they store is not published.", len(self._next)
            )
            return
        number = self._next[rank]
        self._next[rank] += 1
        try:
            self._queue.put_nowait((rank, number, EventBatch(time.time(), list(events), rank)))
        except queue.Full:
            self._warn_once(
                "events come faster than they are published, and some are lost; subscribers see gaps in the numbers."
            )

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(f"%s: {text} This is said once.", FLAG, *values)

    def close(self) -> None:
        """Publish what waits, for a second at most, and end."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                with contained("cache events", "A replay is not answered."):
                    self._answer_replays()
                try:
                    # Where nobody can ask for a replay, there is nothing to look for in between.
                    item = self._queue.get(timeout=_POLL_SECONDS if self._replays else None)
                except queue.Empty:
                    continue
                if item is None:
                    return
                rank, number, batch = item
                with contained("cache events", "Subscribers see a gap in the numbers."):
                    payload = self._encoder.encode(batch)
                    self._kept[rank].append((number, payload))
                    self._sockets[rank].send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        finally:
            self._close_sockets()

    def _answer_replays(self) -> None:
        for rank, socket in enumerate(self._replays):
            while socket.poll(0):
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    _log.warning("%s: a request for a replay has %d frames; it is ignored.", FLAG, len(frames))
                    continue
                client, first = frames[0], int.from_bytes(frames[2], "big")
                for number, payload in self._kept[rank]:
                    if number >= first:
                        socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
                socket.send_multipart((client, b"", END, b""))

    def _close_sockets(self) -> None:
        for socket in (*self._sockets, *self._replays):
            socket.close(linger=100)


def endpoint_of(endpoint: str, rank: int) -> str:
    """Say where a DP rank publishes: the port + rank, or the name with `_dp` and the rank; rank 0 where the option says."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _open(socket: Any, endpoint: str, bound: bool = False) -> None:
    import zmq

    try:
        if bound or "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://"):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UserError(
            f"{FLAG}: {endpoint} cannot be used: {error.strerror or error}; each DP rank takes a port of its own, from the endpoint's on"
        ) from error


class PageEventStream(Attachment):
    """The part of an engine's core that tells a sink which pages can be found from now on, and which no more."""

    wants_page_events = True

    def __init__(self, sink: EventSink):
        self._sink = sink

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Say of every DP rank of the mesh before, and of this one, that nothing can be found."""
        if self.scheduler is not None:
            for rank in range(max(len(self.scheduler.ranks), executor.limits.num_ranks)):
                with contained("cache events", "Routers do not hear that pages are gone."):
                    self._sink.publish(rank, [AllBlocksCleared()])

    def planned(self) -> None:
        """Tell what has happened since the last time."""
        for rank, events in self.scheduler.take_page_events():
            with contained("cache events", "Routers do not hear of some pages."):
                self._sink.publish(rank, events)

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Tell what the step has sealed."""
        self.planned()

    def flush(self) -> None:
        """Tell that nothing can be found."""
        self.planned()

    def close(self, failed: bool) -> None:
        """End the sink, unless the engine has failed."""
        if not failed:
            self._sink.close()
