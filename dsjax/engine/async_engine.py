"""`AsyncEngine`: the engine in a thread of its own, its outputs in asyncio."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar

from dsjax.engine.core import EngineCore
from dsjax.engine.engine import LLMEngine
from dsjax.engine.input_processor import PreparedRequest, Prompt
from dsjax.engine.outputs import EngineClosingError, EngineDeadError, OutputStream
from dsjax.engine.request import FinishReason, Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Update, refuse
from dsjax.engine.scheduler_config import AdmissionError
from dsjax.engine.stats import EngineObserver, StepStats
from dsjax.errors import UserError

if TYPE_CHECKING:  # they bring JAX in
    from dsjax.engine.generations import Generation, Generations

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

_INLINE_LENGTH = 2048
"""Characters or tokens that are prepared in the event loop: up to here a thread costs more than it saves."""


class AsyncEngine:
    """Runs an `LLMEngine`'s core in one dedicated thread; makes text in the event loop, while the device computes.

    The thread takes commands (add, abort, close) from a queue, between steps and while the device computes one. It hands a
    step's updates to the event loop in one call, once the next step is launched: both threads need Python's lock, and the device
    would wait for the text of every stream. When it fails, every stream gets the error and `on_death` is called:
    nothing waits for ever.

    Attributes:
        observers: told of every step and output, in the event loop's thread. Add them before `start`.
        on_change: called in the event loop's thread when the mesh has changed.
        step_started: when the step under way began, on the monotonic clock; None between steps.
    """

    def __init__(self, engine: LLMEngine | None):
        """engine: None where another process has it (`dsjax/serve/front_ends`)."""
        self.tokenizer = engine and engine.tokenizer
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] | None = None
        self.on_change: list[Callable[["Generations"], None]] = []
        self.observers: list[EngineObserver] = []
        self.step_started: float | None = None
        self._closing = False
        self._core = engine and engine.core
        self._inputs = engine and engine.inputs
        self._outputs = engine and engine.outputs
        self._streams: dict[str, OutputStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Requests and tokens queued by the event loop, and of those taken by the engine's thread; each pair has one writer.
        self._queued = self._taken = (0, 0)
        # Of the engine's thread: what to do between steps, and whether to end.
        self._between_steps: deque[Callable[[], object]] = deque()
        self._done: tuple[list[Update], StepStats | None] | None = None  # of a step, not yet handed over
        self._ending = False
        self._failure: BaseException | None = None  # of a change of the mesh, after which nothing goes on
        # Of the event loop's: calls whose result is not there yet.
        self._calls: set[asyncio.Future] = set()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._outputs.num_unfinished

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a slot or for pages. Cheap; may lag behind by a step."""
        return self._core.scheduler.num_waiting + self._queued[0] - self._taken[0]

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the completions that wait. Cheap; may lag behind by a step."""
        return self._core.scheduler.waiting_tokens + self._queued[1] - self._taken[1]

    def running_requests(self) -> list[list[Request]]:
        """Of every rank the requests that hold a slot. May be asked from any thread, also while a step hangs."""
        return [list(rank.running) for rank in self._core.scheduler.ranks]

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def change_under_way(self) -> str | None:
        """What is being done to go on on another mesh; None while nothing is."""
        generations = self._core.generations
        return generations.phase if generations is not None else None

    def start(self) -> None:
        """Start the thread. Call it in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        if self._core.generations is not None:
            self._core.generations.wake = self._look_at_processes
            self._look_at_processes()  # one may have gone since it was loaded
        self._thread = threading.Thread(target=self._run, name="dsjax-engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        session: str | None = None,
        dp_rank: int | None = None,
        prefill: Mapping[str, str] | None = None,
    ) -> OutputStream:
        """Check all prompts, then queue them all. Keywords as of `LLMEngine.add_request`.

        Raises:
            UserError: one of them cannot be; none is queued.
            EngineDeadError: the engine has failed.
            EngineClosingError: the engine takes no more requests.
        """
        arrival_time = time.monotonic()
        ids = [f"{request_id}-{index}" for index in range(len(prompts))] if len(prompts) > 1 else [request_id]

        def prepare() -> list[PreparedRequest]:
            return [
                self._inputs.prepare(
                    id_,
                    prompt,
                    params,
                    arrival_time=arrival_time,
                    priority=priority,
                    cache_salt=cache_salt,
                    session=session,
                    dp_rank=dp_rank,
                    prefill=prefill,
                )
                for id_, prompt in zip(ids, prompts, strict=True)
            ]

        # A long text takes long to tokenise, and so does a grammar to read; both libraries let others run meanwhile.
        short = params.structured_outputs is None and params.n * sum(map(_length, prompts)) <= _INLINE_LENGTH
        prepared = prepare() if short else await asyncio.to_thread(prepare)
        if self.error is not None:
            raise EngineDeadError("the engine has failed") from self.error
        if self._closing:
            raise EngineClosingError("the server is shutting down")
        requests = [request for each in prepared for request in each.completions]
        stream = OutputStream(ids, self.abort, requests)
        for each in prepared:
            self._outputs.add(each)
            self._streams[each.request_id] = stream
        try:
            await self._admit(prepared)
        except BaseException:  # refused, or nobody waits any more
            self.abort(ids)
            raise
        return stream

    async def _admit(self, prepared: Sequence[PreparedRequest]) -> None:
        self._enqueue([request for each in prepared for request in each.completions])

    def _enqueue(self, requests: Sequence[Request]) -> None:
        self._queued = _plus(self._queued, requests)
        self._commands.put(lambda: self._add(requests))

    async def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """Run `function(core)` in the engine's thread, between two steps, and give its result, or raise its error.

        Raises:
            EngineDeadError: the engine has failed, or ends before it comes to this.
        """
        if self.error is not None or self._closing or not self.running:
            raise EngineDeadError("the engine does not run")
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result, error = function(self._core), None
            except Exception as caught:
                result, error = None, caught
            self._loop.call_soon_threadsafe(_settle, future, result, error)

        self._commands.put(lambda: self._between_steps.append(run))
        return await future

    async def scale(self, mesh: str) -> "Generations":
        """Go on on another mesh, up or down, with all requests; give what says which mesh that is now, and whether it is the one wanted.

        Raises:
            UserError, MeshError: the mesh cannot be, or another change is under way; everything is as it was.
            EngineDeadError: the engine has failed, before or in this.
        """
        generations = self._core.generations
        if self._core.is_separated and generations is None:
            raise UserError("the meshes of an engine with --prefill-mesh and --decode-mesh cannot change while it runs")
        if generations is None:
            raise UserError("this engine was given its executor, and cannot make another one for another mesh")
        wanted = await asyncio.to_thread(generations.ask, mesh)
        try:
            # A change that has begun ends, whether or not somebody still waits for it.
            await asyncio.shield(
                asyncio.ensure_future(self.call(lambda core: self._change(lambda: generations.to(wanted))))
            )
        except EngineDeadError:
            generations.forget()
            raise
        return generations

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more."""
        ended = [request for request_id in request_ids for request in self._outputs.unfinished(request_id)]
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._outputs.forget(request_id)
        self._abort_completions([request.request_id for request in ended])
        for observer in self.observers if ended else ():
            observer.on_ended(ended, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request; each stream gets an `EngineClosingError`."""
        for stream in set(self._streams.values()):
            stream.put(EngineClosingError("the server is shutting down"))
        self.abort(list(self._streams))

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests and the thread. After `timeout` seconds in a step that hangs, the thread is left behind."""
        self._closing = True
        self.abort_all()
        self._commands.put(self._end)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)
        self._fail_calls()

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while True:
                if not self._core.has_unfinished:
                    self._commands.get()()
                self._take_commands()
                if self._between_steps or self._ending:
                    self._hand_over()
                while self._between_steps:
                    self._between_steps.popleft()()
                if self._failure is not None:
                    raise self._failure
                if self._ending:
                    self._core.finish()
                    self._core.shutdown()
                    return
                if self._core.has_unfinished:
                    self._step()
        except BaseException as error:
            self.step_started = None
            if isinstance(error, UserError):
                logger.error("the engine's thread has ended: %s", error)
            else:
                logger.exception("the engine's thread has failed")
            with contextlib.suppress(
                RuntimeError
            ):  # a process of the group was lost, and the loop has ended before this step did
                self._hand_over()
                self._loop.call_soon_threadsafe(self._die, error)

    def _step(self) -> None:
        self.step_started = time.monotonic()
        try:
            updates = self._core.step(self._meanwhile)
        except Exception as error:
            lost = error  # Python forgets the other name
            self.step_started = None
            self._hand_over()
            self._enter_change(lambda: self._core.survive(lost))
            return
        self.step_started = None
        self._hand_over()  # nothing is left but for a step in which there was nothing to compute
        stats = self._core.stats() if self.observers else None
        if updates or stats is not None:
            self._done = (updates, stats)
            if not self._core.has_unfinished:
                self._hand_over()

    def _change(self, make: "Callable[[], Generation]") -> None:
        try:
            self._enter_change(lambda: self._core.change(make))
        except BaseException as error:
            self._failure = error  # there is no executor any more
            raise

    def _enter_change(self, change: Callable[[], list[Update]]) -> None:
        """Change the executor, and tell of it."""
        updates = change()
        self._inputs.change(self._core.scheduler.config)
        self._loop.call_soon_threadsafe(self._tell_change, self._core.generations)
        self._done = (updates, None)
        self._hand_over()

    def _look_at_processes(self) -> None:
        """A process has gone, or come back. From any thread."""

        def look() -> None:
            if self._core.generations.due:
                self._change(self._core.generations.regroup)

        self._commands.put(lambda: self._between_steps.append(look))

    def _meanwhile(self) -> None:
        self._hand_over()
        self._take_commands()

    def _hand_over(self) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            self._loop.call_soon_threadsafe(self._deliver, *done)

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _end(self) -> None:
        self._ending = True

    def _add(self, requests: Sequence[Request]) -> None:
        refused = []
        for request in requests:
            try:
                self._core.add(request)
            except AdmissionError as error:  # it was prepared for a larger mesh
                refused.append(refuse(request, error, time.monotonic()))
        if refused:
            self._loop.call_soon_threadsafe(self._deliver, refused, None)
        self._taken = _plus(self._taken, requests)

    # In the event loop's thread.

    def _tell_change(self, generations: "Generations") -> None:
        for call in self.on_change:
            call(generations)

    def _abort_completions(self, completion_ids: Sequence[str]) -> None:
        for completion_id in completion_ids:
            self._commands.put(lambda completion_id=completion_id: self._core.abort(completion_id))

    def _deliver(self, updates: list[Update], stats: StepStats | None) -> None:
        followed = [update for update in updates if self._outputs.follows(update.request)] if self.observers else []
        outputs, to_abort = self._outputs.process(updates)
        self._abort_completions(to_abort)
        told: dict[OutputStream, None] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.add(output)
                told[stream] = None
                if output.finished:
                    del self._streams[output.request_id]
        for stream in told:
            stream.tell()
        stopped = [update.request for update in followed if update.request.request_id in to_abort] if to_abort else []
        for observer in self.observers:
            if followed:
                observer.on_updates(followed)
            if stopped:
                observer.on_ended(stopped, FinishReason.STOP)
            if stats is not None:
                observer.on_step(stats)
            if outputs:
                observer.on_outputs(outputs)

    def _die(self, error: BaseException) -> None:
        self.error = error
        for stream in set(self._streams.values()):
            stream.put(EngineDeadError("the engine has failed"))
        for request_id in list(self._streams):
            self._outputs.forget(request_id)
        self._streams.clear()
        self._fail_calls()
        if self.on_death is not None:
            self.on_death()

    def _fail_calls(self) -> None:
        for future in list(self._calls):
            _settle(future, None, EngineDeadError("the engine has ended"))


def _length(prompt: Prompt) -> int:
    """Characters or tokens."""
    whole = next(iter(prompt.values()), "") if isinstance(prompt, Mapping) else prompt
    return len(whole) if isinstance(whole, Sized) else 0


def _plus(counts: tuple[int, int], requests: Sequence[Request]) -> tuple[int, int]:
    return counts[0] + len(requests), counts[1] + sum(len(request.token_ids) for request in requests)


def _settle(future: asyncio.Future, result: object, error: Exception | None) -> None:
    """Give a future its result, unless it has one, or nobody waits any more."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


__all__ = ["AsyncEngine", "EngineClosingError", "EngineDeadError", "OutputStream"]
