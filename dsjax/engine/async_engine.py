"""`AsyncEngine`: the engine in a thread of its own, its outputs in asyncio."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import LLMEngine
from dsjax.engine.engine_thread import EngineThread, Stepper
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import EngineObserver, StepStats
from dsjax.engine.text.input_processor import PreparedRequest, Prompt
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError, OutputStream
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.errors import UserError

if TYPE_CHECKING:  # they bring JAX in
    from dsjax.engine.elastic.generations import Generations

Result = TypeVar("Result")

_INLINE_LENGTH = 2048
"""Characters or tokens that are prepared in the event loop: up to here a thread costs more than it saves."""


class AsyncEngine:
    """Runs an `LLMEngine`'s core in a dedicated thread; makes text in the event loop, while the devices compute.

    When the thread fails, every stream gets the error and `on_death` is called: nothing waits for ever.

    Attributes:
        core: None where another process has it.
        observers: told of every step and output, in the event loop's thread. Add them before `start`.
        on_change: called in the event loop's thread when the mesh has changed.
    """

    def __init__(self, engine: LLMEngine | None):
        """engine: None where another process has it (`dsjax/serve/front_ends`)."""
        self.tokenizer = engine and engine.tokenizer
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] | None = None
        self.on_change: list[Callable[["Generations"], None]] = []
        self.observers: list[EngineObserver] = []
        self.core = engine and engine.core
        self._closing = False
        self._engine = engine
        self._inputs = engine and engine.inputs
        self._outputs = engine and engine.outputs
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = engine and EngineThread(engine.core, _Listener(self))
        self._calls: set[asyncio.Future] = set()  # whose result is not there yet

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._outputs.num_unfinished

    @property
    def num_ranks(self) -> int:
        """Number of DP ranks of the mesh."""
        return self._engine.num_ranks

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a slot or for pages. Cheap; may lag behind by a step."""
        return self._thread.num_waiting

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the completions that wait. Cheap; may lag behind by a step."""
        return self._thread.waiting_tokens

    @property
    def steppers(self) -> dict[str, Stepper]:
        """What takes steps in this process, by its name in messages: the engine, or the decode and the prefill engine."""
        if self._engine is None:
            return {}
        if not self._engine.prefills:
            return {"the engine": self._thread}
        [prefill] = self._engine.prefill_engines
        return {"the decode engine": self._thread, "the prefill engine": prefill}

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.alive

    @property
    def change_under_way(self) -> str | None:
        """What is being done to go on on another mesh; None while nothing is."""
        generations = self.core.generations
        return generations.phase if generations is not None else None

    def start(self) -> None:
        """Start the thread. Call it in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
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
        self._thread.add([request for each in prepared for request in each.completions])

    async def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """Run `function(core)` in the engine's thread, between two steps, and give its result, or raise its error.

        Raises:
            EngineDeadError: the engine has failed, or ends before it comes to this.
        """
        if self.error is not None or self._closing or not self._thread.alive:
            raise EngineDeadError("the engine does not run")
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result, error = function(self.core), None
            except Exception as caught:
                result, error = None, caught
            self._loop.call_soon_threadsafe(_settle, future, result, error)

        self._thread.between_steps(run)
        return await future

    async def scale(self, mesh: str) -> "Generations":
        """Go on on another mesh, up or down, with all requests; give what says which mesh that is now, and whether it is the one wanted.

        Raises:
            UserError, MeshError: the mesh cannot be, or another change is under way; everything is as it was.
            EngineDeadError: the engine has failed, before or in this.
        """
        thread, generations = self._thread, self.core.generations
        if self.core.part(PrefillLinks) is not None and generations is None:
            raise UserError("the meshes of an engine with --prefill-mesh and --decode-mesh cannot change while it runs")
        if generations is None:
            raise UserError("this engine was given its executor, and cannot make another one for another mesh")
        wanted = await asyncio.to_thread(generations.ask, mesh)
        try:
            # A change that has begun ends, whether or not somebody still waits for it.
            await asyncio.shield(
                asyncio.ensure_future(self.call(lambda core: thread.change(lambda: generations.to(wanted))))
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

    def fail(self, error: BaseException) -> None:
        """Nothing can go on: every request gets an error, and `on_death` is called."""
        self._die(error)

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests and the thread. After `timeout` seconds in a step that hangs, the thread is left behind."""
        self._closing = True
        self.abort_all()
        self._thread.end()
        await asyncio.to_thread(self._thread.join, timeout)
        self._fail_calls()

    # In the event loop's thread.

    def _tell_change(self, generations: "Generations") -> None:
        for call in self.on_change:
            call(generations)

    def _abort_completions(self, completion_ids: Sequence[str]) -> None:
        self._thread.abort(completion_ids)

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


class _Listener:
    """Passes what happens in the engine's thread to the event loop."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine

    def wants_stats(self) -> bool:
        return bool(self._engine.observers)

    def on_done(self, updates: list[Update], stats: StepStats | None) -> None:
        self._engine._loop.call_soon_threadsafe(self._engine._deliver, updates, stats)

    def on_change(self) -> None:
        engine = self._engine
        engine._inputs.change(engine.core.scheduler.config)
        engine._loop.call_soon_threadsafe(engine._tell_change, engine.core.generations)

    def on_death(self, error: BaseException) -> None:
        self._engine._loop.call_soon_threadsafe(self._engine._die, error)


def _length(prompt: Prompt) -> int:
    """Characters or tokens."""
    whole = next(iter(prompt.values()), "") if isinstance(prompt, Mapping) else prompt
    return len(whole) if isinstance(whole, Sized) else 0


def _settle(future: asyncio.Future, result: object, error: Exception | None) -> None:
    """Give a future its result, unless it has one, or nobody waits any more."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


__all__ = ["AsyncEngine", "EngineClosingError", "EngineDeadError", "OutputStream"]
