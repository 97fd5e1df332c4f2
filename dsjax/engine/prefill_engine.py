"""`PrefillEngine`: an engine that prefills prompts for decode engines, and generates no text."""

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
from dsjax.engine.transfer.prefill_service import ChunkOwners, PrefillService, Receive
from dsjax.engine.transfer.send_buffers import SendBuffers

_log = logging.getLogger(__name__)


class PrefillEngine:
    """An engine core with a `PrefillService`, and the thread that runs its steps. Any thread may call `post` and `leave`.

    Args:
        timeout: seconds after which pages that no decode engine has pulled are dropped, together with their transfer.
        attachments: further plugins of the core.
        owners: returns the process that keeps each rank's pages, see `PrefillService`.
        mesh_changer: creates the executors of other meshes, see `EngineCore`.

    thread: runs the steps. error: exception that ended the thread, or None. on_death: called after `error` is set.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        timeout: float,
        async_scheduling: bool = True,
        attachments: Sequence[Attachment] = (),
        owners: ChunkOwners | None = None,
        mesh_changer: MeshChanger | None = None,
    ):
        self.service = PrefillService(timeout=timeout, owners=owners)
        self.core = EngineCore(
            executor,
            config,
            async_scheduling=async_scheduling,
            attachments=[*attachments, self.service],
            mesh_changer=mesh_changer,
        )
        self.service.flush_core = self.core.flush_prefix_cache
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._inbox: queue.SimpleQueue[tuple[ToPrefill, Receive | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self.thread = EngineThread(self.core, on_death=self._die, name="dsjax-prefill")

    def start(self) -> None:
        """Start processing posted messages."""
        self.thread.start()

    def post(self, message: ToPrefill, receive: Receive | None) -> None:
        """Accept a message from any thread. Replies go to `receive`, on any thread; it is None for messages from this process.

        Two messages may request one transfer, in either order: one from this process, which has the prompt, and one from the decode engine.
        """
        with self._lock:
            if not self._ended:
                self._inbox.put((message, receive))
                self.thread.call(self._take)
                return
        if isinstance(message, PrefillRequest) and receive is not None:
            receive(TransferFailed("", self.service.reason))  # "": every transfer has ended

    def leave(self, receive: Receive) -> None:
        """Cancel all transfers of a disconnected decode engine."""
        self.thread.call(lambda: self.service.leave(receive))

    def turn(self, wait: bool = True) -> bool:
        """Process posted messages and run a step, if the thread was not started. Return False if the engine has ended."""
        is_running = self.thread.turn(wait)
        if not is_running:
            self._end()
        return is_running

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile all shapes, in all processes."""
        self.core.executor.warm_up(progress)
        if self.core.mesh_changer is not None:
            self.core.mesh_changer.on_warmed_up()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the thread, and release the executor's resources. Transfers in progress fail."""
        self.thread.call(self._end)
        self.thread.end()
        self.thread.join(timeout)

    @property
    def buffers(self) -> SendBuffers:
        """Pages waiting to be pulled."""
        return self.service.buffers

    @property
    def num_jobs(self) -> int:
        """Number of unfinished transfers."""
        return self.service.num_jobs

    def _take(self) -> None:
        while not self._inbox.empty():
            self.service.enter(*self._inbox.get())

    def _end(self) -> None:
        """Refuse further messages, and fail those still in the inbox."""
        with self._lock:
            self._ended = True
        while not self._inbox.empty():
            message, receive = self._inbox.get()
            if isinstance(message, PrefillRequest) and receive is not None:
                receive(TransferFailed(message.transfer, self.service.reason))

    def _die(self, error: BaseException) -> None:
        """Stop accepting messages, and record why transfers fail. Called in the engine's thread."""
        self.error = error
        self.service.reason += f": {error}"
        _log.error("The prefill engine has failed; prompts are computed where they are decoded from now on.")
        self.on_death()
        self._end()
