"""`ChunkServer` and `RemoteChunks`: carry chunks from any process of a prefill side directly to any process of a decode side."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from dsjax.background import WorkQueue, contained, note_failure, start_thread
from dsjax.engine.contract.commands import WINDOW_NUMBERS
from dsjax.engine.transfer.messages import Chunk, ChunkGoneError, PublishedChunk, PullDone
from dsjax.engine.transfer.transport import Shapes, Transport
from dsjax.errors import UserError
from dsjax.messaging import Endpoint, Peer, Request

ROLE = "decode"
"""The role with which a decode side's processes connect."""
_PULL, _DONE = "pull", "done"
_MAX_DROPPED = _MAX_WAITING = 4096
"""Maximum remembered dropped numbers, and maximum pulls that wait for a chunk. Further ones replace the oldest."""
_PUBLISHERS = 2
"""Publisher threads: while one copies a chunk, the other takes the next."""

OnChunk = Callable[[Chunk | None], object]
"""Called with a chunk that another process pulls, or with None if the chunk is gone. It only queues the chunk and does not block."""


class FollowerSendBuffers:
    """Chunks of one generation, kept by a prefill process other than process 0. Process 0 numbers them and decides when to drop them."""

    def __init__(self):
        self._chunks: dict[int, Chunk] = {}
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._waiting: list[tuple[int, OnChunk]] = []
        self._lock = threading.Lock()
        self._has_ended = False

    def ready(self, number: int, chunk: Chunk | None) -> None:
        """Keep a complete chunk. chunk: None if another process keeps it."""
        if chunk is not None:
            with self._lock:
                if not self._has_ended:
                    self._chunks[number] = chunk
                self._serve_waiting()

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop chunks."""
        with self._lock:
            for number in numbers:
                self._chunks.pop(number, None)
                self._dropped[number] = None
            while len(self._dropped) > _MAX_DROPPED:
                self._dropped.popitem(last=False)
            self._serve_waiting()

    def end(self) -> None:
        """Drop all chunks, because the generation has ended."""
        with self._lock:
            self._has_ended = True
            self._chunks.clear()
            self._serve_waiting()

    def open(self, number: int, on_chunk: OnChunk) -> None:
        """Call `on_chunk` with an offered chunk once it is computed, or with None once it is dropped."""
        with self._lock:
            self._waiting.append((number, on_chunk))
            if len(self._waiting) > _MAX_WAITING:  # a member requests chunks that were never offered
                self._waiting.pop(0)[1](None)
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for number, on_chunk in waiting:
            if number in self._chunks or number in self._dropped or self._has_ended:
                on_chunk(self._chunks.get(number))
            else:
                self._waiting.append((number, on_chunk))


class _PublishedChunk(NamedTuple):
    peer: Peer
    since: float
    chunk: Chunk


class ChunkServer:
    """Lets processes of a decode side pull this process's chunks.

    open_chunk: `open_chunk(number, take)` calls `on_chunk` with a chunk, or with None if the chunk is gone, in any thread.
    timeout: seconds after which a published chunk is withdrawn.
    """

    def __init__(
        self, endpoint: Endpoint, open_chunk: Callable[[int, OnChunk], None], transport: Transport, timeout: float
    ):
        self._endpoint, self._open_chunk, self._transport, self._timeout = endpoint, open_chunk, transport, timeout
        self._numbers = itertools.count(1)
        self._published: dict[int, _PublishedChunk] = {}
        self._peers: set[Peer] = set()
        self._tasks = WorkQueue("chunk server", "dsjax-chunk-server", threads=_PUBLISHERS)
        self._tasks.start()
        endpoint.serve(_PULL, self._pull, roles=(ROLE,), kind=int)
        endpoint.serve(_DONE, self._done, roles=(ROLE,), kind=PullDone)

    def close(self) -> None:
        """Stop publishing, and withdraw all published chunks."""
        for service in (_PULL, _DONE):
            self._endpoint.withdraw(service)
        self._tasks.put(lambda: self._withdraw(lambda _: True))
        self._tasks.close()

    # In the messaging thread.

    def _pull(self, request: Request) -> None:
        if request.peer not in self._peers:
            self._peers.add(request.peer)
            request.peer.on_lost(partial(self._on_disconnect, request.peer))
        self._open_chunk(request.body, lambda chunk: self._tasks.put(partial(self._publish, request, chunk)))

    def _done(self, request: Request) -> None:
        self._tasks.put(partial(self._end_pull, request.body.pull, request.peer, pulled=request.body.ok))

    def _on_disconnect(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._tasks.put(partial(self._withdraw, lambda published: published.peer is peer))

    # In the publisher threads, which use the transport.

    def _publish(self, request: Request, chunk: Chunk | None) -> None:
        oldest = time.monotonic() - self._timeout
        self._withdraw(lambda published: published.since < oldest)
        if chunk is None:
            request.refuse(f"chunk {request.body} is not kept any more")
            return
        number = next(self._numbers)
        try:
            ticket = self._transport.publish(number, chunk)
        except Exception as error:  # of any kind: the other side waits for an answer
            note_failure("chunk server", error, "The other side computes the chunk's pages.")
            request.fail(error)
            return
        self._published[number] = _PublishedChunk(request.peer, time.monotonic(), chunk)
        request.reply(PublishedChunk(number, self._transport.address, ticket))
        if request.peer.lost:  # `_on_disconnect` may have withdrawn its chunks before this one was published
            self._end_pull(number, request.peer, pulled=False)

    def _withdraw(self, should_withdraw: Callable[[_PublishedChunk], bool]) -> None:
        for number, published in list(self._published.items()):
            if should_withdraw(published):
                self._end_pull(number, published.peer, pulled=False)

    def _end_pull(self, number: int, peer: Peer, *, pulled: bool) -> None:
        published = self._published.get(number)
        if published is not None and published.peer is peer and self._published.pop(number, None):
            with contained("chunk server", "The transport may hold a chunk that nobody pulls."):
                self._transport.withdraw(number, published.chunk, pulled=pulled)


class RemoteChunks:
    """Pulls chunks from prefill processes. Connects to a process when it first needs one of its chunks, and reconnects after a loss.

    shapes: shapes of a chunk's arrays; window_shapes: of a chunk of window pages. timeout: seconds after which a pull is aborted.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: Transport,
        shapes: Shapes,
        timeout: float,
        window_shapes: Shapes | None = None,
    ):
        self.endpoint, self._transport, self._timeout = endpoint, transport, timeout
        self._shapes = {False: shapes, True: window_shapes or {}}
        self._peers: dict[str, Future[Peer]] = {}
        self._transports: dict[Peer, str] = {}  # transport addresses of the processes that chunks were pulled from
        self._lock = threading.Lock()

    def pull(self, address: str, number: int, device: Any) -> Chunk:
        """Pull a chunk from an offer's address to a device, and return it when it is complete.

        Raises:
            ChunkGoneError: the chunk is gone, or could not be pulled in time.
        """
        try:
            peer = self.peer(address)
            published = peer.request(_PULL, number, PublishedChunk).result(self._timeout)
        except (OSError, UserError, RuntimeError) as error:
            why = str(error) or f"no answer within {self._timeout:g} s"
            raise ChunkGoneError(f"chunk {number} cannot be had from {address}: {why}") from error
        self._transports[peer] = published.transport
        if peer.lost:  # `_forget` may have run before its transport was noted
            self._disconnect(peer)
        pulled: Future[Chunk] = Future()
        ok = False
        try:
            threading.Thread(
                target=self._pull, args=(published, number, device, pulled), name="dsjax-pull", daemon=True
            ).start()
            chunk = pulled.result(self._timeout)
            ok = True
        except TimeoutError:
            raise ChunkGoneError(f"{address} does not send chunk {number}") from None
        except Exception as error:  # from the transport
            raise ChunkGoneError(f"chunk {number} could not be pulled from {address}: {error}") from error
        finally:
            peer.send(_DONE, PullDone(published.pull, ok))
        return chunk

    def peer(self, address: str) -> Peer:
        """Return the connection to an address. One thread connects while others wait. Raises the errors of `Endpoint.connect`."""
        with self._lock:
            made = self._peers.get(address)
            if connects := made is None:
                made = self._peers[address] = Future()
        if connects:
            try:
                peer = self.endpoint.connect(address, ROLE)
                made.set_result(peer)
                peer.on_lost(lambda: self._forget(address, made, peer))
            except Exception as error:  # of any kind: other threads may wait for the result
                self._forget(address, made)
                made.set_exception(error)
        return made.result()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            peers = list(self._peers.values())
        for made in peers:
            if made.done() and made.exception() is None:
                made.result().close()

    def _forget(self, address: str, made: Future[Peer], peer: Peer | None = None) -> None:
        with self._lock:
            if self._peers.get(address) is made:
                del self._peers[address]
        self._disconnect(peer)

    def _disconnect(self, peer: Peer | None) -> None:
        """Make the transport forget a lost process, in a new thread, because it may wait for a read that hangs."""
        transport = self._transports.pop(peer, None)
        if transport is not None:
            start_thread("transfer connection", self._transport.disconnect, transport, name="dsjax-transfer")

    def _pull(self, published: PublishedChunk, number: int, device: Any, pulled: Future[Chunk]) -> None:
        try:
            shapes = self._shapes[number >= WINDOW_NUMBERS]
            chunk = self._transport.pull(published.transport, published.pull, published.ticket, shapes, device)
            pulled.set_result(chunk)
        except BaseException as error:
            pulled.set_exception(error)
