"""`AsyncEngine`: the engine in a thread of its own, its outputs in asyncio."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dsjax.engine.core import EngineCore
from dsjax.engine.engine import EngineParts, mesh_changer_of
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.request_streams import RequestStreams
from dsjax.engine.stats import EngineObserver
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.outputs import EngineDeadError

if TYPE_CHECKING:  # they bring JAX in
    from dsjax.engine.elastic.generations import Generations

Result = TypeVar("Result")


class ThreadedEngine:
    """An engine's core in a dedicated thread, seen from asyncio.

    A subclass defines three methods, which are called in the event loop's thread: `deliver(updates, stats)` takes what a step did,
    `fail_requests(error)` tells all clients that the engine has failed, and `abort_all()` ends every request with an error.

    on_death: called when the engine has failed. on_change: called in the event loop's thread when the mesh has changed.
    error: why the engine has failed, or None. closing: whether it takes no more requests. observers: told of every step and output.
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
            on_change=self._take_change,
            on_death=lambda error: self._loop.call_soon_threadsafe(self.fail, error),
            wants_stats=lambda: bool(self.observers),
        )
        self._calls: set[asyncio.Future] = set()  # whose result is not there yet
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
        """The cores that take steps in this process, by their names in messages: the engine's, or those for decode and for prefill."""
        if not self._parts.prefills:
            return {"the engine": self.core}
        [prefill] = self._parts.prefill_engines
        return {"the decode engine": self.core, "the prefill engine": prefill.core}

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
        if self.core.generations is not None:
            self.core.parked.seconds = self.core.generations.patience
        self._thread.start()

    def wait_for_no_mesh(self) -> None:
        """End the requests that wait for a larger mesh, as this process is about to end. From any thread, also in a signal's handler."""
        self.core.parked.seconds = 0.0
        self._thread.call(lambda: None)  # it looks at once

    async def call(self, function: Callable[[EngineCore], Result]) -> Result:
        """Run `function(core)` in the engine's thread, between two steps; give its result, or raise its error or an `EngineDeadError`."""
        if self.error is not None or self.closing or not self._thread.alive:
            raise EngineDeadError("the engine does not run")
        future = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result, error = function(self.core), None
            except Exception as caught:
                result, error = None, caught
            self._loop.call_soon_threadsafe(_resolve, future, result, error)

        self._thread.between_steps(run)
        return await future

    async def scale(
        self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None
    ) -> "Generations":
        """Continue on another mesh, or with other expert processes; see ``LLM.scale``. The result's ``failure`` says why a change failed.

        Raises:
            UserError, MeshError: the change is not possible, or another one is under way; nothing has changed.
            EngineDeadError: the engine has failed, before or in this.
        """
        generations = mesh_changer_of(self.core)
        # A change that has begun ends, whether or not somebody still waits for it; while the mesh is checked too it keeps others out.
        await asyncio.shield(asyncio.ensure_future(self._change_to(generations, mesh, expert_mesh, afd_address)))
        return generations

    async def _change_to(self, generations: "Generations", *wanted: str | None) -> None:
        checked = await asyncio.to_thread(generations.ask, *wanted)
        try:
            await self.call(lambda core: self._thread.change(lambda: generations.to(checked)))
        finally:
            generations.forget()

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests and the thread. After `timeout` seconds in a step that hangs, the thread is left behind."""
        self.closing = True
        self.abort_all()
        self._thread.end()
        await asyncio.to_thread(self._thread.join, timeout)
        self._fail_calls()

    def fail(self, error: BaseException) -> None:
        """Tell every request that nothing can go on, and call `on_death`."""
        self.fail_requests(error)
        self._fail_calls()
        if self.on_death is not None:
            self.on_death()

    def _take_change(self) -> None:
        """Check requests by the new mesh's limits, and have `on_change` called. In the engine's thread."""
        self._parts.inputs.change(self.core.scheduler.config)
        for call in self.on_change:
            self._loop.call_soon_threadsafe(call, self.core.generations)

    def _fail_calls(self) -> None:
        for future in list(self._calls):
            _resolve(future, None, EngineDeadError("the engine has ended"))


class AsyncEngine(RequestStreams, ThreadedEngine):
    """A `ThreadedEngine` that makes text in the event loop, while the devices compute. When it fails, every stream gets the error."""

    def __init__(self, parts: EngineParts):
        RequestStreams.__init__(self, parts.inputs, parts.outputs)
        ThreadedEngine.__init__(self, parts)

    async def _admit(self, prepared: Sequence[PreparedRequest]) -> None:
        self._thread.add([request for each in prepared for request in each.completions])

    def _end(self, completion_ids: Sequence[str]) -> None:
        self._thread.abort(completion_ids)


def _resolve(future: asyncio.Future, result: object, error: Exception | None) -> None:
    """Give a future its result, unless it has one, or nobody waits any more."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
