"""Messages between prefill and decode engines in different processes: `PrefillServer` and `RemoteLink`."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from dsjax.addresses import split_address
from dsjax.background import start_thread
from dsjax.engine.contract.commands import int32s
from dsjax.engine.contract.executor import Progress
from dsjax.engine.transfer.chunk_network import ROLE, ChunkServer, RemoteChunks
from dsjax.engine.transfer.messages import (
    CancelTransfer,
    Chunk,
    FlushPages,
    Greeting,
    PrefillLink,
    PrefillRequest,
    ReleaseChunk,
    ToDecode,
    ToPrefill,
    TransferFailed,
)
from dsjax.engine.transfer.prefill_service import Receive
from dsjax.messaging import Endpoint, Peer, Request
from dsjax.messaging.curve import LISTENER
from dsjax.messaging.endpoint import CONNECT_SECONDS

_log = logging.getLogger(__name__)
_SERVICE = "prefill"


class PrefillServer:
    """A `PrefillEngine` that decode engines of other processes reach at an endpoint.

    chunks: this process's, closed with the engine; owns_endpoint: the endpoint is too. space: as in `Greeting`.
    """

    def __init__(
        self,
        engine: Any,
        chunks: ChunkServer,
        space: dict[str, Any],
        endpoint: Endpoint,
        *,
        owns_endpoint: bool = False,
    ):
        self.engine, self.endpoint = engine, endpoint
        self.space = msgspec.msgpack.decode(msgspec.msgpack.encode(space, enc_hook=str))  # as the other side sends it
        self._chunks, self._owns_endpoint = chunks, owns_endpoint
        self._decoders: dict[Peer, Receive] = {}
        endpoint.serve(_SERVICE, self._take, roles=(ROLE,), kind=Greeting | ToPrefill)

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return self.endpoint.address

    def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        priority: int = 0,
        room: int | None = None,
        dp_rank: int | None = None,
    ) -> dict[str, str]:
        """Begin to compute a prompt, and give at once what its decode engine has to be told.

        room: where the decode engine is told beforehand (`bootstrap_room`). dp_rank: see `RequestOptions`.
        """
        params = handoff(self.address, room)
        page_size = self.engine.core.scheduler.config.page_size
        end = (len(token_ids) - 1) // page_size
        if end:
            tokens = int32s(token_ids[: end * page_size + 1])
            self.engine.post(PrefillRequest(params["transfer"], tokens, 0, end, salt, priority, dp_rank=dp_rank), None)
        return params

    def cancel(self, transfer: str) -> None:
        """Give up a prompt, by the name that `prefill` gave."""
        self.engine.post(CancelTransfer(transfer), None)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape, in all processes."""
        self.engine.warm_up(progress)

    def shutdown(self) -> None:
        """End the connections and the engine."""
        self.endpoint.withdraw(_SERVICE)
        for peer in list(self._decoders):
            peer.close()
        self.engine.shutdown()
        self._chunks.close()
        if self._owns_endpoint:
            self.endpoint.close()

    def _take(self, request: Request) -> None:
        """Greet a decode engine, or pass on what it asks for."""
        peer, message = request.peer, request.body
        if not isinstance(message, Greeting):
            if peer in self._decoders:
                self.engine.post(message, self._decoders[peer])
            return
        mine, theirs = self.space, message.space
        different = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        if different:
            values = (f"{key} ({mine.get(key)!r} here, {theirs.get(key)!r} there)" for key in different)
            request.refuse(
                f"pages of the two sides differ in {', '.join(values)}; start both with the same model and options"
            )
            return
        if peer not in self._decoders:
            self._decoders[peer] = partial(peer.send, _SERVICE)
            peer.on_lost(lambda: self.engine.leave(self._decoders.pop(peer)))
        request.reply()


class RemoteLinks:
    """Makes the links of a decode engine to prefill engines in other processes.

    chunks: by which chunks are pulled. space: as in `Greeting`. owns_endpoint: whether the endpoint of `chunks` is closed with the links.
    """

    def __init__(self, chunks: RemoteChunks, space: dict[str, Any], *, owns_endpoint: bool = False):
        self.chunks, self.space, self._owns_endpoint = chunks, space, owns_endpoint
        self.of: dict[Peer, RemoteLink] = {}
        chunks.endpoint.serve(_SERVICE, self._take, roles=(LISTENER,), kind=ToDecode)

    def link_to(self, address: str) -> RemoteLink:
        """Make the link to a prefill engine; a `UserError` where the address is none."""
        return RemoteLink(address, self)

    def close(self) -> None:
        """End the connections."""
        self.chunks.close()
        if self._owns_endpoint:
            self.chunks.endpoint.close()

    def _take(self, request: Request) -> None:
        link = self.of.get(request.peer)
        if link is not None:
            link.receive(request.body)


class RemoteLink(PrefillLink):
    """A prefill engine of another process. It connects when it is asked for something, and again after a loss."""

    def __init__(self, address: str, links: RemoteLinks):
        split_address(address)
        self.address, self._links = address, links
        self._lock = threading.Lock()
        self._outbox: list[ToPrefill] = []  # until it is connected
        self._is_connecting = self._is_closed = False
        self._peer: Peer | None = None

    @property
    def is_idle(self) -> bool:
        """As of `PrefillLink`."""
        return self._peer is None and not self._is_connecting

    def send(self, message: ToPrefill) -> None:
        """Queue a message. Without a connection, a thread makes one; a flush alone waits until something else needs one."""
        with self._lock:
            if self._peer is not None:
                self._peer.send(_SERVICE, message)
            elif self._is_closed or isinstance(message, ReleaseChunk):
                return  # with the connection, prefill has dropped its chunks
            elif isinstance(message, FlushPages) and not self._is_connecting:
                self._outbox = [message]
            else:
                self._outbox.append(message)
                if not self._is_connecting:
                    self._is_connecting = True
                    start_thread("transfer connection", self._connect, name="dsjax-transfer", on_failure=self._fail)

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Pull a chunk to this device."""
        return self._links.chunks.pull(address, number, device)

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._is_closed, self._outbox = True, []
            if self._peer is not None:
                self._peer.close()

    def _connect(self) -> None:
        try:
            peer = self._links.chunks.peer(self.address)
            self._links.of[peer] = self
            try:
                peer.request(_SERVICE, Greeting(self._links.space)).result(CONNECT_SECONDS)
            except BaseException:
                del self._links.of[peer]
                peer.close()
                raise
        except Exception as error:  # whatever it is: what was asked for must not wait for an answer
            self._fail(error)
            return
        with self._lock:
            for message in self._outbox:
                peer.send(_SERVICE, message)
            self._outbox, self._peer, self._is_connecting = [], peer, False
            if self._is_closed:
                peer.close()
        peer.on_lost(lambda: self._lost(peer))

    def _fail(self, error: Exception) -> None:
        """Give up what was asked for until now. The next request has another connection tried."""
        with self._lock:
            # The next connection still has to bring this: the prefill engine has pages that nobody may find any more.
            self._outbox = [message for message in self._outbox if isinstance(message, FlushPages)][:1]
            self._is_connecting = False
        reason = f"the prefill engine at {self.address} cannot be reached: {str(error) or 'it does not answer'}"
        _log.warning("%s. Prompts are computed where they are decoded.", reason)
        self.receive(TransferFailed("", reason))

    def _lost(self, peer: Peer) -> None:
        del self._links.of[peer]
        with self._lock:
            self._peer = None
        self.receive(TransferFailed("", f"the connection to the prefill engine at {self.address} is lost"))


def handoff(address: str, room: int | None = None) -> dict[str, str]:
    """Say what a decode engine has to be told of a prompt that a prefill engine computes for it: where, and under which name.

    room: `bootstrap_room`, where both sides are told at the same time; None: a new name.
    """
    return {"address": address, "transfer": f"room-{room}" if room is not None else uuid.uuid4().hex}
