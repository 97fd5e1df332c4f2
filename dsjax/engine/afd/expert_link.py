"""``ExpertLink``: the attention side's link to one expert process, which may die and come back."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from dsjax.engine.afd.messages import OPEN, Answered, Call, LinkCounts, Open, Opened
from dsjax.errors import UserError
from dsjax.messaging import Endpoint, Link, Peer, PeerLostError, RefusedError

RETRY_SECONDS = 0.2
_CHECK_SECONDS = 3.0
_ROLE = "attention"
_log = logging.getLogger(__name__)
_answers = msgspec.msgpack.Decoder(Answered)


class ExpertsGoneError(UserError):
    """An expert process did not answer in time."""


class LinkClosedError(RuntimeError):
    """The link was closed during a call: the engine ends, or continues in another mesh epoch."""


Errand = tuple[Call, np.ndarray, np.ndarray]
"""A call, its rows, and the buffer for the answers."""


def check_reachable(endpoint: Endpoint, address: str) -> None:
    """Check that an expert process answers at an address; raise `UserError` if none does within a few seconds."""
    try:
        endpoint.ping(address, _ROLE, _CHECK_SECONDS)
    except (OSError, UserError) as error:
        raise UserError(
            f"no expert process answers at {address} ({error}), and the attention side would wait for it; ask again when it is there"
        ) from error


class ExpertLink:
    """Sends requests to the expert process at ``HOST:PORT`` one by one, from a thread, and repeats a request if the connection is lost.

    opening: returns the first message of a connection. patience: seconds to wait for the process, at the start and after a loss.
    """

    def __init__(self, endpoint: Endpoint, address: str, opening: Callable[[], Open], *, patience: float):
        self.address, self.patience = address, patience
        self._endpoint, self._opening = endpoint, opening
        self._peer: Peer | None = None
        self._link: Link | None = None  # the peer's, while it is open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-experts")
        self._closed, self._known = False, False
        self.losses, self.last_gap, self.calls, self.sent, self.received = 0, 0.0, 0, 0, 0

    @property
    def counts(self) -> LinkCounts:
        """Counters of the link."""
        connected = self._link is not None and not self._peer.lost
        return LinkCounts(connected, self.losses, self.last_gap, self.calls, self.sent, self.received)

    def begin(self, prepare: Callable[[], Errand]) -> Future[None]:
        """Queue a call. The link's thread calls ``prepare`` once the requests before it are done."""
        return self._thread.submit(lambda: self._make(prepare()))

    def ask(self, service: str, body: Any) -> Future[None]:
        """Queue a request other than an expert call."""
        return self._thread.submit(self._until_done, lambda again: self._peer.request(service, body).result())

    def connect(self, *, known: bool = False) -> None:
        """Connect, and exchange the values that both sides must share. known: the process was reached before this link existed.

        Raises:
            UserError: a process that was never reached refuses, or has another cluster key. ExpertsGoneError: none answers in time.
            LinkClosedError: the link was closed meanwhile.
        """
        self._known |= known
        deadline, logged = time.monotonic() + self.patience, set()
        while self._link is None:
            try:
                self._open(deadline)
                self._known = True
            except (OSError, UserError) as error:
                # A process that exits or hangs in the handshake looks like one with another key. Retry if it was reached before.
                if isinstance(error, UserError) and not self._known:
                    raise
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} is closed") from error
                reason = str(error) or "it says nothing"
                if time.monotonic() > deadline:
                    raise ExpertsGoneError(
                        f"no expert process answers at {self.address} for {self.patience:g} s ({reason}); start one with --afd-role expert"
                    ) from error
                if reason not in logged:
                    _log.warning("No process with experts is at %s (%s); it is waited for.", self.address, reason)
                logged.add(reason)
                time.sleep(RETRY_SECONDS)

    def _open(self, deadline: float) -> None:
        peer = self._peer = self._endpoint.connect(self.address, _ROLE)
        try:
            if self._closed:
                raise PeerLostError("the link is closed")
            # The process may have to read experts before it replies, so it has until the deadline.
            seconds = max(RETRY_SECONDS, deadline - time.monotonic())
            opened: Opened = peer.request(OPEN, self._opening(), kind=Opened).result(seconds)
            link = Link(self._endpoint, opened.address, opened.ticket, opened.name, _ROLE)
        except (RefusedError, RuntimeError) as error:
            peer.close()
            raise UserError(f"the process with experts at {self.address} refuses: {error}") from error
        except BaseException:
            peer.close()
            raise
        peer.on_lost(link.cancel)
        self._link = link

    def _make(self, errand: Errand) -> None:
        call, rows, answers = errand

        def exchange(again: bool) -> None:
            self._link.send(msgspec.msgpack.encode(msgspec.structs.replace(call, again=again)), rows)
            message = self._link.receive()
            answered = _answers.decode(message.header)
            if answered.error:
                raise RuntimeError(answered.error)
            message.read_into(answers)

        self._until_done(exchange)
        self.sent += rows.nbytes
        self.received += answers.nbytes

    def _until_done(self, request: Callable[[bool], object]) -> None:
        """Run a request, again after each lost connection. Errors as in ``connect``; `RuntimeError`: the process failed to do it."""
        lost_at = None
        while True:
            self.connect()
            try:
                request(lost_at is not None)
                break
            except PeerLostError as error:
                self._disconnect()
                self.losses += 1
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} was closed under a call") from error
                _log.warning("The process with experts at %s has gone or hangs; the call is made again.", self.address)
                lost_at = lost_at or time.monotonic()
            except (RefusedError, RuntimeError) as error:
                raise RuntimeError(f"the process with experts at {self.address} failed: {error}") from error
        if lost_at is not None:
            self.last_gap = time.monotonic() - lost_at
        self.calls += 1

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        link.close()
        self._peer.close()

    def give_up(self) -> None:
        """End the connection; a running call fails soon."""
        self._closed = True
        if self._peer is not None:
            self._peer.close()  # ends its link too

    def close(self) -> None:
        """End the connection and the thread."""
        self.give_up()
        self._thread.shutdown(cancel_futures=True)
        if self._link is not None:
            self._disconnect()
