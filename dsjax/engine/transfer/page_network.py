"""Disaggregated prefill between processes: `PrefillServer` serves a prefill engine, `RemoteLink` connects a decode engine to one."""

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
    """Serves a `PrefillEngine` to decode engines in other processes, at an endpoint.

    chunks: this process's chunks, closed with the engine.
    space: as in `Greeting`; connections with another space are refused.
    """

    def __init__(self, engine: Any, chunks: ChunkServer, space: dict[str, Any], endpoint: Endpoint):
        self.engine, self.endpoint = engine, endpoint
        self.space = msgspec.msgpack.decode(
            msgspec.msgpack.encode(space, enc_hook=str)
        )  # the form in which the other side sends its own
        self._chunks = chunks
        self._decoders: dict[Peer, Receive] = {}
        endpoint.serve(_SERVICE, self._receive, roles=(ROLE,), kind=Greeting | ToPrefill)

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
        """Start computing a prompt. Return the parameters for its decode engine (`handoff`) immediately.

        room: `bootstrap_room`, if the decode engine gets its parameters from elsewhere. dp_rank: see `RequestOptions`.
        """
        params = handoff(self.address, room)
        page_size = self.engine.core.scheduler.config.page_size
        end = (len(token_ids) - 1) // page_size
        if end:
            tokens = int32s(token_ids[: end * page_size + 1])
            self.engine.post(PrefillRequest(params["transfer"], tokens, 0, end, salt, priority, dp_rank=dp_rank), None)
        return params

    def cancel(self, transfer: str) -> None:
        """Cancel a prompt by the transfer name that `prefill` returned."""
        self.engine.post(CancelTransfer(transfer), None)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape, in all processes."""
        self.engine.warm_up(progress)

    def shutdown(self) -> None:
        """Close the connections and shut the engine down."""
        self.endpoint.withdraw(_SERVICE)
        for peer in list(self._decoders):
            peer.close()
        self.engine.shutdown()
        self._chunks.close()
        self.endpoint.release()

    def _receive(self, request: Request) -> None:
        """Greet a decode engine, or pass its message to the engine."""
        peer, message = request.peer, request.body
        if not isinstance(message, Greeting):
            if peer in self._decoders:
                self.engine.post(message, self._decoders[peer])
            return
        own, other = self.space, message.space
        different = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
        if different:
            values = (f"{key} ({own.get(key)!r} here, {other.get(key)!r} there)" for key in different)
            request.refuse(
                f"pages of the two sides differ in {', '.join(values)}; start both with the same model and options"
            )
            return
        if peer not in self._decoders:
            self._decoders[peer] = partial(peer.send, _SERVICE)
            peer.on_lost(lambda: self.engine.leave(self._decoders.pop(peer)))
        request.reply()


class RemoteLinks:
    """A decode engine's links to prefill engines in other processes.

    chunks: pulls chunks. space: as in `Greeting`.
    """

    def __init__(self, chunks: RemoteChunks, space: dict[str, Any]):
        self.chunks, self.space = chunks, space
        self.by_peer: dict[Peer, RemoteLink] = {}
        chunks.endpoint.serve(_SERVICE, self._receive, roles=(LISTENER,), kind=ToDecode)

    def link_to(self, address: str) -> RemoteLink:
        """Make the link to a prefill engine; a `UserError` if the address is malformed."""
        return RemoteLink(address, self)

    def close(self) -> None:
        """Close the connections."""
        self.chunks.close()
        self.chunks.endpoint.release()

    def _receive(self, request: Request) -> None:
        link = self.by_peer.get(request.peer)
        if link is not None:
            link.receive(request.body)


class RemoteLink(PrefillLink):
    """A link to a prefill engine of another process. It connects with the first message, and again after a loss."""

    def __init__(self, address: str, links: RemoteLinks):
        split_address(address)
        self.address, self._links = address, links
        self._lock = threading.Lock()
        self._outbox: list[ToPrefill] = []  # messages until it is connected
        self._is_connecting = self._is_closed = False
        self._peer: Peer | None = None

    @property
    def is_idle(self) -> bool:
        """As in `PrefillLink`."""
        return self._peer is None and not self._is_connecting

    def send(self, message: ToPrefill) -> None:
        """Send or queue a message. A thread connects if necessary. A flush alone does not connect: it waits for the next other message."""
        with self._lock:
            if self._peer is not None:
                self._peer.send(_SERVICE, message)
            elif self._is_closed or isinstance(message, ReleaseChunk):
                return  # prefill drops its chunks when the connection ends
            elif isinstance(message, FlushPages) and not self._is_connecting:
                self._outbox = [message]
            else:
                self._outbox.append(message)
                if not self._is_connecting:
                    self._is_connecting = True
                    start_thread(
                        "transfer connection", self._connect, name="dsjax-transfer", on_failure=self._fail_queued
                    )

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Pull a chunk to a device."""
        return self._links.chunks.pull(address, number, device)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._is_closed, self._outbox = True, []
            if self._peer is not None:
                self._peer.close()

    def _connect(self) -> None:
        try:
            peer = self._links.chunks.peer(self.address)
            self._links.by_peer[peer] = self
            try:
                peer.request(_SERVICE, Greeting(self._links.space)).result(CONNECT_SECONDS)
            except BaseException:
                del self._links.by_peer[peer]
                peer.close()
                raise
        except Exception as error:  # any error: requests must not wait for an answer that never comes
            self._fail_queued(error)
            return
        with self._lock:
            for message in self._outbox:
                peer.send(_SERVICE, message)
            self._outbox, self._peer, self._is_connecting = [], peer, False
            if self._is_closed:
                peer.close()
        peer.on_lost(lambda: self._on_disconnect(peer))

    def _fail_queued(self, error: Exception) -> None:
        """Fail all queued requests. The next request tries to connect again."""
        with self._lock:
            # Keep a flush for the next connection: the prefill engine still caches pages that must not be reused.
            self._outbox = [message for message in self._outbox if isinstance(message, FlushPages)][:1]
            self._is_connecting = False
        reason = f"the prefill engine at {self.address} cannot be reached: {str(error) or 'it does not answer'}"
        _log.warning("%s. Prompts are computed where they are decoded.", reason)
        self.receive(TransferFailed("", reason))

    def _on_disconnect(self, peer: Peer) -> None:
        del self._links.by_peer[peer]
        with self._lock:
            self._peer = None
        self.receive(TransferFailed("", f"the connection to the prefill engine at {self.address} is lost"))


def handoff(address: str, room: int | None = None) -> dict[str, str]:
    """Return the parameters with which a decode engine fetches a prompt: the prefill engine's address and the transfer's name.

    room: `bootstrap_room`, if both sides get the request at the same time; None: a new name.
    """
    return {"address": address, "transfer": f"room-{room}" if room is not None else uuid.uuid4().hex}
