"""Prefill and decode in different processes: `PrefillServer` and `RemoteLink`, between which their messages go over TCP."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dsjax.engine.commands import int32s
from dsjax.engine.page_channel import Channel, Listener, connected, split_address
from dsjax.engine.page_transfer import Ask, Cancel, Failed, Forget, Offer, Parcel, Release, ToPrefill
from dsjax.engine.parcel_network import ParcelServer, RemoteParcels
from dsjax.engine.prefill_engine import PrefillEngine, Receive
from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.engine.executor import Progress

_log = logging.getLogger(__name__)


class PrefillServer:
    """A prefill engine that decode engines of other processes reach at an address. Parcels are pulled elsewhere.

    space: as of `Hello`. parcels: this process's, which ends with the engine.
    """

    def __init__(self, engine: PrefillEngine, parcels: ParcelServer, space: dict[str, Any], host: str, port: int = 0):
        self.engine, self._parcels = engine, parcels
        self.listener = Listener(lambda connection: _Client(self, connection), space, host, port)

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return self.listener.address

    def prefill(
        self, token_ids: Sequence[int], *, salt: str | None = None, priority: int = 0, room: int | None = None
    ) -> dict[str, str]:
        """Begin to compute a prompt; what its decode engine has to be told, at once.

        room: where the decode engine is told beforehand (`bootstrap_room`); it may have asked already.
        """
        params = handoff(self.address, room)
        end = (len(token_ids) - 1) // self.engine.core.scheduler.config.page_size
        if end:
            tokens = int32s(token_ids[: end * self.engine.core.scheduler.config.page_size + 1])
            self.engine.post(Ask(params["transfer"], tokens, 0, end, salt, priority), None)
        return params

    def cancel(self, transfer: str) -> None:
        """Nobody wants a prompt any more; the name as `prefill` gave it."""
        self.engine.post(Cancel(transfer), None)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape before the first prompt, in all processes."""
        core = self.engine.core
        core.executor.warm_up(progress)
        if core.generations is not None:
            core.generations.has_warmed_up()

    def shutdown(self) -> None:
        """End the connections and the engine."""
        self.listener.close()
        self.engine.shutdown()
        self._parcels.close()


class _Client:
    """One decode engine, as a server sees it."""

    def __init__(self, server: PrefillServer, connection: socket.socket):
        self._server = server
        self._transfers: set[str] = set()
        self.channel = Channel(connection, self._take, self._leave)

    def _take(self, message: Any) -> None:
        if isinstance(message, Ask | Cancel | Release | Forget):
            if isinstance(message, Ask):
                self._transfers.add(message.transfer)
            elif isinstance(message, Cancel):
                self._transfers.discard(message.transfer)
            self._server.engine.post(message, self.channel.send)

    def _leave(self) -> None:
        """The decode engine has gone: nobody wants what it asked for."""
        for name in self._transfers:
            self._server.engine.post(Cancel(name), self.channel.send)
        self._server.listener.forget(self)


class RemoteLink:
    """A prefill engine of another process, as of `PrefillLink`. It connects when it is asked for something, and again after a loss.

    parcels: by which its parcels are pulled, from whichever process keeps them. space: as of `Hello`.
    """

    def __init__(self, address: str, parcels: RemoteParcels, space: dict[str, Any]):
        split_address(address)
        self.address, self._parcels, self._space = address, parcels, space
        self._receive: Receive = lambda message: None
        self._outbox: queue.SimpleQueue[ToPrefill | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="dsjax-transfer", daemon=True)
        self._thread.start()

    def connect(self, receive: Receive) -> None:
        """Have its messages handed to `receive`."""
        self._receive = receive

    def send(self, message: ToPrefill) -> None:
        """Queue a message."""
        self._outbox.put(message)

    def pull(self, number: int, device: Any, address: str = "") -> Parcel:
        """A parcel on this device."""
        return self._parcels.pull(address, number, device)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Its own process does that."""

    def close(self) -> None:
        """End the connections."""
        self._outbox.put(None)
        self._parcels.close()

    def _run(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                if self._channel is None:
                    if not isinstance(message, Ask | Cancel):
                        continue  # it has forgotten everything
                    self._channel = self._connected()
                self._channel.send(message)
            except (OSError, EOFError, msgspec.MsgspecError, UserError) as error:
                reason = f"the prefill engine at {self.address} cannot be reached: {error}"
                _log.warning("%s. Prompts are computed where they are decoded.", reason)
                self._receive(Failed("", reason))
        if self._channel is not None:
            self._channel.close()

    def _connected(self) -> Channel:
        connection, _ = connected(self.address, self._space)
        channel = Channel(connection, self._take, lambda: self._lost(channel))
        channel.start()
        return channel

    def _take(self, message: Any) -> None:
        if isinstance(message, Offer | Failed):
            self._receive(message)

    def _lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        self._receive(Failed("", f"the connection to the prefill engine at {self.address} is lost"))


def handoff(address: str, room: int | None = None) -> dict[str, str]:
    """What a decode engine has to be told of a prompt that a prefill engine computes for it: where, and under which name.

    room: `bootstrap_room`, where both sides are told of the request at the same time; None: a new name.
    """
    return {"address": address, "transfer": f"room-{room}" if room is not None else uuid.uuid4().hex}
