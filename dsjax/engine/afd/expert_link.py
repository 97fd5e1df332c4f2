"""``ExpertLink``: the attention side's link to one process with experts, which may die and come back."""

from __future__ import annotations

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
    """A process with experts has not come back in time."""


class LinkClosedError(RuntimeError):
    """The link was closed under a call: the engine ends, or goes on in another generation."""


Errand = tuple[Call, np.ndarray, np.ndarray]
"""A call, the rows that go with it, and memory for the answers."""


def check_reachable(endpoint: Endpoint, address: str) -> None:
    """Check that an expert process answers at an address; a `UserError` where none does within a few seconds."""
    try:
        endpoint.ping(address, _ROLE, _CHECK_SECONDS)
    except (OSError, UserError) as error:
        raise UserError(
            f"no expert process answers at {address} ({error}), and the attention side would wait for it; ask again when it is there"
        ) from error


class ExpertLink:
    """Has the process at ``HOST:PORT`` do one thing after the other, in a thread, and again where the connection ends.

    opening: gives what a connection begins with. patience: seconds in which a process must be there, at the start and after a loss.
    """

    def __init__(self, endpoint: Endpoint, address: str, opening: Callable[[], Open], *, patience: float):
        self.address, self.patience = address, patience
        self._endpoint, self._opening = endpoint, opening
        self._peer: Peer | None = None
        self._link: Link | None = None  # of the peer, where it is open
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-experts")
        self._closed, self._known = False, False
        self.losses, self.last_gap, self.calls, self.sent, self.received = 0, 0.0, 0, 0, 0

    @property
    def counts(self) -> LinkCounts:
        """Counters of the link."""
        connected = self._link is not None and not self._peer.lost
        return LinkCounts(connected, self.losses, self.last_gap, self.calls, self.sent, self.received)

    def begin(self, prepare: Callable[[], Errand]) -> Future[None]:
        """Make a call in its turn, when the link's thread calls ``prepare``."""
        return self._thread.submit(lambda: self._make(prepare()))

    def ask(self, service: str, body: Any) -> Future[None]:
        """Ask for something else, in its turn."""
        return self._thread.submit(self._until_done, lambda again: self._peer.request(service, body).result())

    def connect(self, *, known: bool = False) -> None:
        """Connect, and say what both sides must have alike. known: the process was there before this link.

        Raises:
            UserError: a process that was never known refuses, or has another key. ExpertsGoneError: none is there in time.
            LinkClosedError: the link was closed meanwhile.
        """
        self._known |= known
        end, said = time.monotonic() + self.patience, set()
        while self._link is None:
            try:
                self._open(end)
                self._known = True
            except (OSError, UserError) as error:
                # A process that goes or hangs in the handshake looks like one with another key. Whoever was known before is waited for.
                if isinstance(error, UserError) and not self._known:
                    raise
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} is closed") from error
                reason = str(error) or "it says nothing"
                if time.monotonic() > end:
                    raise ExpertsGoneError(
                        f"no process with experts is at {self.address} for {self.patience:g} s ({reason}); start one with --afd-role expert"
                    ) from error
                if reason not in said:
                    _log.warning("No process with experts is at %s (%s); it is waited for.", self.address, reason)
                said.add(reason)
                time.sleep(RETRY_SECONDS)

    def _open(self, end: float) -> None:
        peer = self._peer = self._endpoint.connect(self.address, _ROLE)
        try:
            if self._closed:
                raise PeerLostError("the link is closed")
            # A process that reads experts for it is at work.
            seconds = max(RETRY_SECONDS, end - time.monotonic())
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
        call, sent, answers = errand

        def make(again: bool) -> None:
            self._link.send(msgspec.msgpack.encode(msgspec.structs.replace(call, again=again)), sent)
            message = self._link.receive()
            answered = _answers.decode(message.header)
            if answered.error:
                raise RuntimeError(answered.error)
            message.read_into(answers)

        self._until_done(make)
        self.sent += sent.nbytes
        self.received += answers.nbytes

    def _until_done(self, do: Callable[[bool], object]) -> None:
        """Do something, again if the connection ends. Raises what ``connect`` raises; `RuntimeError`: the process could not do it."""
        lost = None
        while True:
            self.connect()
            try:
                do(lost is not None)
                break
            except PeerLostError as error:
                self._disconnect()
                self.losses += 1
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} was closed under a call") from error
                _log.warning("The process with experts at %s has gone or hangs; the call is made again.", self.address)
                lost = lost or time.monotonic()
            except (RefusedError, RuntimeError) as error:
                raise RuntimeError(f"the process with experts at {self.address} failed: {error}") from error
        if lost is not None:
            self.last_gap = time.monotonic() - lost
        self.calls += 1

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        link.close()
        self._peer.close()

    def give_up(self) -> None:
        """End the connection: a call under way fails soon."""
        self._closed = True
        if self._peer is not None:
            self._peer.close()  # ends its link too

    def close(self) -> None:
        """End the connection and the thread."""
        self.give_up()
        self._thread.shutdown(cancel_futures=True)
        if self._link is not None:
            self._disconnect()
