"""`PrefillEngine`: an engine that computes prompts for other engines, and makes no text."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from dsjax.engine.contract.executor import Executor, Progress
from dsjax.engine.core import EngineCore
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.mesh_changer import MeshChanger
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.stats import StepStats
from dsjax.engine.transfer.messages import PrefillRequest, ToPrefill, TransferFailed
from dsjax.engine.transfer.prefill_service import Keepers, PrefillCounts, PrefillService, Receive
from dsjax.engine.transfer.send_buffers import ChunkTickets, SendBuffers

_log = logging.getLogger(__name__)


class PrefillEngine:
    """A core with a `PrefillService`, in a thread of its own.

    `post` and `leave` may be called from any thread; all else happens in the engine's own thread, which `start` begins.

    Args:
        timeout: seconds after which pages that nobody has pulled are dropped, and their transfer with them.
        attachments: further parts of the core: offload tiers, balancing, page events.
        keepers, tickets: as of `PrefillService`. generations: as of `EngineCore`; transfers under way fail when the mesh changes.

    Attributes:
        core: scheduler and executor. service: the transfers. error: why the thread has ended.
        on_death: called when the thread has ended by an error.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        timeout: float,
        async_scheduling: bool = True,
        attachments: Sequence[Attachment] = (),
        keepers: Keepers | None = None,
        tickets: ChunkTickets | None = None,
        generations: MeshChanger | None = None,
    ):
        self.service = PrefillService(timeout=timeout, keepers=keepers, tickets=tickets)
        self.core = EngineCore(
            executor,
            config,
            async_scheduling=async_scheduling,
            attachments=[*attachments, self.service],
            generations=generations,
        )
        self.service.flush_core = self.core.flush_prefix_cache
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._inbox: queue.SimpleQueue[tuple[ToPrefill, Receive | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._thread = EngineThread(self.core, _StepListener(self), "dsjax-prefill")

    def start(self) -> None:
        """Begin to take what is posted."""
        self._thread.start()

    def post(self, message: ToPrefill, receive: Receive | None) -> None:
        """Take a message from any thread; what becomes of it is told to `receive`, from any thread.

        A transfer may be asked for twice: by whoever has its prompt (`receive` is None), and by its decode engine, in either order.
        """
        with self._lock:
            if not self._ended:
                self._inbox.put((message, receive))
                self._thread.call(self._take)
                return
        if isinstance(message, PrefillRequest) and receive is not None:
            receive(TransferFailed("", self.service.reason))

    def leave(self, receive: Receive) -> None:
        """Cancel everything that was asked for with this `receive`: who asked is there no more."""
        self._thread.call(lambda: self.service.leave(receive))

    def turn(self, wait: bool = True) -> bool:
        """Take what was posted, and compute a step, where the thread was not started; False where the engine has ended."""
        goes_on = self._thread.turn(wait)
        if not goes_on:
            self._end()
        return goes_on

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape before the first prompt, in all processes."""
        self.core.executor.warm_up(progress)
        if self.core.generations is not None:
            self.core.generations.has_warmed_up()

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the thread, and give back what the executor holds. Transfers that are under way fail."""
        self._thread.call(self._end)
        self._thread.end()
        self._thread.join(timeout)

    @property
    def buffers(self) -> SendBuffers:
        """The pages that wait to be pulled."""
        return self.service.buffers

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.core.scheduler.config.page_size

    @property
    def num_jobs(self) -> int:
        """Transfers that have not ended."""
        return self.service.num_jobs

    @property
    def counts(self) -> PrefillCounts:
        """What was computed since the start."""
        return self.service.counts

    @property
    def step_started(self) -> float | None:
        """When the step under way began, on the monotonic clock; None between steps."""
        return self._thread.step_started

    def running_requests(self) -> list[list[Request]]:
        """The requests that hold a slot, of every rank."""
        return self._thread.running_requests()

    def _take(self) -> None:
        while not self._inbox.empty():
            self.service.enter(*self._inbox.get())

    def _end(self) -> None:
        """Answer nobody any more."""
        with self._lock:
            self._ended = True
        while not self._inbox.empty():
            message, receive = self._inbox.get()
            if isinstance(message, PrefillRequest) and receive is not None:
                receive(TransferFailed(message.transfer, self.service.reason))


class _StepListener:
    """What the engine's thread tells of."""

    def __init__(self, engine: PrefillEngine):
        self._engine = engine

    def wants_stats(self) -> bool:
        """Ask for no statistics."""
        return False

    def on_done(self, updates: list[Update], stats: StepStats | None) -> None:
        """Do nothing: the service has entered what a step did."""

    def on_change(self) -> None:
        """Do nothing: the service has failed the transfers of the mesh before."""

    def on_death(self, error: BaseException) -> None:
        """Take no further message, and say why transfers fail."""
        engine = self._engine
        engine.error = error
        engine.service.reason += f": {error}"
        _log.error("The prefill engine has failed; prompts are computed where they are decoded from now on.")
        engine.on_death()
        engine._end()
