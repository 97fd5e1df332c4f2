"""`FrontEnds`: starts the front end processes, restarts them and collects their counters."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsjax.background import contained, note_failure
from dsjax.engine.contract.sampling_params import SamplingError
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.errors import UserError
from dsjax.serve.front_ends import messages
from dsjax.serve.front_ends.link import FrontEnd
from dsjax.serve.front_ends.shared_engine import SharedEngine
from dsjax.serve.metrics_families import Family, sum_over_processes
from dsjax.serve.serving import Phase, QueueGate

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
_GATHER_SECONDS = 2.0
_END_SECONDS = 8.0
_MAX_FAILED_STARTS = 3
_RESTART_SECONDS = 0.5


class FrontEnds:
    """All front ends. This process keeps their listening sockets open, so that a restarted front end gets the pending connections.

    Attributes:
        gate: limits the queue over all front ends; None: no limit.
    """

    def __init__(
        self, engine: SharedEngine, listeners: Sequence[socket.socket], welcome: Callable[[int, str], messages.Welcome]
    ):
        self.engine = engine
        self._listeners = list(listeners)
        self._welcome = welcome
        self._links: dict[int, FrontEnd] = {}
        self._ended_samples: dict[tuple[str, str, tuple[str, ...]], float] = {}
        self._phase = Phase.WARMING_UP
        self._ending = False
        self._tasks: set[asyncio.Task] = set()
        self.gate: QueueGate | None = None
        self.address = ""
        self.failure: str | None = None
        engine.front_ends = self

    @property
    def links(self) -> list[FrontEnd]:
        """The running front ends."""
        return list(self._links.values())

    async def start(self, address: str) -> None:
        """Start all front ends and wait until they listen. address: the engine's own server, for forwarded requests.

        Raises:
            UserError: a front end does not start.
        """
        self.address = address
        for index in range(len(self._listeners)):
            self._spawn(self._keep_running(index))
        while not self._all_listen():
            if self.failure is not None:
                raise UserError(self.failure)
            if self._ending:
                return
            await asyncio.sleep(0.02)
        self._spawn(self._gather_periodically())

    def _all_listen(self) -> bool:
        return len(self._links) == len(self._listeners) and all(link.is_listening.is_set() for link in self.links)

    def send_all(self, message: Any) -> None:
        """Send a message to every front end."""
        for link in self.links:
            link.send(message)

    def fail(self) -> None:
        """Report an engine failure; each front end fails its requests and exits."""
        self._ending = True
        self.send_all(messages.Failed())

    def send_phase(self, phase: Phase) -> None:
        """Send the server's phase to every front end."""
        self._phase = phase
        self.send_all(messages.PhaseIs(phase.value))

    async def abort(self, request_id: str | None) -> int:
        """Abort the requests with an id, or all, in every front end; return their number."""
        counts = await self._ask(lambda number: messages.AbortById(number, request_id))
        return sum(counts)

    async def gather(self) -> None:
        """Collect the counters of all front ends."""
        await self._ask(messages.Gather)

    def families(self, families: Sequence[Family]) -> list[Family]:
        """Return the engine's metric families plus the counts of all front ends, ended ones included."""
        snapshots = [[(*key, value) for key, value in self._ended_samples.items()]]
        return sum_over_processes(families, snapshots + [link.samples for link in self.links])

    async def end(self) -> None:
        """Make all front ends stop listening and exit; kill any that take too long."""
        self._ending = True
        self.send_all(messages.EndProcess())
        deadline = time.monotonic() + _END_SECONDS
        links = self.links
        while any(link.process.poll() is None for link in links) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill()
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()

    def kill(self) -> None:
        """Kill all processes."""
        self._ending = True
        for link in self.links:
            if link.process.poll() is None:
                link.process.kill()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_running(self, index: int) -> None:
        """Restart a front end whenever it dies, unless it repeatedly dies before it listens."""
        num_failed_starts = 0
        while not self._ending:
            link = None
            try:
                link = await self._launch(index)
                await self._serve(link)
            except OSError as error:
                note_failure("front end", error, "It is restarted.")
                reason = f"cannot be started: {error.strerror or error}" if link is None else _exit_reason(link.process)
            except Exception as error:  # it sent an invalid message
                note_failure("front end", error, "It is restarted.")
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = _exit_reason(link.process)
            if self._ending:
                return
            if link is not None and link.is_listening.is_set():
                num_failed_starts = 0
            elif link is not None or self._phase is Phase.WARMING_UP:  # the other front ends serve meanwhile
                num_failed_starts += 1
            logger.error("front end %d has ended (%s); restarting it", index, reason)
            if num_failed_starts == _MAX_FAILED_STARTS:
                self.failure = (
                    f"front end {index} failed to start {num_failed_starts} times ({reason}); see its log messages"
                )
                if self.engine.on_death is not None and self._phase is not Phase.WARMING_UP:
                    self.engine.fail(UserError(self.failure))
                return
            await asyncio.sleep(_RESTART_SECONDS)

    async def _launch(self, index: int) -> FrontEnd:
        own_socket, child_socket = socket.socketpair()
        listener = self._listeners[index]
        inherited = (child_socket.fileno(), listener.fileno())
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsjax.serve.front_ends.front_end", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            own_socket.close()
            raise
        finally:
            child_socket.close()
        try:
            reader, writer = await asyncio.open_connection(sock=own_socket)
        except OSError:
            process.kill()
            own_socket.close()
            await asyncio.to_thread(process.wait)
            raise
        link = self._links[index] = FrontEnd(index, process, messages.Channel(reader, writer, messages.FromFrontEnd))
        link.send(self._welcome(index, self.address))
        link.send(messages.PhaseIs(self._phase.value))
        return link

    async def _serve(self, link: FrontEnd) -> None:
        """Handle a front end's messages until it ends; then abort its requests."""
        try:
            async for message in link.channel.messages():
                try:
                    self._receive(link, message)
                except Exception as error:
                    if isinstance(message, messages.Add):
                        self._refuse(link, message, error)
                    else:
                        note_failure("front end requests", error)
        finally:
            link.channel.close()
            aborted = self.engine.drop(link, list(link.requests))
            link.channel.fail(ConnectionError("the front end has ended"))
            for name, suffix, labels, value in link.samples:
                key = (name, suffix, tuple(labels))
                self._ended_samples[key] = self._ended_samples.get(key, 0) + value
            link.samples = []
            if not self._ending:
                for observer in self.engine.observers if aborted else ():
                    observer.on_ended(aborted, FinishReason.ABORT)
                link.process.kill()
            await asyncio.to_thread(link.process.wait)

    def _receive(self, link: FrontEnd, message: Any) -> None:
        match message:
            case messages.Add():
                self._add(link, message)
            case messages.Abort():
                link.compiling.difference_update(message.handles)
                self.engine.drop(link, message.handles)
            case messages.Snapshot():
                link.samples = message.samples
                link.channel.resolve(message.number, len(message.samples))
            case messages.Count():
                link.channel.resolve(message.number, message.count)
            case messages.Hello():
                link.is_listening.set()

    def _add(self, link: FrontEnd, message: messages.Add) -> None:
        refusal = self._queue_refusal(message)
        if refusal is not None:
            link.send(messages.AddResponse(message.number, refusal))
        elif any(request.params.structured_outputs is not None for request in message.requests):
            self._spawn(self._add_with_grammars(link, message))
        else:
            self._admit(link, message, self._build_requests(message))

    async def _add_with_grammars(self, link: FrontEnd, message: messages.Add) -> None:
        handles = {handle for request in message.requests for handle, _, _ in request.completions}
        link.compiling |= handles
        try:
            requests = await asyncio.to_thread(self._build_requests, message)
            if self._links.get(link.index) is link and link.process.poll() is None:
                self._admit(link, message, requests)
                self.engine.drop(link, handles - link.compiling)
        except Exception as error:
            self._refuse(link, message, error)
        finally:
            link.compiling -= handles

    def _build_requests(self, message: messages.Add) -> list[list[Request]]:
        """Create the core's requests. This is slow if a grammar has to be compiled."""
        make_rules = self.engine.make_rules
        return [
            request.to_requests(make_rules(request.params, frozenset(request.stop_ids), request.token_ids))
            for request in message.requests
        ]

    def _admit(self, link: FrontEnd, message: messages.Add, requests: list[list[Request]]) -> None:
        for request, completions in zip(message.requests, requests, strict=True):
            self.engine.admit(link, request, completions)
        link.send(messages.AddResponse(message.number))

    def _refuse(self, link: FrontEnd, message: messages.Add, error: Exception) -> None:
        """Tell a front end why its requests were not admitted."""
        if isinstance(error, SamplingError):
            link.send(messages.AddResponse(message.number, error.reason, error.param))
            return
        note_failure("front end requests", error, "Its requests end with an error.")
        self.engine.drop(link, [handle for request in message.requests for handle, _, _ in request.completions])
        link.send(messages.AddResponse(message.number, "the engine process failed to add the request", failed=True))

    def _queue_refusal(self, message: messages.Add) -> str | None:
        num_completions = sum(len(request.completions) for request in message.requests)
        num_tokens = sum(len(request.completions) * len(request.token_ids) for request in message.requests)
        return self.gate and self.gate.why_full(num_completions, num_tokens)

    async def _ask(self, question: Callable[[int], Any]) -> list[Any]:
        """Ask all front ends; return the answers that arrive in time."""
        futures = [link.channel.ask(question) for link in self.links]
        if futures:
            await asyncio.wait(futures, timeout=_ANSWER_SECONDS)
        return [future.result() for future in futures if future.done() and future.exception() is None]

    async def _gather_periodically(self) -> None:
        """Collect counters every two seconds for the history, and so that few are lost when a front end dies."""
        while True:
            await asyncio.sleep(_GATHER_SECONDS)
            with contained("front end counters"):
                await self.gather()


def _exit_reason(process: subprocess.Popen) -> str:
    code = process.poll()
    if code is None:
        return "closed its channel"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
