"""`Server`: uvicorn, with an end that is always clean: signals, a time limit for what runs, and a dead engine."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from dsjax.errors import UserError
from dsjax.serve.app import create_app
from dsjax.serve.serving import Serving

# After the engine has ended every request, clients get this long to read the rest.
_FLUSH_SECONDS = 5


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, or until the engine dies.

    On the first signal it admits no more, lets what runs finish for `shutdown_timeout` seconds, and then ends the rest
    with an error; on the second it ends at once. `exit_code` is 1 when the engine died, else 0.
    """

    def __init__(
        self,
        serving: Serving,
        *,
        shutdown_timeout: float,
        log_level: str = "info",
        on_ready: Callable[[], None] = lambda: None,
    ):
        self._engine = serving.engine
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready
        serving.engine.on_death = self._stop
        config = uvicorn.Config(
            create_app(serving),
            log_level=log_level,
            timeout_graceful_shutdown=int(shutdown_timeout) + _FLUSH_SECONDS,
        )
        super().__init__(config)

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        return 0 if self._engine.error is None else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; call `on_ready` once clients are answered."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish in peace. Second, whichever it is: at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, wait for what runs, end what is left."""
        limit = asyncio.create_task(self._end_requests_in_time())
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    def _stop(self) -> None:
        self.should_exit = True

    async def _end_requests_in_time(self) -> None:
        await asyncio.sleep(self._shutdown_timeout)
        self._engine.abort_all()

    def serve_on(self, listener: socket.socket) -> int:
        """Serve until the end; give the exit code. A signal is an end like any other, not an error."""
        self.run(sockets=[listener])
        if (
            self._engine.running
        ):  # a second signal, or a step that hangs: Python would wait for its thread or crash on it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.exit_code)
        return self.exit_code


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded, so that a wrong one is known at once. Port 0 takes a free one.

    Raises:
        UserError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot serve on {host} port {port}: {reason}; choose another --host or --port") from error
    return listener
