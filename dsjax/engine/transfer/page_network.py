"""Prefill and decode in different processes: `PrefillServer` and `RemoteLink`, between which their messages go over TCP."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsjax.background import start_thread
from dsjax.engine.contract.commands import int32s
from dsjax.engine.transfer.chunk_network import ChunkServer, RemoteChunks
from dsjax.engine.transfer.messages import (
    CancelTransfer,
    Chunk,
    FlushPages,
    PrefillLink,
    PrefillRequest,
    ReleaseChunk,
    ToDecode,
    ToPrefill,
    TransferFailed,
)
from dsjax.engine.transfer.page_channel import PAGES, TransferChannel, TransferListener, connect_to
from dsjax.engine.transfer.prefill_service import PrefillEndpoint
from dsjax.messaging.credentials import Credentials, local_credentials
from dsjax.hosts.secure_channel import closed_on_failure
from dsjax.hosts.wire import split_address

if TYPE_CHECKING:
    from dsjax.engine.contract.executor import Progress

_log = logging.getLogger(__name__)


class PrefillServer:
    """A prefill engine that decode engines of other processes reach at an address. Chunks are pulled elsewhere.

    space: as in `Greeting`. chunks: this process's, which ends with the engine. credentials: of this deployment; None: of this user on
    the loopback interface.
    """

    def __init__(
        self,
        engine: PrefillEndpoint,
        chunks: ChunkServer,
        space: dict[str, Any],
        host: str,
        port: int = 0,
        credentials: Credentials | None = None,
    ):
        self.engine, self._chunks = engine, chunks
        self.listener = TransferListener(
            lambda channel: _DecodePeer(engine, channel),
            space,
            host,
            port,
            service=PAGES,
            credentials=credentials or local_credentials(),
        )

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return self.listener.address

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

        room: where the decode engine is told beforehand (`bootstrap_room`); it may have asked already, and the prompt is then where this
            engine has put it. dp_rank: as of `RequestOptions`.
        """
        params = handoff(self.address, room)
        page_size = self.engine.core.scheduler.config.page_size
        end = (len(token_ids) - 1) // page_size
        if end:
            tokens = int32s(token_ids[: end * page_size + 1])
            self.engine.post(PrefillRequest(params["transfer"], tokens, 0, end, salt, priority, dp_rank=dp_rank), None)
        return params

    def cancel(self, transfer: str) -> None:
        """Give up a prompt that nobody wants any more, by the name that `prefill` gave."""
        self.engine.post(CancelTransfer(transfer), None)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape before the first prompt, in all processes."""
        self.engine.warm_up(progress)

    def shutdown(self) -> None:
        """End the connections and the engine."""
        self.listener.close()
        self.engine.shutdown()
        self._chunks.close()


class _DecodePeer:
    """One decode engine, as a server sees it."""

    def __init__(self, engine: PrefillEndpoint, channel: TransferChannel):
        self._engine, self._send = engine, channel.send

    def receive(self, message: Any) -> None:
        """Pass on what it asks for."""
        if isinstance(message, ToPrefill):
            self._engine.post(message, self._send)

    def leave(self) -> None:
        """Cancel what it asked for."""
        self._engine.leave(self._send)


class RemoteLink(PrefillLink):
    """A prefill engine of another process, as of `PrefillLink`. It connects when it is asked for something, and again after a loss.

    chunks: by which its chunks are pulled, from whichever process keeps them. space: as in `Greeting`. credentials: as of `PrefillServer`.
    """

    def __init__(
        self, address: str, chunks: RemoteChunks, space: dict[str, Any], credentials: Credentials | None = None
    ):
        super().__init__()
        self._credentials = credentials or local_credentials()
        split_address(address)
        self.address, self._chunks, self._space = address, chunks, space
        self._lock = threading.Lock()
        self._outbox: list[ToPrefill] = []  # until it is connected
        self._connecting = self._closed = False
        self._channel: TransferChannel | None = None

    def send(self, message: ToPrefill) -> None:
        """Queue a message. Where there is no connection a thread makes one, and ends: a side that has gone for good costs none."""
        with self._lock:
            if self._channel is not None:
                self._channel.send(message)
            elif not isinstance(message, ReleaseChunk) and not self._closed:
                # Of a chunk the prefill side has forgotten everything: it has dropped those of the connection that is lost.
                self._outbox.append(message)
                if not self._connecting:
                    self._connecting = True
                    start_thread("transfer connection", self._connect, name="dsjax-transfer", on_failure=self._give_up)

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Pull a chunk to this device."""
        return self._chunks.pull(address, number, device)

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            self._closed, channel, self._channel = True, self._channel, None
        if channel is not None:
            channel.close()
        self._chunks.close()

    def _connect(self) -> None:
        channel, reason = None, ""
        try:
            connection, _ = connect_to(self.address, self._space, PAGES, self._credentials)
            with closed_on_failure(connection):
                channel = TransferChannel(connection)
        except Exception as error:  # whatever it is: what was asked for must not wait for an answer
            reason = f"the prefill engine at {self.address} cannot be reached: {error}"
        with self._lock:
            if channel is None:
                self._outbox = _kept(self._outbox)
            elif self._closed:
                channel.close()
            else:
                # Started first: where no thread can be had, `_give_up` still finds what waits, and no other thread connects until it has.
                channel.start(self._take, lambda: self._lost(channel))
                for message in self._outbox:
                    channel.send(message)
                self._outbox, self._channel = [], channel
            self._connecting = False
        if reason:
            # What was asked for until now is given up; what is asked for from now on has another connection tried.
            _log.warning("%s. Prompts are computed where they are decoded.", reason)
            self.receive(TransferFailed("", reason))

    def _give_up(self, error: Exception) -> None:
        """Release who waits for an answer over a connection that could not be made."""
        with self._lock:
            self._connecting, self._outbox, self._channel = False, _kept(self._outbox), None
        self.receive(TransferFailed("", f"the prefill engine at {self.address} cannot be reached: {error}"))

    def _take(self, message: Any) -> None:
        if isinstance(message, ToDecode):
            self.receive(message)

    def _lost(self, channel: TransferChannel) -> None:
        with self._lock:
            if self._channel is channel:
                self._channel = None
        self.receive(TransferFailed("", f"the connection to the prefill engine at {self.address} is lost"))


def _kept(outbox: Sequence[ToPrefill]) -> list[ToPrefill]:
    """What the next connection still has to bring: a prefill engine that could not be reached has pages that nobody may find any more."""
    return [message for message in outbox if isinstance(message, FlushPages)][:1]


def handoff(address: str, room: int | None = None) -> dict[str, str]:
    """Say what a decode engine has to be told of a prompt that a prefill engine computes for it: where, and under which name.

    room: `bootstrap_room`, where both sides are told of the request at the same time; None: a new name.
    """
    return {"address": address, "transfer": f"room-{room}" if room is not None else uuid.uuid4().hex}
