"""`ChunkServer` and `RemoteChunks`: transfer chunks from any process of a prefill side straight to any process of a decode side."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from dsjax.background import contained, note_failure
from dsjax.engine.transfer.messages import Chunk, ChunkGoneError, PullDone, PullRequest, PullResponse
from dsjax.engine.transfer.page_channel import CHUNKS, TransferChannel, TransferListener, connect_to
from dsjax.engine.transfer.transport import Shapes, Transport
from dsjax.messaging.credentials import Credentials, local_credentials
from dsjax.hosts.secure_channel import closed_on_failure

_MOST_DROPPED = 4096


class FollowerSendBuffers:
    """Holds the chunks of a prefill side's process that is not its first, in one generation. The first process counts them, and says
    when they go.

    timeout: seconds for which `open` waits for a chunk that was offered before this process has computed it.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._chunks: dict[int, Chunk] = {}
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._changed = threading.Condition()
        self._has_ended = False

    def __len__(self) -> int:
        return len(self._chunks)

    def ready(self, number: int, chunk: Chunk | None) -> None:
        """Hold a chunk that is complete. None: another process holds it."""
        if chunk is not None:
            with self._changed:
                if not self._has_ended:
                    self._chunks[number] = chunk
                self._changed.notify_all()

    def drop(self, numbers: Sequence[int]) -> None:
        """Hold chunks no longer."""
        with self._changed:
            for number in numbers:
                self._chunks.pop(number, None)
                self._dropped[number] = None
            while len(self._dropped) > _MOST_DROPPED:
                self._dropped.popitem(last=False)
            self._changed.notify_all()

    def end(self) -> None:
        """Hold nothing any longer: the generation has ended, and what this process has not computed will not come."""
        with self._changed:
            self._has_ended = True
            self._chunks.clear()
            self._changed.notify_all()

    def open(self, number: int) -> Chunk:
        """Return a chunk that was offered.

        Raises:
            ChunkGoneError: it is not held any more.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._chunks or number in self._dropped or self._has_ended, self._timeout
            )
            if number not in self._chunks:
                raise ChunkGoneError(f"chunk {number} is not kept any more")
            return self._chunks[number]


class ChunkServer:
    """Lets other processes pull this one's chunks.

    Args:
        open_chunk: returns the chunk of a number, or raises `ChunkGoneError`.
        space: what both sides must have alike (`Greeting.space`).
        timeout: seconds after which a chunk that was published and not pulled is withdrawn.
        credentials: of this deployment; None: of this user on the loopback interface.
    """

    def __init__(
        self,
        open_chunk: Callable[[int], Chunk],
        transport: Transport,
        space: dict[str, Any],
        host: str,
        timeout: float,
        credentials: Credentials | None = None,
    ):
        self.open_chunk, self.transport, self.timeout = open_chunk, transport, timeout
        self.pull_numbers = itertools.count(1)
        self.listener = TransferListener(
            lambda channel: _PullingPeer(self, channel),
            space,
            host,
            transport=transport.address,
            service=CHUNKS,
            credentials=credentials or local_credentials(),
        )

    @property
    def address(self) -> str:
        """`HOST:PORT`, as offers have it."""
        return self.listener.address

    def close(self) -> None:
        """End the connections."""
        self.listener.close()


class _PullingPeer:
    """One process of a decode side, as a server sees it, and what is published for it."""

    def __init__(self, server: ChunkServer, channel: TransferChannel):
        self._server, self._channel = server, channel
        self._published: dict[int, tuple[float, Chunk]] = {}

    def receive(self, message: Any) -> None:
        """Publish a chunk, or withdraw one that was pulled, or could not be."""
        self._withdraw(time.monotonic() - self._server.timeout)
        if isinstance(message, PullRequest):
            self._channel.send(self._publish(message.number))
        elif isinstance(message, PullDone) and message.pull in self._published:
            _, chunk = self._published.pop(message.pull)
            self._end_pull(message.pull, chunk, pulled=message.ok)

    def _publish(self, number: int) -> PullResponse:
        server = self._server
        try:
            chunk = server.open_chunk(number)
            pull = next(server.pull_numbers)
            ticket = server.transport.publish(pull, chunk)
        except ChunkGoneError:
            return PullResponse(number, 0)
        except Exception as error:  # whatever it is: the other side waits for an answer
            note_failure("chunk server", error, "The other side computes the chunk's pages.")
            return PullResponse(number, 0)
        self._published[pull] = time.monotonic(), chunk
        return PullResponse(number, pull, ticket)

    def _withdraw(self, before: float) -> None:
        """Withdraw what was published before this moment and is still not pulled."""
        for pull, (since, chunk) in list(self._published.items()):
            if since < before:
                del self._published[pull]
                self._end_pull(pull, chunk, pulled=False)

    def _end_pull(self, pull: int, chunk: Chunk, *, pulled: bool) -> None:
        with contained("chunk server", "The transport may hold a chunk that nobody pulls."):
            self._server.transport.withdraw(pull, chunk, pulled=pulled)

    def leave(self) -> None:
        """Withdraw everything."""
        self._withdraw(float("inf"))


class RemoteChunks:
    """Pulls chunks of other processes, by their addresses. It connects when something is pulled, and again after a loss.

    Args:
        space: what both sides must have alike (`Greeting.space`).
        shapes: of a chunk's arrays.
        timeout: seconds after which a process that does not answer is given up.
        credentials: as of `ChunkServer`.
    """

    def __init__(
        self,
        transport: Transport,
        space: dict[str, Any],
        shapes: Shapes,
        timeout: float,
        credentials: Credentials | None = None,
    ):
        self._credentials = credentials or local_credentials()
        self._transport, self._space, self._shapes, self._timeout = transport, space, shapes, timeout
        self._connections: dict[str, Future[_ServerConnection]] = {}
        self._lock = threading.Lock()

    def pull(self, address: str, number: int, device: Any) -> Chunk:
        """Return a chunk on this device, complete. address: `HOST:PORT`, as its offer had it.

        Raises:
            ChunkGoneError: it is not held any more, or its process cannot be reached.
        """
        connection = self._connection(address)
        response = connection.request(number, self._timeout)
        pulled: Future[Chunk] = Future()
        arguments = connection.transport, response, device, pulled
        ok = False
        try:
            threading.Thread(target=self._pull, args=arguments, name="dsjax-pull", daemon=True).start()
            chunk = pulled.result(self._timeout)
            ok = True
        except FutureTimeoutError:
            raise ChunkGoneError(f"{address} does not send chunk {number}") from None
        except Exception as error:  # the transport's
            raise ChunkGoneError(f"chunk {number} could not be pulled from {address}: {error}") from error
        finally:
            connection.channel.send(PullDone(response.pull, ok))
        return chunk

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            if connection.done() and connection.exception() is None:
                connection.result().channel.close()

    def _connection(self, address: str) -> _ServerConnection:
        """Return the connection to an address, which one thread makes while others that want it wait; those of other addresses do not."""
        with self._lock:
            made = self._connections.get(address)
            if connects := made is None:
                made = self._connections[address] = Future()
        if connects:
            try:
                lost = lambda connection: self._forget(address, made, connection)  # noqa: E731
                made.set_result(_ServerConnection(address, self._space, self._credentials, lost))
            except Exception as error:  # whatever it is: others may wait for this
                self._forget(address, made)
                made.set_exception(ChunkGoneError(f"{address} cannot be reached: {error}"))
        return made.result()

    def _forget(
        self, address: str, made: Future[_ServerConnection], connection: _ServerConnection | None = None
    ) -> None:
        """Forget a connection that is lost, or could not be made. The transport forgets its process too, which may never come back."""
        with self._lock:
            if self._connections.get(address) is made:
                del self._connections[address]
        if connection is not None:
            self._transport.disconnect(connection.transport)

    def _pull(self, peer: str, response: PullResponse, device: Any, pulled: Future[Chunk]) -> None:
        try:
            pulled.set_result(self._transport.pull(peer, response.pull, response.ticket, self._shapes, device))
        except BaseException as error:
            pulled.set_exception(error)


class _ServerConnection:
    """The connection to a process that holds chunks.

    lost: is called when it ends.

    Attributes:
        transport: address of that process's transport.
    """

    def __init__(
        self,
        address: str,
        space: dict[str, Any],
        credentials: Credentials,
        lost: Callable[[_ServerConnection], None],
    ):
        self._address, self._report_lost, self.is_lost = address, lost, False
        self._requested: dict[int, Future[PullResponse]] = {}
        connection, self.transport = connect_to(address, space, CHUNKS, credentials)
        with closed_on_failure(connection):
            self.channel = TransferChannel(connection)
        self.channel.start(self._receive, self._lost)

    def request(self, number: int, timeout: float) -> PullResponse:
        """Have a chunk published.

        Raises:
            ChunkGoneError: it is not held any more, or nothing is answered in time.
        """
        answer = self._requested[number] = Future()
        self.channel.send(PullRequest(number))
        try:
            response = PullResponse(number, 0) if self.is_lost else answer.result(timeout)
        except FutureTimeoutError:
            raise ChunkGoneError(f"{self._address} does not answer") from None
        finally:
            self._requested.pop(number, None)
        if not response.pull:
            raise ChunkGoneError(f"chunk {number} is not kept any more at {self._address}")
        return response

    def _receive(self, message: Any) -> None:
        if isinstance(message, PullResponse):
            self._answer(message)

    def _lost(self) -> None:
        self.is_lost = True
        for number in list(self._requested):
            self._answer(PullResponse(number, 0))
        self._report_lost(self)

    def _answer(self, response: PullResponse) -> None:
        answer = self._requested.get(response.number)
        if answer is not None and not answer.done():
            answer.set_result(response)
