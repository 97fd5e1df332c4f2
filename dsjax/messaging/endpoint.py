"""`Endpoint`: a process's control connections. It listens at one port, dials others, and serves both with a table of handlers.

One thread owns every socket. Handlers run in it, so they only queue, look up and reply; anything that computes or waits runs elsewhere
and replies later. A connection belongs to one incarnation of the other process: it is never re-established automatically, and sending
over an ended connection fails.
"""

import contextlib
import errno
import functools
import logging
import os
import queue
import socket as sockets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dsjax.addresses import join_address, split_address, zmq_endpoint, zmq_endpoints
from dsjax.background import contained, note_failure, start_thread
from dsjax.errors import UserError
from dsjax.messaging.cluster_key import Credentials
from dsjax.messaging.curve import (
    LISTENER,
    ROLES,
    Verifier,
    ZapHandler,
    check_libzmq,
    connect_with_curve,
    listen_with_curve,
    role_verifier,
)
from dsjax.messaging.peer import Handler, NotAMemberError, Peer, PeerLostError, Request
from dsjax.messaging.wire import MOST_FRAME_BYTES, Kind, decode, decode_value, encode

PING = "ping"
CONNECT_SECONDS = 5.0
_END_SECONDS = 2.0  # for libzmq's context to end
_SWEEP_SECONDS, _SECOND_SWEEP_SECONDS = 1.0, 0.05  # between sweeps; from a disconnection's sweep to the next one
_LOG_SECONDS = 60.0
"""Minimum seconds between log lines about unauthenticated peers."""
_MAX_SOCKETS = 16384
_MESSAGES_PER_TURN = 64  # messages read from a socket before others are served
_MAX_HELD = 4096  # requests kept for a service that is not registered yet
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
# `errno` of a handshake that timed out: nothing came, or a signal interrupted the wait (this process was stopped and continued).
_TIMED_OUT = errno.EAGAIN, errno.EINTR
_WATCHED = (
    zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKES
)

_log = logging.getLogger(__name__)


class Endpoint:
    """A process's endpoint. It listens from construction until `close`.

    Args:
        host: address of this host at which others connect.
        port: 0 takes a free one.
        credentials: required of all peers.
        silence: seconds without data after which a process counts as lost, even if its kernel is alive.
        holds: services that are registered later; their requests wait until then. Requests for any other unknown service are refused.

    turned_away: unauthenticated peers so far, by reason. at_end: called in the messaging thread when the endpoint closes.
    is_shared: whether a group owns this endpoint, so that `release` leaves it open.

    Raises:
        UserError: the address is not a loopback address and there is no cluster key, or libzmq is unsuitable. OSError: it cannot listen.
    """

    def __init__(
        self, host: str, credentials: Credentials, *, port: int = 0, silence: float = 10.0, holds: Sequence[str] = ()
    ):
        check_libzmq()
        credentials.check_host(host)
        bound = zmq_endpoint(host, port)
        self.credentials, self.silence = credentials, silence
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._context.setsockopt(zmq.RCVHWM, 0)  # of monitors: libzmq blocks when one is full, and sends no heartbeats
        self._zap = ZapHandler(self._context)
        self._zap.verifiers["control"] = role_verifier(credentials.key)
        self._held_requests: dict[str, list[Callable[[], object]]] = {service: [] for service in holds}
        self._services: dict[str, tuple[Handler, frozenset[str], msgspec.msgpack.Decoder]] = {}
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.serve(PING, Request.reply, roles=(*ROLES, LISTENER))
        self._wake, self._wake_receiver = sockets.socketpair()
        self._wake_receiver.setblocking(False)
        self._poller = zmq.Poller()
        self._readers = {}
        self._accepted: dict[bytes, Peer] = {}  # by routing id
        self._dropped: set[bytes] = set()  # routing ids of peers asked to disconnect; their messages are ignored
        self._disconnected: set[bytes] = set()  # routing ids of peers that are gone; last messages may be unread
        self._dialled: set[Peer] = set()
        self._dialling: dict[Peer, tuple[Future[Peer], float]] = {}  # each with its deadline
        self._monitors: dict[zmq.Socket, zmq.Socket] = {}
        self.at_end: list[Callable[[], object]] = []  # called in the messaging thread
        self._attached: weakref.WeakSet = weakref.WeakSet()  # links and logs; used only by the messaging thread
        self.is_shared = False
        self._sweep_at = time.monotonic() + _SWEEP_SECONDS  # time of the next sweep
        self._sweeps_twice = False  # a peer has disconnected: the second sweep follows the first soon
        self._ended = threading.Event()
        self._closed = False
        self._linger = 0.0
        self.turned_away: Counter[str] = Counter()
        self._reported = Counter()
        self._reported_at = -_LOG_SECONDS
        self._router = self.socket(zmq.ROUTER, bound.removeprefix("tcp://").rpartition(":")[0])
        self._router.router_mandatory = True
        listen_with_curve(self._router, credentials.key, "control")
        self._router_monitor = self.watch(self._router)
        try:
            self._router.bind(bound)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            self._wake.close()
            self._wake_receiver.close()
            raise OSError(error.errno, os.strerror(error.errno) if error.errno else str(error)) from error
        self.host, self.port = _address_of(self._router)
        self.read(self._router, self._receive)
        self.read(self._router_monitor, self._watch_router)
        self.read(self._zap.socket, self._zap.answer)
        self.read(self._wake_receiver.fileno(), lambda: self._wake_receiver.recv(4096))
        self._thread = start_thread("messaging", self._run, name="dsjax-messaging", restarts=True)

    @property
    def address(self) -> str:
        """`HOST:PORT` at which others connect."""
        return join_address(self.host, self.port)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the messaging thread, which must not wait."""
        return threading.current_thread() is self._thread

    def serve(self, service: str, handler: Handler, *, roles: Collection[str], kind: Any = Any) -> None:
        """Register a handler for a service's requests and messages. It runs in the messaging thread; an exception fails the request.

        roles: of the peers that it serves; `LISTENER` for processes to which this one has connected. kind: type of the body.
        """
        self._services[service] = handler, frozenset(roles), msgspec.msgpack.Decoder(kind)
        if service in self._held_requests:
            self.post(lambda: [call() for call in self._held_requests.pop(service, ())])

    def withdraw(self, service: str) -> None:
        """Stop serving a service."""
        self._services.pop(service, None)

    def connect(self, address: str, role: str, seconds: float = CONNECT_SECONDS) -> Peer:
        """Connect to another process's endpoint and authenticate with a role in the deployment.

        Raises:
            PeerLostError: none of its addresses answers, each within `seconds`. NotAMemberError: it does not belong to
                this deployment.
            UserError: the address is malformed, or must not be connected to without a cluster key.
        """
        host, port = split_address(address)
        self.credentials.check_host(host)
        try:
            resolved = zmq_endpoints(host, port)
        except OSError as error:
            raise PeerLostError(f"{address} cannot be reached: {error.strerror or error}") from error
        while True:
            connected: Future[Peer] = Future()
            self.post(functools.partial(self._dial, address, resolved.pop(0), role, seconds, connected))
            try:
                return connected.result()
            except PeerLostError:
                if not resolved:  # else try the name's next address
                    raise

    def ping(self, address: str, role: str, seconds: float) -> None:
        """Connect to another process's endpoint and check that it answers; else raise `TimeoutError` or the errors of `connect`."""
        end = time.monotonic() + seconds
        peer = self.connect(address, role, seconds)
        try:
            peer.request(PING).result(max(0.1, end - time.monotonic()))
        finally:
            peer.close()

    def close(self, linger: float = 0.0) -> None:
        """End all connections, logs and links; the port is free afterwards. linger: seconds to send pending messages."""
        if self._closed:
            return
        self._linger, self._closed = linger, True
        self._wake_up()
        self._ended.wait()
        self._report_turned_away(force=True)
        for attached in list(self._attached):
            attached.close()
        terminator = threading.Thread(target=self._context.term, name="dsjax-messaging-end", daemon=True)
        terminator.start()
        terminator.join(linger + _END_SECONDS)

    def release(self) -> None:
        """`close`, unless a group owns the endpoint."""
        if not self.is_shared:
            self.close()

    # For links and logs, which have their own sockets.

    def attach(self, attached: Any) -> None:
        """Tend a link or log each second, and close it with the endpoint."""
        self.post(lambda: self._attached.add(attached))

    def socket(self, kind: int, host: str) -> zmq.Socket:
        """Create a socket with the common options. host: where it listens or to which it connects."""
        socket = self._context.socket(kind)
        beat_ms = int(self.silence * 250)
        options = {
            zmq.SNDHWM: 0,  # a full queue would stop heartbeats
            zmq.RCVHWM: 0,
            zmq.BACKLOG: 512,
            zmq.CONNECT_TIMEOUT: int(CONNECT_SECONDS * 1000),
            zmq.HANDSHAKE_IVL: int(CONNECT_SECONDS * 1000),
            zmq.HEARTBEAT_IVL: beat_ms,
            zmq.HEARTBEAT_TIMEOUT: 3 * beat_ms,
            zmq.HEARTBEAT_TTL: 3 * beat_ms,
            zmq.MAXMSGSIZE: 2 * MOST_FRAME_BYTES,
            zmq.IPV6: ":" in host,
        }
        if kind in (zmq.DEALER, zmq.SUB):
            # Never reconnect: the socket is closed long before. −1 would make libzmq drop what the other side sent before it ended.
            options[zmq.RECONNECT_IVL] = 3_600_000
        for option, value in options.items():
            socket.setsockopt(option, int(value))
        return socket

    def bind(self, socket: zmq.Socket) -> str:
        """Bind a socket to a free port of this endpoint's host. Return `HOST:PORT`."""
        socket.bind(zmq_endpoint(self.host, 0))
        return join_address(self.host, _address_of(socket)[1])

    @staticmethod
    def watch(socket: zmq.Socket) -> zmq.Socket:
        """Return a monitor socket that reports events of another socket's connections."""
        return socket.get_monitor_socket(_WATCHED)

    @staticmethod
    def unwatch(socket: zmq.Socket, monitor: zmq.Socket, linger: float = 0.0) -> None:
        """Close a socket and its monitor. linger: seconds to send pending messages."""
        with contextlib.suppress(zmq.ContextTerminated):
            socket.disable_monitor()
        monitor.close(0)
        socket.close(int(linger * 1000))

    def admit(self, domain: str, verify: Verifier | None) -> None:
        """Set the check that admits peers to the sockets of a domain; None: admit no more peers."""
        if verify is None:
            self._zap.verifiers.pop(domain, None)
        else:
            self._zap.verifiers[domain] = verify

    # The messaging thread.

    def post(self, call: Callable[[], object]) -> None:
        """Queue a call for the messaging thread, which runs calls in order."""
        self._calls.put(call)
        self._wake_up()
        if self._ended.is_set():  # the thread has ended: queued calls fail
            self._run_calls()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # closed, or so much is unread that it wakes anyway
            self._wake.send(b"\0", sockets.MSG_DONTWAIT)

    def read(self, socket: Any, read: Callable[[], object]) -> None:
        """Call `read()` whenever a socket has data. For the messaging thread only."""
        self._poller.register(socket, zmq.POLLIN)
        self._readers[socket] = read

    def unread(self, socket: Any) -> None:
        """Stop reading a socket. For the messaging thread only."""
        with contextlib.suppress(KeyError):
            self._poller.unregister(socket)
        self._readers.pop(socket, None)

    def _run(self) -> None:
        while not self._closed:
            seconds = max(0.0, self._sweep_at - time.monotonic())
            for socket, _ in self._poller.poll(seconds * 1000):
                read = self._readers.get(socket)  # an earlier reader may have closed it
                if read is not None:
                    read()
            self._run_calls()
            if time.monotonic() >= self._sweep_at:
                self.sweep()
            while self._disconnected:  # read the last messages of peers that are gone, then forget the peers
                self._receive()
        self._run_calls()
        for peer in [*self._accepted.values(), *self._dialled, *self._dialling]:
            self._forget(peer)
        for call in self.at_end:
            call()
        self.unwatch(self._router, self._router_monitor, self._linger)
        self._zap.socket.close(0)
        self._wake.close()
        self._wake_receiver.close()
        self._ended.set()
        self._run_calls()

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            with contained("messaging"):
                call()

    def _receive(self) -> None:
        """Read pending messages of accepted peers. Once all are read, forget the peers that are gone."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                routing_id, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._forget_disconnected()
                return
            sender = routing_id.bytes
            if sender in self._dropped or not frames:
                continue
            peer = self._accepted.get(sender)
            if peer is None:
                peer = self._accepted[sender] = Peer(
                    self, self._router, [sender], _property(frames[0], "Peer-Address"), _property(frames[0], "User-Id")
                )
            self._handle(peer, [frame.bytes for frame in frames])

    def _receive_from(self, peer: Peer) -> bool:
        """Read pending messages of a connection that this process dialled. Return whether there may be more."""
        for _ in range(_MESSAGES_PER_TURN):
            if peer.lost:
                return False
            try:
                frames = peer.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._handle(peer, frames)
        return True

    def _handle(self, peer: Peer, frames: Sequence[bytes]) -> None:
        if frames == [b""]:
            return  # a sweep's liveness probe
        try:
            header, data = decode(frames)
        except msgspec.MsgspecError as error:
            _log.warning("A message from %s was ignored, because it is none: %s", peer.address, error)
            return
        if header.kind is Kind.GOODBYE:
            self.disconnect(peer)
        elif header.kind in (Kind.REPLY, Kind.REFUSAL, Kind.FAILURE):
            peer.answered(header.kind, header.number, data)
        else:
            self._call(peer, header.service, header.number, data, header.kind is Kind.REQUEST)

    def _call(self, peer: Peer, service: str, number: int, data: bytes, expects_reply: bool) -> None:
        if service in self._held_requests and len(self._held_requests[service]) < _MAX_HELD:
            self._held_requests[service].append(lambda: self._call(peer, service, number, data, expects_reply))
            return
        handler, roles, decoder = self._services.get(service, (None, (), None))
        request = Request(peer, service, None, number, expects_reply)
        if handler is None or peer.role not in roles:
            request.refuse(f"{service!r} is not served here" + (f" to {peer.role!r}" if handler is not None else ""))
            return
        try:
            request.body = decode_value(decoder, data)
        except msgspec.MsgspecError as error:
            _log.warning("A message from %s to %r was ignored: %s", peer.address, service, error)
            request.refuse(f"the message cannot be read: {error}; use the same dsjax in all processes")
            return
        try:
            handler(request)
        except (UserError, OSError) as error:
            request.refuse(str(error))
        except Exception as error:
            note_failure("messaging", error, f"A message to {service!r} could not be handled.")
            request.fail(error)

    def transmit(self, peer: Peer, frames: list[bytes]) -> None:
        """Send frames to a process, unless it is lost. For the messaging thread only."""
        if peer.lost:
            return
        try:
            peer.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._sweep_at = 0.0

    # Dialling.

    def _dial(self, address: str, resolved: str, role: str, seconds: float, connected: Future[Peer]) -> None:
        if self._closed:
            connected.set_exception(PeerLostError("this process is ending"))
            return
        try:
            socket = self.socket(zmq.DEALER, resolved.removeprefix("tcp://").rpartition(":")[0])
            monitor = self.watch(socket)
        except zmq.ZMQError as error:
            connected.set_exception(PeerLostError(f"{address} cannot be reached: {error.strerror}"))
            return
        for option in (zmq.CONNECT_TIMEOUT, zmq.HANDSHAKE_IVL):
            socket.setsockopt(option, max(1, int(seconds * 1000)))
        connect_with_curve(socket, self.credentials.key, role)
        peer = Peer(self, socket, [], address, LISTENER)
        # The deadline is for a connection for which the system has no socket: libzmq reports nothing about it.
        self._dialling[peer] = connected, time.monotonic() + 2 * seconds + _SWEEP_SECONDS
        self._monitors[socket] = monitor
        self.read(monitor, lambda: self._watch_dialled(peer, monitor, connected))
        self.read(socket, lambda: self._receive_from(peer))
        socket.connect(resolved)

    def _watch_dialled(self, peer: Peer, monitor: zmq.Socket, connected: Future[Peer]) -> None:
        while not peer.lost and monitor.poll(0):
            event = recv_monitor_message(monitor)
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_CONNECTED:
                peer.descriptor = value
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                del self._dialling[peer]
                self._dialled.add(peer)
                connected.set_result(peer)
            else:
                while self._receive_from(peer):  # its last messages
                    pass
                self._end_dial(peer, _dial_error(peer.address, kind, value))
                self.disconnect(peer)

    def _end_dial(self, peer: Peer, error: Exception) -> None:
        connected, _ = self._dialling.pop(peer, (None, 0.0))
        if connected is not None:
            connected.set_exception(error)

    # Liveness.

    def _watch_router(self) -> None:
        while self._router_monitor.poll(0):
            event = recv_monitor_message(self._router_monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._sweep_at = 0.0
                self._sweeps_twice = True
            elif event["event"] & _FAILED_HANDSHAKES:
                self.turned_away[_rejection_reason(event["event"], event["value"])] += 1
                self._report_turned_away()

    def sweep(self) -> None:
        """Find accepted peers that are gone: sending to them fails. Tend links and logs. End dials that are past their deadline."""
        self._sweep_at = time.monotonic() + (_SECOND_SWEEP_SECONDS if self._sweeps_twice else _SWEEP_SECONDS)
        self._sweeps_twice = False
        for routing_id in [*self._accepted, *self._dropped]:
            try:
                self._router.send_multipart([routing_id, b""], zmq.NOBLOCK)
            except zmq.ZMQError:
                self._disconnected.add(routing_id)
        for attached in list(self._attached):
            attached.tend()
        for peer, (_, end) in list(self._dialling.items()):
            if time.monotonic() > end:
                self._end_dial(peer, PeerLostError(f"{peer.address} cannot be reached"))
                self.disconnect(peer)

    def has_disconnected(self, peer: Peer) -> bool:
        """Whether an accepted peer is gone, even if its last messages are not yet handled. Handlers may call this."""
        self.sweep()
        return peer.lost or peer.prefix[0] in self._disconnected

    def _forget_disconnected(self) -> None:
        while self._disconnected:
            routing_id = self._disconnected.pop()
            self._dropped.discard(routing_id)
            if routing_id in self._accepted:
                self._forget(self._accepted[routing_id])

    def disconnect(self, peer: Peer) -> None:
        """End a connection, because either side wants to or because the other side is gone."""
        if peer.lost:
            return
        if peer.prefix:  # accepted: only the other side can end the connection, so ask it to
            self._dropped.add(peer.prefix[0])
            with contextlib.suppress(zmq.ZMQError):
                goodbye = [*peer.prefix, *encode(Kind.GOODBYE, "", 0, None)]
                self._router.send_multipart(goodbye, zmq.NOBLOCK)
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer.prefix:
            self._accepted.pop(peer.prefix[0], None)
        else:
            self._dialled.discard(peer)
            self._end_dial(peer, PeerLostError(f"the connection to {peer.address} has ended"))
            monitor = self._monitors.pop(peer.socket)
            self.unread(monitor)
            self.unread(peer.socket)
            self.unwatch(peer.socket, monitor, self._linger)
        peer.lose()

    def _report_turned_away(self, force: bool = False) -> None:
        new = self.turned_away - self._reported
        now = time.monotonic()
        if new and (force or now - self._reported_at >= _LOG_SECONDS):
            self._reported = self.turned_away.copy()
            self._reported_at = now
            _log.warning("Connections to port %s of %s were turned away: %s.", self.port, self.host, counted(new))


def counted(turned_away: Counter[str]) -> str:
    """Return how many unauthenticated peers were turned away, by reason."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(turned_away.items()))


def _address_of(socket: zmq.Socket) -> tuple[str, int]:
    return split_address(socket.last_endpoint.decode().removeprefix("tcp://"))


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return ""


def _rejection_reason(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "that said nothing" if value in _TIMED_OUT else "that went away in the handshake"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "with another cluster key"
    return "that speak another protocol"


def _dial_error(address: str, event: int, value: int) -> Exception:
    """Return why a connection that this process dialled has failed or ended."""
    if event & _FAILED_HANDSHAKES and value not in _TIMED_OUT:
        return NotAMemberError(
            f"what answers at {address} does not belong to this deployment: it has another cluster key (--cluster-key-file, "
            "DSJAX_CLUSTER_KEY), or is no dsjax process"
        )
    if event == zmq.EVENT_CLOSED:
        return PeerLostError(f"nobody answers at {address}")
    if event == zmq.EVENT_DISCONNECTED:
        return PeerLostError(f"what answers at {address} ends the connection; it may be no dsjax process")
    return PeerLostError(f"what is at {address} does not answer")
