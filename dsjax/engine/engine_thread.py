"""`EngineThread`: runs an engine's core in a thread. `ThreadedEngine` and `AsyncEngine`: the same, used from asyncio."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dsjax.engine.core import EngineCore
from dsjax.engine.engine import EngineParts, mesh_changer_of
from dsjax.engine.request_streams import RequestStreams
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import AdmissionError
from dsjax.engine.stats import EngineObserver, StepStats
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError
from dsjax.errors import UserError

if TYPE_CHECKING:  # imports JAX
    from dsjax.engine.elastic.generations import Generations

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

MOST_IDLE = 3
"""After this many consecutive steps without a computation, the thread waits for a command if a plugin wants to be polled regularly. One
such step is not enough, because a step may send pages and the next one may use their room.
"""


class RequestTotals(NamedTuple):
    """Totals of requests and their known tokens."""

    requests: int
    tokens: int

    def plus(self, requests: Sequence[Request]) -> "RequestTotals":
        """Add requests."""
        tokens = sum(len(request.token_ids) for request in requests)
        return RequestTotals(self.requests + len(requests), self.tokens + tokens)


class EngineThread:
    """Runs a core step by step, and takes commands (add, abort, end) between steps and while the device computes.

    A step's updates are handed over after the next step is launched, because their receiver needs Python's lock too.

    Callbacks, called in the thread; after the thread has failed, they may raise a `RuntimeError` if no listener is left:
        on_done: receives the updates of a step or of a mesh change. on_change: the core continues on another mesh.
        on_death: receives the error that has ended the thread. wants_stats: returns whether `on_done` gets a step's stats.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        on_done: Callable[[list[Update], StepStats | None], object] = lambda updates, stats: None,
        on_change: Callable[[], object] = lambda: None,
        on_death: Callable[[BaseException], object] = lambda error: None,
        wants_stats: Callable[[], bool] = lambda: False,
        name: str = "dsjax-engine",
    ):
        self.core = core
        self.on_done, self.on_change, self.on_death, self.wants_stats = on_done, on_change, on_death, wants_stats
        self._num_idle = 0  # consecutive steps without a computation
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Totals of requests queued, and of requests taken by the thread; each has one writer.
        self._queued = self._taken = RequestTotals(0, 0)
        # The rest belongs to the thread.
        self._between_steps: deque[Callable[[], object]] = deque()  # functions to run between steps
        self._done: tuple[list[Update], StepStats | None] | None = None  # a step's updates that are not handed over yet
        self._ending = False
        self._failure: BaseException | None = None  # of a mesh change that left no executor

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> tuple[int, int]:
        """Completions that wait for a slot or for pages, and their known tokens. Cheap; may lag behind by a step."""
        queued, taken, scheduler = self._queued, self._taken, self.core.scheduler
        requests = sum(len(rank.waiting) for rank in scheduler.ranks) + queued.requests - taken.requests
        return requests, scheduler.waiting_tokens + queued.tokens - taken.tokens

    def start(self) -> None:
        """Start the thread."""
        if self.core.mesh_changer is not None:
            self.core.mesh_changer.watch(self.look_at_processes)
            self.look_at_processes()  # a process may have gone since the model was loaded
        self._thread.start()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._queued = self._queued.plus(requests)
        self._commands.put(lambda: self._add(requests))

    def abort(self, completion_ids: Sequence[str]) -> None:
        """End completions; unknown ones are skipped."""
        for completion_id in completion_ids:
            self._commands.put(lambda completion_id=completion_id: self.core.abort(completion_id))

    def between_steps(self, function: Callable[[], object]) -> None:
        """Run a function in the thread, between two steps. It must not raise."""
        self._commands.put(lambda: self._between_steps.append(function))

    def change(self, make: Callable[[], MeshEpoch | None]) -> None:
        """Change the mesh or the expert processes, as `EngineCore.change` does, between steps. An error of `make` ends the thread."""
        try:
            updates = self.core.change(make)
            self.on_change()
            self.on_done(updates, None)
        except BaseException as error:
            self._failure = error  # no executor is left
            raise

    def end(self) -> None:
        """End the thread between two steps."""
        self._commands.put(lambda: setattr(self, "_ending", True))

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, for at most `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread soon, between steps or while the device computes. It must not raise."""
        self._commands.put(function)

    # In the thread.

    def turn(self, wait: bool = True) -> bool:
        """Take commands, and compute a step. Return False if the thread must end.

        wait: wait for a command if there is nothing to compute. False, for callers without a thread: hand the step's updates over before
            this returns.
        """
        at_rest = not self.core.has_unfinished
        looks = any(part.look_seconds is not None for part in self.core.attachments)
        is_stuck = self._num_idle >= MOST_IDLE and looks and not self.core.is_busy
        if wait and (at_rest or is_stuck):
            self._hand_over()
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=self.core.rest_seconds)()
                self._num_idle = 0
        self._take_commands()
        if self._between_steps or self._ending:
            self._hand_over()
        while self._between_steps:
            self._between_steps.popleft()()
        if self._failure is not None:
            raise self._failure
        if self._ending:
            self.core.finish()
            self.core.shutdown()
            return False
        if self.core.has_unfinished:
            self._step(ahead=not at_rest or not wait)
            if not wait:
                self._hand_over()
        elif updates := self.core.look():
            self.on_done(updates, None)
        return True

    def _run(self) -> None:
        try:
            while self.turn():
                pass
        except BaseException as error:
            if isinstance(error, UserError):
                logger.error("the engine's thread has ended: %s", error)
            else:
                logger.exception("the engine's thread has failed")
            with contextlib.suppress(RuntimeError):  # the event loop may have ended already
                self._hand_over()
                self.on_death(error)
            self.core.abandon()

    def _step(self, ahead: bool) -> None:
        # Requests that clients send at once arrive one by one. Those that arrive during the first one's step join the next step, which is
        # planned after that step, and not ahead of it.
        scheduler = self.core.scheduler
        updates = self.core.step(self._meanwhile, ahead=ahead, before_change=self._hand_over)
        if self.core.scheduler is not scheduler:  # the core has continued without a lost process
            self.on_change()
            self.on_done(updates, None)
            return
        self._hand_over()  # in case `_meanwhile` was not called, because there was nothing to compute
        stats = self.core.stats()
        self._num_idle = self._num_idle + 1 if stats is None else 0
        stats = stats if self.wants_stats() else None
        if updates or stats is not None:
            self._done = (updates, stats)

    def look_at_processes(self) -> None:
        """Change the mesh between steps if a process has gone or come back. Any thread may call it."""

        def look() -> None:
            if self.core.mesh_changer.needs_change:
                self.change(self.core.mesh_changer.regroup)

        self.between_steps(look)

    def _meanwhile(self) -> None:
        self._hand_over()
        self._take_commands()

    def _hand_over(self) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            self.on_done(*done)

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()
            self._num_idle = 0

    def _add(self, requests: Sequence[Request]) -> None:
        refused = []
        for request in requests:
            try:
                self.core.add(request)
            except AdmissionError as error:  # the request was prepared for a larger mesh
                refused += self.core.park(request, error)
        if refused:
            self.on_done(refused, None)
        self._taken = self._taken.plus(requests)


class ThreadedEngine:
    """An engine's core in a thread of its own, used from asyncio.

    A subclass defines three methods, which are called in the event loop's thread: `deliver(updates, stats)` receives a step's updates,
    `fail_requests(error)` tells all clients that the engine has failed, and `abort_all()` sets `closing` and ends every request and call
    with an `EngineClosingError`.

    on_death: called when the engine has failed. on_change: functions to call in the event loop's thread when the mesh has changed.
    error: why the engine has failed, or None. closing: whether it refuses new requests and calls. observers: see `RequestStreams`.
    """

    def __init__(self, parts: EngineParts):
        self.tokenizer, self.core = parts.tokenizer, parts.core
        self.on_death: Callable[[], None] | None = None
        self.on_change: list[Callable[["Generations"], None]] = []
        self._parts = parts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(
            parts.core,
            on_done=lambda updates, stats: self._loop.call_soon_threadsafe(self.deliver, updates, stats),
            on_change=self._note_mesh_change,
            on_death=lambda error: self._loop.call_soon_threadsafe(self.fail, error),
            wants_stats=lambda: bool(self.observers),
        )
        self._calls: set[asyncio.Future] = set()  # unfinished calls
        self.error: BaseException | None = None
        self.observers: list[EngineObserver] = []
        self.closing = False

    @property
    def num_ranks(self) -> int:
        """Number of DP ranks of the mesh."""
        return self._parts.num_ranks

    @property
    def waiting(self) -> tuple[int, int]:
        """Completions that wait for a slot or for pages, and their known tokens; may lag behind by a step."""
        return self._thread.waiting

    @property
    def steppers(self) -> dict[str, EngineCore]:
        """Cores of this process by their names in messages: the engine's, or those of the decode and the prefill engine."""
        if not self._parts.prefill_links:
            return {"the engine": self.core}
        [prefill] = self._parts.prefill_engines
        return {"the decode engine": self.core, "the prefill engine": prefill.core}

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.alive

    @property
    def change_under_way(self) -> str | None:
        """Current phase of a mesh change; None: the mesh is not being changed."""
        mesh_changer = self.core.mesh_changer
        return mesh_changer.phase if mesh_changer is not None else None

    def start(self) -> None:
        """Start the thread. Call it in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        if self.core.mesh_changer is not None:
            self.core.parked.seconds = self.core.mesh_changer.patience
        self._thread.start()

    def wait_for_no_mesh(self) -> None:
        """End the parked requests, because this process is about to end. Any thread and any signal handler may call it."""
        self.core.parked.seconds = 0.0
        self._thread.call(lambda: None)  # wakes the thread

    async def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """Run `function(core)` in the engine's thread between two steps and return its result.

        Raises its error, an `EngineDeadError` if the engine has failed, or an `EngineClosingError` if it shuts down.
        """
        future = self._new_call()

        def run() -> None:
            try:
                result, error = function(self.core), None
            except Exception as caught:
                result, error = None, caught
            self._loop.call_soon_threadsafe(_resolve, future, result, error)

        self._thread.between_steps(run)
        return await future

    def _new_call(self) -> asyncio.Future:
        """Return a future that `abort_all` and `fail` end with an error."""
        if self.closing and self.error is None:
            raise EngineClosingError("the server is shutting down")
        if self.error is not None or not self._thread.alive:
            raise EngineDeadError("the engine does not run")
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def scale(
        self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None
    ) -> "Generations":
        """Continue on another mesh, or with other expert processes; see ``LLM.scale``. The result's ``failure`` says why a change failed.

        Raises:
            UserError, MeshError: the change is not possible, or another one is under way; nothing has changed.
            EngineDeadError: the engine has failed, before or during the change.
            EngineClosingError: the engine shuts down, before or during the change.
        """
        generations = mesh_changer_of(self.core)
        answer = self._new_call()
        # A change that has begun is finished even if its caller is cancelled. It excludes other changes while it checks the mesh, too.
        change = asyncio.ensure_future(self._change_to(generations, mesh, expert_mesh, afd_address))
        change.add_done_callback(lambda done: None if done.cancelled() else _resolve(answer, None, done.exception()))
        await answer
        return generations

    async def _change_to(self, generations: "Generations", *wanted: str | None) -> None:
        checked = await asyncio.to_thread(generations.begin_change, *wanted)
        try:
            await self.call(lambda core: self._thread.change(lambda: generations.change_to(checked)))
        finally:
            generations.end_change()

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests and the thread. A thread that hangs in a step is left behind after `timeout` seconds."""
        self.abort_all()
        self._thread.end()
        await asyncio.to_thread(self._thread.join, timeout)
        self._fail_calls(EngineDeadError("the engine has ended"))

    def fail(self, error: BaseException) -> None:
        """Fail every request, and call `on_death`."""
        self.fail_requests(error)
        self._fail_calls(EngineDeadError("the engine has ended"))
        if self.on_death is not None:
            self.on_death()

    def _note_mesh_change(self) -> None:
        """Check new requests against the new mesh's limits, and schedule `on_change`. Called in the engine's thread."""
        self._parts.inputs.change(self.core.scheduler.config)
        for call in self.on_change:
            self._loop.call_soon_threadsafe(call, self.core.mesh_changer)

    def _fail_calls(self, error: Exception) -> None:
        """End calls that wait for the thread, a change of the mesh among them, with an error."""
        for future in list(self._calls):
            _resolve(future, None, error)


class AsyncEngine(RequestStreams, ThreadedEngine):
    """A `ThreadedEngine` that makes text in the event loop while the devices compute. If it fails, every stream gets the error."""

    def __init__(self, parts: EngineParts):
        RequestStreams.__init__(self, parts.inputs, parts.outputs)
        ThreadedEngine.__init__(self, parts)

    def abort_all(self) -> None:
        """End all requests and calls with an `EngineClosingError`."""
        super().abort_all()
        self._fail_calls(EngineClosingError("the server is shutting down"))

    async def _admit(self, prepared: Sequence[PreparedRequest]) -> None:
        self._thread.add([request for each in prepared for request in each.completions])

    def _end(self, completion_ids: Sequence[str]) -> None:
        self._thread.abort(completion_ids)


def _resolve(future: asyncio.Future, result: object, error: Exception | None) -> None:
    """Set a future's result or error, unless it is done or was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
