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
from dsjax.serve.front_ends.link import FrontEnd
from dsjax.serve.front_ends.messages import (
    Abort,
    AbortById,
    Add,
    AddResponse,
    Channel,
    Count,
    EndProcess,
    Failed,
    FromFrontEnd,
    Gather,
    Hello,
    PhaseIs,
    Snapshot,
    Welcome,
)
from dsjax.serve.front_ends.shared_engine import SharedEngine
from dsjax.serve.metrics_families import Family, sum_over_processes
from dsjax.serve.serving import Phase, QueueGate

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
_GATHER_SECONDS = 2.0
_END_SECONDS = 8.0
_MOST_FAILED_STARTS = 3
_RESTART_SECONDS = 0.5


class FrontEnds:
    """All front ends. This process keeps their listening sockets open, so that a restarted front end gets the pending connections.

    Attributes:
        gate: limits the queue over all front ends; None: no limit.
    """

    def __init__(
        self, engine: SharedEngine, listeners: Sequence[socket.socket], welcome: Callable[[int, str], Welcome]
    ):
        self.engine, self._listeners, self._welcome = engine, list(listeners), welcome
        self._links: dict[int, FrontEnd] = {}
        self._departed: dict[tuple[str, str, tuple[str, ...]], float] = {}
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
            self._spawn(self._keep(index))
        while not all(k in self._links and self._links[k].listens.is_set() for k in range(len(self._listeners))):
            if self.failure is not None:
                raise UserError(self.failure)
            if self._ending:
                return
            await asyncio.sleep(0.02)
        self._spawn(self._gather_often())

    def send_all(self, message: Any) -> None:
        """Send a message to every front end."""
        for link in self.links:
            link.send(message)

    def fail(self) -> None:
        """Report an engine failure; each front end fails its requests and exits."""
        self._ending = True
        self.send_all(Failed())

    def send_phase(self, phase: Phase) -> None:
        """Send the server's phase to every front end."""
        self._phase = phase
        self.send_all(PhaseIs(phase.value))

    async def abort(self, request_id: str | None) -> int:
        """Abort the requests with an id, or all, in every front end; return their number."""
        counts = await self._ask(lambda number: AbortById(number, request_id))
        return sum(counts)

    async def gather(self) -> None:
        """Collect the counters of all front ends."""
        await self._ask(Gather)

    def families(self, families: Sequence[Family]) -> list[Family]:
        """Return the engine's metric families plus the counts of all front ends, ended ones included."""
        snapshots = [[(*key, value) for key, value in self._departed.items()]]
        return sum_over_processes(families, snapshots + [link.samples for link in self.links])

    async def end(self) -> None:
        """Make all front ends stop listening and exit; kill any that take too long."""
        self._ending = True
        self.send_all(EndProcess())
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

    async def _keep(self, index: int) -> None:
        """Restart a front end whenever it dies, unless it repeatedly dies before it listens."""
        failed = 0
        while not self._ending:
            link = None
            try:
                link = await self._launch(index)
                await self._serve(link)
            except OSError as error:
                note_failure("front end", error, "It is started again.")
                how = f"it cannot be started: {error.strerror or error}" if link is None else _how(link.process)
            except Exception as error:  # it sent an invalid message
                note_failure("front end", error, "Another takes its place.")
                how = f"{type(error).__name__}: {error}"
            else:
                how = _how(link.process)
            if self._ending:
                return
            if link is not None and link.listens.is_set():
                failed = 0
            elif link is not None or self._phase is Phase.WARMING_UP:  # the other front ends serve meanwhile
                failed += 1
            logger.error("front end %d has ended (%s); another takes its place", index, how)
            if failed == _MOST_FAILED_STARTS:
                self.failure = (
                    f"front end {index} ended {failed} times before it listened ({how}); its own messages say why"
                )
                if self.engine.on_death is not None and self._phase is not Phase.WARMING_UP:
                    self.engine.fail(UserError(self.failure))
                return
            await asyncio.sleep(_RESTART_SECONDS)

    async def _launch(self, index: int) -> FrontEnd:
        here, there = socket.socketpair()
        listener = self._listeners[index]
        passed = (there.fileno(), listener.fileno())
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsjax.serve.front_ends.front_end", *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        try:
            reader, writer = await asyncio.open_connection(sock=here)
        except OSError:
            process.kill()
            here.close()
            await asyncio.to_thread(process.wait)
            raise
        link = self._links[index] = FrontEnd(index, process, Channel(reader, writer, FromFrontEnd))
        link.send(self._welcome(index, self.address))
        link.send(PhaseIs(self._phase.value))
        return link

    async def _serve(self, link: FrontEnd) -> None:
        """Handle a front end's messages until it ends; then abort its requests."""
        try:
            async for message in link.channel.messages():
                try:
                    self._receive(link, message)
                except Exception as error:
                    if isinstance(message, Add):
                        self._refuse(link, message, error)
                    else:
                        note_failure("front end requests", error)
        finally:
            link.channel.close()
            ended = self.engine.drop(link, list(link.requests))
            link.channel.fail(ConnectionError("the front end has gone"))
            for name, suffix, labels, value in link.samples:
                key = (name, suffix, tuple(labels))
                self._departed[key] = self._departed.get(key, 0) + value
            link.samples = []
            if not self._ending:
                for observer in self.engine.observers if ended else ():
                    observer.on_ended(ended, FinishReason.ABORT)
                link.process.kill()
            await asyncio.to_thread(link.process.wait)

    def _receive(self, link: FrontEnd, message: Any) -> None:
        match message:
            case Add():
                self._add(link, message)
            case Abort():
                link.preparing.difference_update(message.handles)
                self.engine.drop(link, message.handles)
            case Snapshot():
                link.samples = message.samples
                link.channel.resolve(message.number, len(message.samples))
            case Count():
                link.channel.resolve(message.number, message.count)
            case Hello():
                link.listens.set()

    def _add(self, link: FrontEnd, message: Add) -> None:
        refusal = self._refusal(message)
        if refusal is not None:
            link.send(AddResponse(message.number, refusal))
        elif any(request.params.structured_outputs is not None for request in message.requests):
            self._spawn(self._add_slowly(link, message))
        else:
            self._admit(link, message, self._requests(message))

    async def _add_slowly(self, link: FrontEnd, message: Add) -> None:
        handles = {handle for request in message.requests for handle, _, _ in request.completions}
        link.preparing |= handles
        try:
            made = await asyncio.to_thread(self._requests, message)
            if self._links.get(link.index) is link and link.process.poll() is None:
                self._admit(link, message, made)
                self.engine.drop(link, handles - link.preparing)
        except Exception as error:
            self._refuse(link, message, error)
        finally:
            link.preparing -= handles

    def _requests(self, message: Add) -> list[list[Request]]:
        """Create the core's requests. This is slow if a grammar has to be compiled."""
        make_rules = self.engine.make_rules
        return [
            request.requests(make_rules(request.params, frozenset(request.stop_ids), request.token_ids))
            for request in message.requests
        ]

    def _admit(self, link: FrontEnd, message: Add, made: list[list[Request]]) -> None:
        for request, completions in zip(message.requests, made, strict=True):
            self.engine.admit(link, request, completions)
        link.send(AddResponse(message.number))

    def _refuse(self, link: FrontEnd, message: Add, error: Exception) -> None:
        """Tell a front end why its requests were not admitted."""
        if isinstance(error, SamplingError):
            link.send(AddResponse(message.number, error.reason, error.param))
            return
        note_failure("front end requests", error, "The requests of one message get an error.")
        self.engine.drop(link, [handle for request in message.requests for handle, _, _ in request.completions])
        link.send(AddResponse(message.number, "the engine's process could not take the request over", failed=True))

    def _refusal(self, message: Add) -> str | None:
        requests = sum(len(request.completions) for request in message.requests)
        tokens = sum(len(request.completions) * len(request.token_ids) for request in message.requests)
        return self.gate and self.gate.full(requests, tokens)

    async def _ask(self, question: Callable[[int], Any]) -> list[Any]:
        """Ask all front ends; return the answers that arrive in time."""
        futures = [link.channel.ask(question) for link in self.links]
        if futures:
            await asyncio.wait(futures, timeout=_ANSWER_SECONDS)
        return [future.result() for future in futures if future.done() and future.exception() is None]

    async def _gather_often(self) -> None:
        """Collect counters every two seconds for the history, and so that few are lost when a front end dies."""
        while True:
            await asyncio.sleep(_GATHER_SECONDS)
            with contained("front end counters"):
                await self.gather()


def _how(process: subprocess.Popen) -> str:
    code = process.poll()
    if code is None:
        return "its channel has closed"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
