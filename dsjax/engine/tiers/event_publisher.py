"""`EventPublisher`: publishes KV cache events over ZeroMQ in vLLM's format, for routers such as Dynamo's and llm-d's.

Each DP rank has a PUB socket at the endpoint's port + the rank. A message has three frames: the topic, a sequence number of eight
big-endian bytes from 0 on, and an `EventBatch` in MessagePack. With a replay endpoint, each rank also has a ROUTER socket: a client sends
a sequence number (frames: empty, number) and receives all kept batches from this number on, each as (empty, number, batch), and then −1
with an empty batch.

Events contain the token ids of prompts and outputs. A socket that other machines can reach is therefore protected with ZeroMQ's CURVE,
unless the option allows it to be open; frame sizes and concurrent replays are limited, and a replay is as fast as its client reads.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from dsjax.addresses import is_loopback
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
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
_REPLAY_POLL_SECONDS = 0.05
"""Maximum wait for a batch before looking for replay requests."""
_REPLAYING_SECONDS = 0.005
"""Maximum wait for a batch while a replay is unfinished."""
_NO_REPLAY_POLL_SECONDS = 1.0
"""Maximum wait for a batch if there is no replay endpoint."""
_CLOSE_SECONDS = 1.0
"""Maximum wait of `EventPublisher.close`, once for the queue and once for the thread."""
_HANDSHAKE_SECONDS = 5
"""Maximum time of a connection's ZeroMQ handshake."""
_MOST_FRAME_BYTES = 1024
"""Maximum bytes of a client's frame: a replay request has 8, a subscription has its topic."""
_MOST_REPLAYS = 16
"""Maximum concurrent replays per rank. Requests of further clients are ignored; they have to retry."""
_MOST_REQUESTS_A_TURN = 64
"""Maximum replay requests that a rank's socket reads between two batches, so that clients cannot hold up publishing."""
_MOST_BATCHES_A_TURN = 256
"""Maximum batches of one replay that are sent between two published batches."""
_UNREAD_BATCHES = 256
"""Maximum batches of a replay queued in the socket for a client. The replay continues when the client has read some."""
_STALLED_SECONDS = 30.0
"""Time without reads by the client after which a replay is aborted."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig(JsonOption):
    """Whether and where KV cache events are published, with vLLM's field names. Validated at construction.

    Raises:
        UserError: a value is invalid.
    """

    flag: ClassVar[str] = FLAG
    example: ClassVar[str] = '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc:///run/kv"}\''

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # `zmq`, or `null` for none; None: `zmq` if events are enabled
    endpoint: str = DEFAULT_ENDPOINT  # endpoint of DP rank 0. Rank r has the port + r, or the name with `_dp` and r
    # whether to bind the endpoint instead of connecting to it. None: bind endpoints with `*` or `::`, `ipc://` and `inproc://` endpoints,
    # and the default; connect to others
    bind: bool | None = None
    replay_endpoint: str | None = None  # has `endpoint`'s format, and is always bound; None: no replays
    # file with the server's public and secret key, as written by `zmq.auth.create_certificates`. Both sockets then use CURVE
    curve_key_file: str | None = None
    # folder with the public keys (`*.key`) of the allowed clients; requires `curve_key_file`
    curve_clients: str | None = None
    allow_unauthenticated: bool = False  # whether an endpoint that other machines can reach may be bound without CURVE
    buffer_steps: int = 10_000  # batches kept per rank for replays
    hwm: int = 100_000  # maximum messages queued for a slow subscriber; it loses further ones
    # maximum batches queued for the publisher's thread; further ones are lost, which subscribers see by the gap in sequence numbers
    max_queue_size: int = 100_000
    topic: str = ""  # the first frame

    def __post_init__(self):
        self.check_flags("enable_kv_cache_events", "allow_unauthenticated")
        self.check(self.bind in (None, True, False), "bind", "true or false")
        self.check(self.publisher in (None, "zmq", "null"), "publisher", "zmq or null")
        self._check_endpoint("endpoint")
        if self.replay_endpoint is not None:
            self._check_endpoint("replay_endpoint")
        self.check_integers("buffer_steps", "hwm", "max_queue_size", least=1)
        self.check(isinstance(self.topic, str), "topic", "text")
        if self.publishes:
            self._check_protection()

    @property
    def publishes(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def is_bound(self) -> bool:
        """Whether to bind `endpoint` instead of connecting to it."""
        if self.bind is not None:
            return self.bind
        is_tcp = self.endpoint.startswith("tcp://")
        has_wildcard = "*" in self.endpoint or "::" in self.endpoint
        return has_wildcard or not is_tcp or self.endpoint == DEFAULT_ENDPOINT

    def _check_protection(self) -> None:
        for name in ("curve_key_file", "curve_clients"):
            self.check(isinstance(getattr(self, name), str | None), name, "a path")
        if (self.curve_key_file is None) != (self.curve_clients is None):
            raise UserError(
                f"{FLAG} has one of curve_key_file and curve_clients; CURVE needs both: the publisher's own key, and the folder with the "
                "public keys of the clients that may come in"
            )
        if self.curve_key_file is not None or self.allow_unauthenticated:
            return
        bound = {"endpoint": self.endpoint if self.is_bound else None, "replay_endpoint": self.replay_endpoint}
        for name, endpoint in bound.items():
            if endpoint is not None and not _is_of_this_machine(endpoint):
                raise UserError(
                    f"{FLAG} has {name} {endpoint}, which other machines can reach, and events hold the token ids of all prompts; give "
                    f"curve_key_file and curve_clients, bind {DEFAULT_ENDPOINT} or ipc://PATH, or allow it with "
                    '"allow_unauthenticated": true'
                )

    def _check_endpoint(self, name: str) -> None:
        endpoint = getattr(self, name)
        is_right = isinstance(endpoint, str) and endpoint.startswith(("tcp://", "ipc://", "inproc://"))
        if is_right and endpoint.startswith("tcp://"):
            is_right = endpoint.rpartition(":")[2].isdecimal()
        self.check(is_right, name, "tcp://HOST:PORT, tcp://*:PORT, ipc://PATH or inproc://NAME")


class EventPublisher:
    """Publishes in its own thread. Raises a `UserError` if an endpoint cannot be used or CURVE's keys cannot be read."""

    def __init__(self, config: KvEventsConfig, num_ranks: int):
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, int, EventBatch] | None] = queue.Queue(config.max_queue_size)
        self._next = [0] * num_ranks
        self._kept: list[deque[tuple[int, bytes]]] = [deque(maxlen=config.buffer_steps) for _ in range(num_ranks)]
        self._warned: set[str] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: list[zmq.Socket] = []  # by rank
        self._replay_sockets: list[zmq.Socket] = []  # by rank; empty without a replay endpoint
        self._running_replays: list[dict[bytes, Iterator[None]]] = [{} for _ in range(num_ranks)]
        self._curve = None if config.curve_key_file is None else _Curve(config.curve_key_file, config.curve_clients)
        context = zmq.Context.instance() if self._curve is None else self._curve.context
        try:
            for rank in range(num_ranks):
                self._sockets.append(self._make_socket(context, zmq.PUB, config.hwm))
                _open(self._sockets[-1], endpoint_of(config.endpoint, rank), config.is_bound)
                if config.replay_endpoint is not None:
                    self._replay_sockets.append(self._make_socket(context, zmq.ROUTER, _UNREAD_BATCHES))
                    self._replay_sockets[-1].router_mandatory = 1  # makes slow clients noticeable
                    _open(self._replay_sockets[-1], endpoint_of(config.replay_endpoint, rank), bound=True)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = start_thread("cache events", self._run, name="dsjax-kv-events")

    def _make_socket(self, context: zmq.Context, kind: int, hwm: int) -> zmq.Socket:
        socket = context.socket(kind)
        socket.maxmsgsize = _MOST_FRAME_BYTES
        socket.handshake_ivl = _HANDSHAKE_SECONDS * 1000
        socket.set_hwm(hwm)
        if self._curve is not None:
            self._curve.protect(socket)
        return socket

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Publish a rank's events as one batch. If the queue is full, the batch is lost, together with its number."""
        if rank >= len(self._next):  # the mesh has grown; only the ranks of the initial mesh have a port
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
        """Publish the queued batches, within a second or two, and end."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                is_busy = False
                with contained("cache events", "A replay is not answered."):
                    is_busy = self._answer_replays()
                try:
                    seconds = _REPLAYING_SECONDS if is_busy else _REPLAY_POLL_SECONDS
                    item = self._queue.get(timeout=seconds if self._replay_sockets else _NO_REPLAY_POLL_SECONDS)
                except queue.Empty:
                    # libzmq frees its state of lost subscribers only when a socket is used.
                    for socket in self._sockets:
                        socket.getsockopt(zmq.EVENTS)
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

    def _answer_replays(self) -> bool:
        """Read replay requests and continue replays, within a turn's limits. Return whether any replay is unfinished."""
        is_busy = False
        for rank, socket in enumerate(self._replay_sockets):
            self._read_requests(rank, socket)
            under_way = self._running_replays[rank]
            for client, replay in list(under_way.items()):
                try:
                    next(replay)
                except (StopIteration, zmq.ZMQError):  # the replay is over, or the client is gone
                    del under_way[client]
            is_busy |= bool(under_way)
        return is_busy

    def _read_requests(self, rank: int, socket: Any) -> None:
        under_way = self._running_replays[rank]
        for _ in range(_MOST_REQUESTS_A_TURN):
            if not socket.poll(0):
                return
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._warn_once("a request for a replay has %d frames; such requests are ignored.", len(frames))
            elif frames[0] not in under_way and len(under_way) >= _MOST_REPLAYS:
                self._warn_once(
                    "%d clients are sent replays already; further requests are ignored until one has ended.",
                    _MOST_REPLAYS,
                )
            else:  # a repeated request restarts the client's replay
                under_way[frames[0]] = self._replay(rank, frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, rank: int, client: bytes, number: int) -> Iterator[None]:
        """Send a client the batches from this number on. Each `next` sends as many as the socket takes, up to a turn's limit."""
        batches = self._kept[rank]
        socket = self._replay_sockets[rank]
        last_progress = time.monotonic()
        while time.monotonic() - last_progress < _STALLED_SECONDS:
            first = bisect.bisect_left(batches, (number,))
            with contextlib.suppress(zmq.Again):
                for sent, payload in itertools.islice(batches, first, first + _MOST_BATCHES_A_TURN):
                    socket.send_multipart((client, b"", sent.to_bytes(8, "big"), payload), zmq.DONTWAIT)
                    number = sent + 1
                    last_progress = time.monotonic()
                if first + _MOST_BATCHES_A_TURN >= len(batches):
                    socket.send_multipart((client, b"", END, b""), zmq.DONTWAIT)
                    return
            yield

    def _close_sockets(self) -> None:
        for socket in (*self._sockets, *self._replay_sockets):
            socket.close(linger=100)
        if self._curve is not None:
            self._curve.close()


class _Curve:
    """Keys of CURVE sockets, in a separate ZeroMQ context whose authenticator admits known clients."""

    def __init__(self, key_file: str, clients: str):
        if not zmq.has("curve"):
            raise UserError(f"{FLAG}: this pyzmq was built without CURVE; install one from PyPI, whose wheels have it")
        try:
            self._public, self._secret = zmq.auth.load_certificate(key_file)
            num_clients = len(zmq.auth.load_certificates(clients))
        except (OSError, ValueError) as error:
            raise UserError(f"{FLAG}: CURVE's keys cannot be read: {error}") from error
        if self._secret is None:
            raise UserError(f"{FLAG}: curve_key_file {key_file} has no secret key; give the file KEY.key_secret")
        if mode := Path(key_file).stat().st_mode & 0o077:
            raise UserError(
                f"{FLAG}: others than its owner may use curve_key_file {key_file} (mode {mode:03o}); chmod 600 {key_file}"
            )
        if not num_clients:
            raise UserError(f"{FLAG}: curve_clients {clients} has no public key (*.key), so nobody could come in")
        self.context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=clients)

    def protect(self, socket: Any) -> None:
        """Make a socket the CURVE server of its connections. Call it before bind or connect."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret

    def close(self) -> None:
        """Stop the authenticator. Close the sockets first."""
        self._authenticator.stop()
        self.context.term()


def _is_of_this_machine(endpoint: str) -> bool:
    """Whether a bound endpoint is reachable only from its own machine."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not endpoint.startswith("tcp://") or host == "lo" or is_loopback(host)


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a DP rank: the port + rank, or the name with `_dp` and the rank; unchanged for rank 0."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _open(socket: Any, endpoint: str, bound: bool) -> None:
    try:
        if bound:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UserError(
            f"{FLAG}: {endpoint} cannot be used: {error.strerror or error}; each DP rank takes a port of its own, from the endpoint's on"
        ) from error


class PageEventStream(Attachment):
    """Engine plugin that reports to sinks which pages become findable and which are removed."""

    wants_page_events = True

    def __init__(self, *sinks: EventSink):
        self._sinks = sinks

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Report the cache of every DP rank as cleared, for the ranks of the previous mesh and of the new one."""
        # `scheduler` is None at the first start. Later it is still the previous mesh's here.
        if self.scheduler is not None:
            for rank in range(max(len(self.scheduler.ranks), executor.limits.num_ranks)):
                self._publish(rank, [AllBlocksCleared()], "Routers do not hear that pages are gone.")

    def planned(self) -> None:
        """Publish the events since the last call."""
        for rank, events in self.scheduler.take_page_events():
            self._publish(rank, events, "Routers do not hear of some pages.")

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Publish the pages that the step has sealed."""
        self.planned()

    def flush(self) -> None:
        """Publish that the cache is cleared."""
        self.planned()

    def close(self, failed: bool) -> None:
        """Close the sinks, unless the engine has failed: closing waits for queued events, and would delay the error for clients."""
        if not failed:
            for sink in self._sinks:
                sink.close()

    def _publish(self, rank: int, events: Sequence[Event], consequence: str) -> None:
        for sink in self._sinks:
            with contained("cache events", consequence):
                sink.publish(rank, events)
