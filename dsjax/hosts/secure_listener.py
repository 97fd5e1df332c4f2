"""`SecureListener`: a port at which processes of the deployment connect, and at which nobody else can take anything away from them."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from dsjax.background import start_thread
from dsjax.hosts.secure_channel import GREETING_SECONDS, Deadline, RefusedError, SecureChannel, Stranger, answer
from dsjax.messaging.credentials import Credentials

_log = logging.getLogger(__name__)

MOST_GREETINGS = 64
"""Connections that have not proved yet that they belong to the deployment."""
MOST_CONNECTIONS = 1024
"""Connections that have."""
LOG_SECONDS = 60.0
"""At most one line in so many seconds tells of strangers."""
_PLACE_SECONDS = 0.05
"""For which a greeting keeps its place however many others come; a member's is over long before."""
_BACKLOG = 512
_SHORT_OF_FILES_SECONDS = 0.1
_RESET = struct.pack("ii", 1, 0)


class SecureListener:
    """Accepts connections in a thread until it is closed. Each has a thread, which greets it and then serves it.

    Where all places for greetings are taken, the oldest connection of the address that holds most of them is reset once it has had its
    place for a while. A member needs it for some milliseconds, and tries again, so a stranger who holds all places keeps nobody out.

    Args:
        serve: by service, what is called with a connection's channel, in a thread of its own. Returning ends nothing: the channel is
            open until one side closes it. What it raises of `OSError` and `EOFError` closes it.
        listener: socket that listens. name: of its threads.

    Attributes:
        port: at which it listens. turned_away: strangers so far, by what was wrong with them.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        serve: Mapping[str, Callable[[SecureChannel], None]],
        name: str,
        *,
        most_connections: int = MOST_CONNECTIONS,
    ):
        self._listener, self._credentials, self._serve, self._name = listener, credentials, dict(serve), name
        self._host, self.port = listener.getsockname()[:2]
        credentials.check_host(self._host)
        self._most_connections = most_connections
        self._greetings: dict[_Greeting, None] = {}  # the oldest first
        self._channels: set[SecureChannel] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.turned_away: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._told_at = -LOG_SECONDS
        listener.settimeout(None)
        listener.listen(_BACKLOG)
        start_thread("listener", self._accept, name=name, restarts=True)

    def close(self, *, connections: bool = False) -> None:
        """Let nobody in any more. connections: end those that there are, too."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # to close it alone would wake no thread that waits in `accept`
        self._listener.close()
        with self._changed:
            for greeting in self._greetings:
                greeting.reset()
            channels = list(self._channels) if connections else []
            self._changed.notify_all()
        for channel in channels:
            channel.close()
        self._tell(at_once=True)

    @property
    def num_connections(self) -> int:
        """Connections that have proved that they belong to the deployment, and are open."""
        return len(self._channels)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or this process has no file descriptor left, which others' ends give back
                if not self._closed:
                    time.sleep(_SHORT_OF_FILES_SECONDS)
                continue
            self._make_room()
            greeting = _Greeting(connection, address[0])
            with self._changed:
                self._greetings[greeting] = None
            try:
                end = lambda error, connection=connection: connection.close()  # noqa: E731
                start_thread("connection", self._greet, greeting, name=self._name, on_failure=end)
            except RuntimeError:  # no thread can be had
                greeting.reset()
                connection.close()
                self._leave(greeting)

    def _make_room(self) -> None:
        """Wait until there is a place for a greeting; take one from whoever holds most of them."""
        with self._changed:
            while len(self._greetings) >= MOST_GREETINGS and not self._closed:
                [(host, _)] = Counter(greeting.host for greeting in self._greetings).most_common(1)
                oldest = next(greeting for greeting in self._greetings if greeting.host == host)
                age = time.monotonic() - oldest.since
                if age >= _PLACE_SECONDS:
                    oldest.reset()
                self._changed.wait_for(
                    lambda: len(self._greetings) < MOST_GREETINGS or self._closed,
                    GREETING_SECONDS if oldest.was_reset else _PLACE_SECONDS - age,
                )

    def _greet(self, greeting: _Greeting) -> None:
        connection = greeting.connection
        try:
            channel, end = answer(connection, self._credentials, greeting.deadline, list(self._serve))
            self._leave(greeting)
            if greeting.was_reset:  # as it proved itself: its caller sees the reset, and tries again
                raise Stranger("for which there was no place")
        except Stranger as error:
            if not self._closed:
                self._turn_away("for which there was no place" if greeting.was_reset else str(error))
            if error.may_try_again:
                greeting.reset()
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        finally:
            self._leave(greeting)
        with self._changed:
            refusal = f"there are {self._most_connections:,} connections already"
            if len(self._channels) < self._most_connections:
                refusal = ""
                self._channels.add(channel)
        channel.on_close(lambda: self._channels.discard(channel))
        try:
            end("it is closing" if self._closed else refusal)
            self._serve[channel.service](channel)
        except RefusedError as error:
            _log.warning("A connection from %s to port %s was refused: %s", channel.peer, self.port, error)
            channel.close()
        except (OSError, EOFError):
            channel.close()
        except BaseException:
            channel.close()
            raise

    def _leave(self, greeting: _Greeting) -> None:
        with self._changed:
            self._greetings.pop(greeting, None)
            self._changed.notify_all()

    def _turn_away(self, reason: str) -> None:
        with self._changed:
            self.turned_away[reason] += 1
        self._tell()

    def _tell(self, at_once: bool = False) -> None:
        """Say in the log how many strangers came, at most once in `LOG_SECONDS`."""
        with self._changed:
            new, now = self.turned_away - self._told, time.monotonic()
            if not new or (not at_once and now - self._told_at < LOG_SECONDS):
                return
            self._told, self._told_at = self.turned_away.copy(), now
        _log.warning("Connections to port %s of %s were turned away: %s.", self.port, self._host, counted(new))


class _Greeting:
    """A connection that has not proved yet that it belongs to the deployment."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection, self.host, self.since = connection, host, time.monotonic()
        self.deadline, self.was_reset = Deadline(connection, GREETING_SECONDS), False

    def reset(self) -> None:
        """Have the greeting end at once, and the other side see a reset, by which it knows that it was not its key."""
        self.was_reset = True
        self.deadline.end_now()
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.connection.shutdown(socket.SHUT_RD)  # wakes its thread, and sends nothing


def counted(turned_away: Mapping[str, int]) -> str:
    """Say how many were turned away, by reason."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(turned_away.items()))
