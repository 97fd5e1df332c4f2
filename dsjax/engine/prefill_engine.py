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
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.transfer.messages import PrefillRequest, ToPrefill, TransferFailed
from dsjax.engine.transfer.prefill_service import Keepers, PrefillService, Receive
from dsjax.engine.transfer.send_buffers import SendBuffers

_log = logging.getLogger(__name__)


class PrefillEngine:
    """A core with a `PrefillService`, in a thread of its own, in which all but `post` and `leave` happens.

    Args:
        timeout: seconds after which pages that nobody has pulled are dropped, and their transfer with them.
        attachments: parts of the core beside the `PrefillService`. keepers: which process keeps the pages of each rank, see
            `PrefillService`. generations: makes the executors of other meshes, see `EngineCore`.

    thread: takes the steps. error: why it has ended. on_death: called when it has ended by an error.
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
        generations: MeshChanger | None = None,
    ):
        self.service = PrefillService(timeout=timeout, keepers=keepers)
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
        self.thread = EngineThread(self.core, on_death=self._die, name="dsjax-prefill")

    def start(self) -> None:
        """Begin to take what is posted."""
        self.thread.start()

    def post(self, message: ToPrefill, receive: Receive | None) -> None:
        """Take a message from any thread; answers go to `receive`, from any thread.

        A transfer may be asked for twice: by whoever has its prompt (`receive` is None), and by its decode engine, in either order.
        """
        with self._lock:
            if not self._ended:
                self._inbox.put((message, receive))
                self.thread.call(self._take)
                return
        if isinstance(message, PrefillRequest) and receive is not None:
            receive(TransferFailed("", self.service.reason))

    def leave(self, receive: Receive) -> None:
        """Cancel all transfers of a decode engine that is gone."""
        self.thread.call(lambda: self.service.leave(receive))

    def turn(self, wait: bool = True) -> bool:
        """Take what was posted, and compute a step, where the thread was not started; False where the engine has ended."""
        goes_on = self.thread.turn(wait)
        if not goes_on:
            self._end()
        return goes_on

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape, in all processes."""
        self.core.executor.warm_up(progress)
        if self.core.generations is not None:
            self.core.generations.has_warmed_up()

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the thread, and give back what the executor holds. Transfers under way fail."""
        self.thread.call(self._end)
        self.thread.end()
        self.thread.join(timeout)

    @property
    def buffers(self) -> SendBuffers:
        """The pages that wait to be pulled."""
        return self.service.buffers

    @property
    def num_jobs(self) -> int:
        """Transfers that have not ended."""
        return self.service.num_jobs

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

    def _die(self, error: BaseException) -> None:
        """Take no more messages, and note why transfers fail. Called in the thread."""
        self.error = error
        self.service.reason += f": {error}"
        _log.error("The prefill engine has failed; prompts are computed where they are decoded from now on.")
        self.on_death()
        self._end()
