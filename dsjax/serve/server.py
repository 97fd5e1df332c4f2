"""`Server`: uvicorn, with an end that is always clean: signals, a time limit for what runs, and a dead engine."""

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
from dsjax.serve.guards import RequestLog
from dsjax.serve.serving import Phase, Serving
from dsjax.serve.watchdog import Watchdog

# After the engine has ended every request, clients get this long to read the rest.
_FLUSH_SECONDS = 5
_LOOK_SECONDS = 0.05
_BACKLOG = 2048  # uvicorn's own

KEEP_ALIVE_SECONDS = 75
"""Seconds that a connection without a request is kept: longer than clients keep theirs (httpx 5, aiohttp 15, nginx 60). A request that a
client sends in the moment in which the server closes the connection is lost, and for a POST no client may try again by itself. uvicorn
alone would keep one for 5, as httpx does."""

YOUNG_OBJECTS = 20_000
SWITCH_SECONDS = 0.0005


class _StoppedError(Exception):
    """Raised in the warm-up, between two programs: the server is to end."""


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, or until the engine dies.

    It listens at once, warms up if it is given how, and is then ready. On the first signal it admits no more but still
    listens, so that `/ready` can be seen to be 503, and lets what runs finish for `shutdown_timeout` seconds; then it ends
    the rest with an error. On the second it ends at once. `exit_code` is 1 when the engine died, else 0.

    A signal during the warm-up ends it after the program that is being compiled, or after `shutdown_timeout` seconds without
    waiting for that.

    Args:
        warm_up: compiles every shape, in a thread of its own. It is given a function to call between two shapes, which raises
            once the server is to end. What else it raises, `serve_on` raises. It may leave shapes out, and give what compiles them
            in the same thread while requests are served; that is given the same function.
        on_ready: called once requests are admitted. on_signal: called at the first signal, in its handler.
        before_exit: called with the exit code where the process ends without Python's own end, because a thread hangs in a step or a
            compilation.
        before_routes: see `create_app`.
    """

    _for_clients = True

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
        self._warming = self._can_serve = False
        self._on_ready, self._on_signal = on_ready, on_signal
        self._before_exit = before_exit
        self._watchdog: Watchdog | None = None
        serving.phase = Phase.WARMING_UP
        serving.engine.on_death = self._stop
        config = uvicorn.Config(
            RequestLog(create_app(serving, before_routes)),
            log_level=log_level,
            log_config=None,  # `configure_logging` is for the process's start alone
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
        """What the process should end with."""
        return 0 if self._engine.error is None else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; then warm up, and call `on_ready` once requests are admitted."""
        await super().startup(sockets)
        if not self.should_exit:
            self._starting = asyncio.create_task(self._start_serving())

    async def _start_serving(self) -> None:
        """Become ready, or end with the reason: a server that only listens would keep everybody waiting."""
        try:
            await self._become_ready()
        except Exception as error:
            self._warm_up_error = self._warm_up_error or error
            self.should_exit = True

    async def _become_ready(self) -> None:
        if self._warm_up is not None:
            # Not in asyncio's pool of threads, whose end the interpreter waits for: a compilation may take minutes.
            self._warming = True
            threading.Thread(target=self._run_warm_up, name="dsjax-warm-up", daemon=True).start()
            while self._warming and not self._can_serve:
                await asyncio.sleep(_LOOK_SECONDS)
        if self.should_exit or self._warm_up_error is not None:
            self.should_exit = True
            return
        tune_interpreter()
        self._engine.start()
        self._watchdog = Watchdog.over(self._engine, self._serving.options.step_timeout)
        self._serving.enter_phase(Phase.READY)
        self._on_ready()

    def _run_warm_up(self) -> None:
        try:
            rest = self._warm_up(self._check_going_on)
            self._can_serve = True
            if rest is not None:
                rest(self._check_going_on)
        except _StoppedError:
            pass
        except BaseException as error:
            if self._can_serve:
                note_failure("warm up", error, "Programs that are missing are compiled when a request wants them.")
            else:
                self._warm_up_error = error
        finally:
            self._warming = False

    def _check_going_on(self) -> None:
        if self.should_exit:
            raise _StoppedError

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal, let finish what runs; on the second, whichever it is, end at once."""
        if not self.should_exit:
            self._on_signal()
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Admit no more, wait for what runs, end what is left, close the listener."""
        self._serving.enter_phase(Phase.CLOSING)
        deadline = time.monotonic() + self._shutdown_timeout
        while (self._engine.num_unfinished or self._warming) and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        self._engine.abort_all()
        await super().shutdown(sockets)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.force_exit and self._has_threads:
            self._exit()  # here: uvicorn would leave its application behind unended, which tells of that with a traceback

    def _stop(self) -> None:
        self.should_exit = True

    def serve_on(self, listener: socket.socket) -> int:
        """Serve until the end; give the exit code. A signal is an end like any other, not an error."""
        self.run(sockets=[listener])
        if self._has_threads:
            self._exit()
        if self._warm_up_error is not None:
            raise self._warm_up_error
        return self.exit_code

    @property
    def _has_threads(self) -> bool:
        """Whether a step or a compilation is under way: Python would wait for its thread, or crash on it."""
        return self._engine.running or self._warming

    def _exit(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a progress bar has hidden the cursor, and will not show it again
        sys.stdout.flush()
        sys.stderr.flush()
        self._before_exit(self.exit_code)
        os._exit(self.exit_code)


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Listen at an address with `count` sockets, over which the system spreads connections.

    Raises:
        UserError: the address cannot be had, or the system cannot share one.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UserError("--api-server-count above 1 needs SO_REUSEPORT, which this system has not; leave it out")
    # Sockets that share a port join those of another server. The first one shares only once it owns the port.
    with bind(host, port) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return [bind(host, first.getsockname()[1], shared=True) for _ in range(count)]


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Listen at an address before the model is loaded, so that an address in use is known at once. Port 0 takes a free one.

    A socket that is bound but does not listen owns nothing: another process may bind the address too, and the first to listen has it.

    shared: let further sockets of this process have it too.

    Raises:
        UserError: the address cannot be had.
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
    """Set Python up for a server's process: its garbage collector, and how long a thread may keep the interpreter to itself.

    All present objects are kept out of garbage collection, and it comes less often than by default: the libraries' and the model's objects
    live as long as the process, so the collector need not look through them again. A step makes some thousand tuples and outputs that
    all die with it, by their reference counts; looking for cycles every 700 objects, as Python does, was a fifth of the scheduler's
    time with 1,024 requests.

    The engine's thread lets go of the interpreter in each of its calls of XLA, and gets it back from an event loop that writes hundreds of
    events only after the switch interval: 5 ms by default, several times in a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(SWITCH_SECONDS)
