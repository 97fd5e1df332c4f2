"""`Server`: uvicorn with a clean shutdown after signals, timeouts and engine failures."""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from dsjax.background import note_failure
from dsjax.engine.contract.executor import CompileRest
from dsjax.errors import UserError
from dsjax.serve.app import create_app
from dsjax.serve.connections import affordable_connections, bounded_connections, too_many_connections
from dsjax.serve.logs import RequestLog
from dsjax.serve.serving import Phase, Serving
from dsjax.serve.watchdog import Watchdog

# Time for clients to read the remaining events after the engine has ended all requests.
_FLUSH_SECONDS = 5
_POLL_SECONDS = 0.05
_BACKLOG = 2048  # uvicorn's default

KEEP_ALIVE_SECONDS = 75
"""Keep-alive timeout in seconds, longer than those of clients (httpx 5, aiohttp 15, nginx 60). If the server closed the connection
first, a request sent at that moment would be lost, and clients do not retry a POST. uvicorn's default is 5."""

YOUNG_OBJECTS = 20_000  # see `tune_interpreter`
SWITCH_SECONDS = 0.0005  # see `tune_interpreter`


class _StoppedError(Exception):
    """Raised between two programs of the warm-up if the server is shutting down."""


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, or until the engine dies.

    The server listens at once, warms up, and is then ready. After the first signal it refuses new requests but still listens, so `/ready`
    answers 503. Running requests have `shutdown_timeout` seconds to finish, then end with an error. A second signal stops the server
    at once. A signal during the warm-up stops the server after the current program, or after `shutdown_timeout` seconds.

    Args:
        warm_up: `warm_up(check)` compiles shapes in a thread and calls `check()` between two shapes, which raises if the server is
            shutting down. `serve_on` re-raises its other errors. To serve before all shapes are compiled, `warm_up` returns a function
            `rest`: the thread then runs `rest(check)`, which compiles the remaining shapes while requests are served.
        on_ready: called once requests are admitted.
        on_signal: called in the handler of the first signal.
        before_exit: called with the exit code before `os._exit`, which replaces Python's exit if a thread hangs in a step or a compilation.
        before_routes: see `create_app`.
    """

    _for_clients = True  # False behind front ends: its private socket has no TLS

    def __init__(
        self,
        serving: Serving,
        *,
        shutdown_timeout: float,
        log_level: str = "info",
        warm_up: Callable[[Callable[[], None]], CompileRest | None] | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_signal: Callable[[], None] = lambda: None,
        before_exit: Callable[[int], None] = lambda code: None,
        before_routes: Callable[[ASGIApp], ASGIApp] | None = None,
    ):
        self._serving = serving
        self._engine = serving.engine
        self._shutdown_timeout = shutdown_timeout
        self._warm_up = warm_up
        self._warm_up_error: BaseException | None = None
        self._warming = self._can_serve = False  # changed by the warm-up thread
        self._on_ready, self._on_signal = on_ready, on_signal
        self._before_exit = before_exit
        self._watchdog: Watchdog | None = None
        serving.phase = Phase.WARMING_UP
        serving.engine.on_death = self._stop
        config = uvicorn.Config(
            RequestLog(create_app(serving, before_routes)),
            log_level=log_level,
            log_config=None,  # the process calls `configure_logging` once, at its start
            access_log=False,
            ws="none",
            http=bounded_connections(
                serving.options.request_timeout,
                affordable_connections(serving.options.max_connections),
                lambda: serving.reject("too_many_connections", too_many_connections()),
            ),
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            **(serving.options.tls if self._for_clients else {}),
        )
        super().__init__(config)

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        return 0 if self._engine.error is None and self._warm_up_error is None else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; then warm up, and call `on_ready` once requests are admitted."""
        await super().startup(sockets)
        if not self.should_exit:
            self._starting = asyncio.create_task(self._start_serving())

    async def _start_serving(self) -> None:
        """Become ready, or shut down with the error, because clients would wait for a server that only listens."""
        try:
            await self._become_ready()
        except Exception as error:
            self._warm_up_error = self._warm_up_error or error
            self.should_exit = True

    async def _become_ready(self) -> None:
        if self._warm_up is not None:
            # Not in asyncio's thread pool: the interpreter waits for it at exit, and a compilation may take minutes.
            self._warming = True
            threading.Thread(target=self._run_warm_up, name="dsjax-warm-up", daemon=True).start()
            while self._warming and not self._can_serve:
                await asyncio.sleep(_POLL_SECONDS)
        if self.should_exit or self._warm_up_error is not None:
            self.should_exit = True
            return
        tune_interpreter()
        self._engine.start()
        self._watchdog = Watchdog.over(self._engine, self._serving.options.step_timeout)
        self._serving.enter_phase(Phase.READY)
        self._on_ready()

    def _run_warm_up(self) -> None:
        """Run `warm_up`, and then what it returns. Only an error of the first keeps the server from serving."""
        try:
            compile_rest = self._warm_up(self._raise_if_stopped)
            self._serving.compiling = compile_rest is not None
            self._can_serve = True
            if compile_rest is not None:
                compile_rest(self._raise_if_stopped)
        except _StoppedError:
            pass
        except BaseException as error:
            if self._can_serve:
                note_failure("warm up", error, "Programs that are missing are compiled when a request wants them.")
            else:
                self._warm_up_error = error
        finally:
            self._warming = self._serving.compiling = False

    def _raise_if_stopped(self) -> None:
        if self.should_exit:
            raise _StoppedError

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal; stop at once on the second."""
        if not self.should_exit:
            self._on_signal()
        self.force_exit = self.should_exit  # already stopping, or the second signal
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for running ones, abort the rest, close the listener."""
        self._serving.enter_phase(Phase.CLOSING)
        deadline = time.monotonic() + self._shutdown_timeout
        while (self._engine.num_unfinished or self._warming) and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        self._engine.abort_all()
        await super().shutdown(sockets)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.force_exit and self._has_threads:
            self._exit()  # otherwise uvicorn leaves the application unfinished, which prints a traceback

    def _stop(self) -> None:
        self.should_exit = True

    def serve_on(self, listener: socket.socket) -> int:
        """Serve until shutdown and return the exit code. A signal does not count as an error."""
        self.run(sockets=[listener])
        if self._has_threads:
            self._exit()
        if self._warm_up_error is not None:
            raise self._warm_up_error
        return self.exit_code

    @property
    def _has_threads(self) -> bool:
        """Whether a step or a compilation is running, whose thread would block or crash Python's exit."""
        return self._engine.running or self._warming

    def _exit(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # show the cursor again, which a progress bar hides
        if self._warm_up_error is not None:
            print(f"Error: {self._warm_up_error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        self._before_exit(self.exit_code)
        os._exit(self.exit_code)


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Listen at an address with `count` sockets. The system distributes connections over them.

    Raises:
        UserError: the address is not available, or the system has no SO_REUSEPORT.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UserError("--api-server-count above 1 needs SO_REUSEPORT, which this system has not; leave it out")
    # A shared socket could join another server's port, so the first socket binds the port exclusively and is shared afterwards.
    with bind(host, port) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return [bind(host, first.getsockname()[1], shared=True) for _ in range(count)]


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Listen at an address. Called before the model is loaded, so that a port in use is reported at once. Port 0: any free port.

    The socket listens at once, because binding alone does not reserve a port: another process could bind it too and listen first.
    shared: allow more sockets of this process at the address.

    Raises:
        UserError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot serve on {host} port {port}: {reason}; choose another --host or --port") from error
    return listener


def tune_interpreter() -> None:
    """Set the garbage collector and the thread switch interval for a server.

    Freeze all existing objects, which live as long as the process, and collect less often. A step creates thousands of tuples and outputs
    that reference counting frees. With Python's threshold of 700 objects, the search for cycles took a fifth of the scheduler's time at
    1,024 requests.

    The engine's thread releases the GIL in each XLA call. While the event loop writes hundreds of events, the thread waits for the switch
    interval (5 ms by default) to get the GIL back, several times per step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(SWITCH_SECONDS)
