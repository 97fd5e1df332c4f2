"""`ParcelServer` and `RemoteParcels`: parcels from any process of a prefill side straight to any process of a decode side."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from dsjax.engine.transfer.page_channel import Channel, Listener, connected
from dsjax.engine.transfer.page_transfer import Granted, Parcel, ParcelGoneError, Take, Taken
from dsjax.engine.transfer.transport import Shapes, Transport

_log = logging.getLogger(__name__)
_MOST_DROPPED = 4096


class KeptParcels:
    """The parcels that a process other than the first of a prefill side keeps, in one generation. The first one counts them, and says when
    they go.

    timeout: seconds for which `take` waits for a parcel that was offered before this process has computed it.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._parcels: dict[int, Parcel] = {}
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._parcels)

    def ready(self, number: int, parcel: Parcel | None) -> None:
        """A parcel is complete. None: another process keeps it."""
        if parcel is not None:
            with self._changed:
                self._parcels[number] = parcel
                self._changed.notify_all()

    def drop(self, numbers: Sequence[int]) -> None:
        """Keep parcels no longer."""
        with self._changed:
            for number in numbers:
                self._parcels.pop(number, None)
                self._dropped[number] = None
            while len(self._dropped) > _MOST_DROPPED:
                self._dropped.popitem(last=False)
            self._changed.notify_all()

    def take(self, number: int) -> Parcel:
        """A parcel that was offered.

        Raises:
            ParcelGoneError: it is not kept any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._parcels or number in self._dropped, self._timeout)
            if number not in self._parcels:
                raise ParcelGoneError(f"parcel {number} is not kept any more")
            return self._parcels[number]


class ParcelServer:
    """What a process has parcels pulled from.

    Args:
        take: gives a parcel, or raises `ParcelGoneError`. space: as of `Hello`.
        timeout: seconds after which what was granted and not taken is let go.
    """

    def __init__(
        self,
        take: Callable[[int], Parcel],
        transport: Transport,
        space: dict[str, Any],
        host: str,
        timeout: float,
    ):
        self.take, self.transport, self.timeout = take, transport, timeout
        self.grants = itertools.count(1)
        self.listener = Listener(lambda connection: _Puller(self, connection), space, host, transport=transport.address)

    @property
    def address(self) -> str:
        """`HOST:PORT`, as offers have it."""
        return self.listener.address

    def close(self) -> None:
        """End the connections."""
        self.listener.close()


class _Puller:
    """One process of a decode side, as a server sees it."""

    def __init__(self, server: ParcelServer, connection: socket.socket):
        self._server = server
        self._granted: dict[int, tuple[float, Parcel]] = {}
        self.channel = Channel(connection, self._receive, self._leave)

    def _receive(self, message: Any) -> None:
        self._drain(time.monotonic() - self._server.timeout)
        if isinstance(message, Take):
            self.channel.send(self._grant(message.number))
        elif isinstance(message, Taken) and message.grant in self._granted:
            _, parcel = self._granted.pop(message.grant)
            self._server.transport.withdraw(message.grant, parcel, pulled=True)

    def _grant(self, number: int) -> Granted:
        server = self._server
        try:
            parcel = server.take(number)
        except ParcelGoneError:
            return Granted(number, 0)
        grant = next(server.grants)
        try:
            ticket = server.transport.publish(grant, parcel)
        except Exception:  # of whatever carries it; the other side computes these pages by itself
            _log.exception("A parcel of pages could not be published.")
            return Granted(number, 0)
        self._granted[grant] = time.monotonic(), parcel
        return Granted(number, grant, ticket)

    def _drain(self, before: float) -> None:
        for grant, (since, parcel) in list(self._granted.items()):
            if since < before:
                del self._granted[grant]
                self._server.transport.withdraw(grant, parcel, pulled=False)

    def _leave(self) -> None:
        self._drain(float("inf"))
        self._server.listener.forget(self)


class RemoteParcels:
    """The parcels of other processes, by their addresses. It connects when something is pulled, and again after a loss.

    Args:
        space: as of `Hello`. shapes: of a parcel's arrays. timeout: seconds after which a process that does not answer is given up.
    """

    def __init__(self, transport: Transport, space: dict[str, Any], shapes: Shapes, timeout: float):
        self._transport, self._space, self._shapes, self._timeout = transport, space, shapes, timeout
        self._keepers: dict[str, Future[_Keeper]] = {}
        self._lock = threading.Lock()

    def pull(self, address: str, number: int, device: Any) -> Parcel:
        """A parcel on this device, complete.

        Raises:
            ParcelGoneError: it is not kept any more, or its process cannot be reached.
        """
        keeper = self._keeper(address)
        granted = keeper.ask(number, self._timeout)
        found: Future[Parcel] = Future()
        arguments = keeper.transport, granted, device, found
        threading.Thread(target=self._pull, args=arguments, name="dsjax-pull", daemon=True).start()
        try:
            parcel = found.result(self._timeout)
        except FutureTimeoutError:
            raise ParcelGoneError(f"{address} does not send parcel {number}") from None
        except Exception as error:  # of whatever carries it
            raise ParcelGoneError(f"parcel {number} could not be pulled from {address}: {error}") from error
        keeper.channel.send(Taken(granted.grant))
        return parcel

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            known = list(self._keepers.values())
        for keeper in known:
            if keeper.done() and keeper.exception() is None:
                keeper.result().channel.close()

    def _keeper(self, address: str) -> _Keeper:
        """The connection to an address, which one thread makes while others that want it wait; those of other addresses do not."""
        with self._lock:
            found = self._keepers.get(address)
            if connects := found is None:
                found = self._keepers[address] = Future()
        if connects:
            try:
                found.set_result(_Keeper(address, self._space, lambda keeper: self._forget(address, found, keeper)))
            except Exception as error:  # whatever it is: others may wait for this
                self._forget(address, found)
                found.set_exception(ParcelGoneError(f"{address} cannot be reached: {error}"))
        return found.result()

    def _forget(self, address: str, found: Future[_Keeper], keeper: _Keeper | None = None) -> None:
        """A connection is lost, or could not be made. What carried its parcels goes too: its process may never come back."""
        with self._lock:
            if self._keepers.get(address) is found:
                del self._keepers[address]
        if keeper is not None:
            self._transport.disconnect(keeper.transport)

    def _pull(self, peer: str, granted: Granted, device: Any, found: Future[Parcel]) -> None:
        try:
            found.set_result(self._transport.pull(peer, granted.grant, granted.ticket, self._shapes, device))
        except BaseException as error:
            found.set_exception(error)


class _Keeper:
    """The connection to a process that keeps parcels. lost: told of its end."""

    def __init__(self, address: str, space: dict[str, Any], lost: Callable[[_Keeper], None]):
        self._address, self._tell_lost, self.is_lost = address, lost, False
        self._asked: dict[int, Future[Granted]] = {}
        connection, self.transport = connected(address, space)
        self.channel = Channel(connection, self._receive, self._lost)
        self.channel.start()

    def ask(self, number: int, timeout: float) -> Granted:
        """The grant of a parcel."""
        answer = self._asked[number] = Future()
        self.channel.send(Take(number))
        try:
            granted = Granted(number, 0) if self.is_lost else answer.result(timeout)
        except FutureTimeoutError:
            raise ParcelGoneError(f"{self._address} does not answer") from None
        finally:
            self._asked.pop(number, None)
        if not granted.grant:
            raise ParcelGoneError(f"parcel {number} is not kept any more at {self._address}")
        return granted

    def _receive(self, message: Any) -> None:
        if isinstance(message, Granted):
            self._answer(message)

    def _lost(self) -> None:
        self.is_lost = True
        for number in list(self._asked):
            self._answer(Granted(number, 0))
        self._tell_lost(self)

    def _answer(self, granted: Granted) -> None:
        answer = self._asked.get(granted.number)
        if answer is not None and not answer.done():
            answer.set_result(granted)
