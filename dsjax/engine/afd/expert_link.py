"""``ExpertLink``: the attention side's way to one process with experts, which may die and come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np

from dsjax.addresses import split_address
from dsjax.engine.afd.link_counts import LinkCounts
from dsjax.engine.afd.messages import SERVICE, Answered, Call, Hello, Place, Stage, Welcome, reason_of, receive, send
from dsjax.errors import UserError
from dsjax.hosts.secure_channel import SecureChannel, connect
from dsjax.messaging.credentials import Credentials

RETRY_SECONDS = 0.2
_CHECK_SECONDS = 3.0
_log = logging.getLogger(__name__)


class ExpertsGoneError(UserError):
    """A process with experts has not come back in time."""


class LinkClosedError(RuntimeError):
    """The link was closed under a call: the engine ends, or its attention side goes on in another generation."""


_NOTHING = np.empty(0, np.uint8)


class Errand(NamedTuple):
    """What one process is asked for: a message, an array that follows it, and memory for what comes back."""

    message: Call | Stage | Place
    sent: np.ndarray = _NOTHING
    answers: np.ndarray = _NOTHING

    def again(self) -> Errand:
        """The same, once the connection has ended under it."""
        if isinstance(self.message, Call):
            return self._replace(message=msgspec.structs.replace(self.message, again=True))
        return self


def check_reachable(address: str, credentials: Credentials) -> None:
    """Check that an expert process answers at an address.

    Raises:
        UserError: none does, within a few seconds.
    """
    try:
        connect(split_address(address), SERVICE, credentials, _CHECK_SECONDS).close()
    except (OSError, EOFError, UserError) as error:
        raise UserError(
            f"no expert process answers at {address} ({reason_of(error)}), and the attention side would wait for it; ask again when it is "
            "there"
        ) from error


class ExpertLink:
    """Makes calls to the process at an address, one after the other, in a thread.

    A call that fails because the connection ends is made again once there is a process at the address, as often as it takes: what experts
    give depends on the rows alone, and nothing of the attention side has changed meanwhile.

    Args:
        address: ``HOST:PORT`` of the process. hello: gives what a connection begins with. patience: seconds in which a process must be
            there, at the start and after a loss. silence: seconds after which a host that says nothing is taken for dead.
    """

    def __init__(
        self, address: str, credentials: Credentials, hello: Callable[[], Hello], *, patience: float, silence: int
    ):
        self.address, self.patience, self._silence = address, patience, silence
        self._credentials, self._hello = credentials, hello
        self._channel: SecureChannel | None = None
        self._greeting: SecureChannel | None = (
            None  # the last channel that was begun, which is ``_channel`` once it is welcome
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsjax-experts")
        self._closed, self._known = False, False
        self.losses, self.last_gap, self.calls, self.sent, self.received = 0, 0.0, 0, 0, 0

    @property
    def counts(self) -> LinkCounts:
        """What the link has done so far."""
        channel = self._channel
        connected = channel is not None and channel.is_established
        return LinkCounts(connected, self.losses, self.last_gap, self.calls, self.sent, self.received)

    def begin(self, prepare: Callable[[], Errand]) -> Future[None]:
        """Run an errand, in its turn. prepare: makes it, in the link's thread, when its turn comes."""
        return self._thread.submit(self._run, prepare)

    def check(self) -> None:
        """Make sure that the process is there, over another connection: a call may be under way.

        Raises:
            UserError: it does not answer at once.
        """
        check_reachable(self.address, self._credentials)

    def connect(self, *, known: bool = False) -> None:
        """Connect, and say what both sides must have alike. known: the process was there before this link.

        Raises:
            UserError: the other side has another model or other options, does not belong to the deployment, or refuses; if it never was
                there before. ExpertsGoneError: nobody is there in time. LinkClosedError: meanwhile the link was closed.
        """
        self._known |= known
        end, said = time.monotonic() + self.patience, set()
        while self._channel is None:
            try:
                self._channel, self._known = self._greet(end), True
            except (OSError, EOFError, UserError) as error:
                # A process that is killed within the greeting looks like one with another key, and one that is told to end refuses.
                # Whoever was known before is waited for.
                if isinstance(error, UserError) and not self._known:
                    raise
                reason = reason_of(error)
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} is closed") from error
                if time.monotonic() > end:
                    raise ExpertsGoneError(
                        f"no process with experts is at {self.address} for {self.patience:g} s ({reason}); start one with --afd-role expert"
                    ) from error
                if reason not in said:
                    _log.warning("No process with experts is at %s (%s); it is waited for.", self.address, reason)
                said.add(reason)
                time.sleep(RETRY_SECONDS)

    def _greet(self, end: float) -> SecureChannel:
        channel = connect(split_address(self.address), SERVICE, self._credentials)
        self._greeting = channel
        try:
            if self._closed:
                raise ConnectionError("the link is closed")
            channel.keep_alive(self._silence, unacknowledged=True)
            channel.settimeout(
                max(RETRY_SECONDS, end - time.monotonic())
            )  # a process that reads experts for it is at work
            send(channel, self._hello())
            welcome: Welcome = receive(channel, Welcome)
            if welcome.error:
                raise UserError(f"the process with experts at {self.address} refuses: {welcome.error}")
            channel.settimeout(None)
        except BaseException:
            channel.close()
            raise
        return channel

    def _run(self, prepare: Callable[[], Errand]) -> None:
        """Run an errand, again where the connection ends, and wait for its answers.

        Raises:
            UserError, ExpertsGoneError, LinkClosedError: as of ``connect``. RuntimeError: the process could not do it.
        """
        errand, lost = prepare(), None
        while True:
            self.connect()
            try:
                send(self._channel, errand.message)
                if errand.sent.nbytes:
                    self._channel.send_bytes(memoryview(errand.sent.view(np.uint8)))
                answered: Answered = receive(self._channel, Answered)
                if answered.error:
                    raise RuntimeError(f"the process with experts at {self.address} failed: {answered.error}")
                if errand.answers.nbytes:
                    self._channel.receive_into(memoryview(errand.answers.view(np.uint8)))
            except (OSError, EOFError) as error:
                self._channel.close()
                self._channel, self.losses = None, self.losses + 1
                if self._closed:
                    raise LinkClosedError(f"the link to {self.address} was closed under a call") from error
                _log.warning(
                    "The process with experts at %s has gone (%s); the call is made again.",
                    self.address,
                    reason_of(error),
                )
                lost = time.monotonic() if lost is None else lost
                errand = errand.again()
                continue
            if lost is not None:
                self.last_gap = time.monotonic() - lost
            self.calls += 1
            self.sent += errand.sent.nbytes
            self.received += errand.answers.nbytes
            return

    def give_up(self) -> None:
        """End the connection: a call under way fails soon, also one that waits for a process."""
        self._closed = True
        if self._greeting is not None:
            self._greeting.close()

    def close(self) -> None:
        """End the connection and the thread."""
        self.give_up()
        self._thread.shutdown(cancel_futures=True)
