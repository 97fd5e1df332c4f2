"""`BoundedConnection`: uvicorn's HTTP connection, which does not wait for ever for a request's head."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded_connections(head_timeout: float) -> type[H11Protocol]:
    """A protocol class for uvicorn, which makes one object a connection."""

    class BoundedConnection(H11Protocol):
        """Closes a connection whose next request has begun to come, or whose first has not, for too long."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch_head()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            """The timer runs while a head is on its way; what has come is no reason to start it again."""
            if self.conn.their_state is not h11.IDLE:
                self._unwatch_head()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(head_timeout, self._close_late)

        def _unwatch_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _close_late(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedConnection
