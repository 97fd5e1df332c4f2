"""`EngineThread`: runs an engine's core in a thread, which takes commands between steps and hands over what came of each."""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from dsjax.engine.core import EngineCore
from dsjax.engine.schedule.mesh_changer import Generation
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import AdmissionError
from dsjax.engine.stats import StepStats
from dsjax.errors import UserError

logger = logging.getLogger(__name__)


MOST_IDLE = 3
"""After so many steps in a row that computed nothing, a thread waits for a command if its core wants to be looked at now and then. It takes
more than one, because a step may send pages and the next one use their room.
"""


class EngineThread:
    """Runs a core, step after step; takes commands (add, abort, end) between steps and while the device computes one.

    It hands a step's updates over once the next step is launched: whoever takes them needs Python's lock too.

    The thread calls these; a `RuntimeError` from one of them says that nobody listens any more:
        on_done: takes what a step or a change of the mesh did. on_change: the core has continued on another mesh.
        on_death: takes the error by which the thread ends. wants_stats: says whether `on_done` is to get a step's stats.
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
        self._num_idle = 0  # steps in a row that computed nothing
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Requests and tokens that were sent here, and of those taken by the thread; each pair has one writer.
        self._queued = self._taken = (0, 0)
        # Of the thread: what to do between steps, and whether to end.
        self._between_steps: deque[Callable[[], object]] = deque()
        self._done: tuple[list[Update], StepStats | None] | None = None  # of a step, not yet handed over
        self._ending = False
        self._failure: BaseException | None = None  # of a change of the mesh, after which nothing goes on

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> tuple[int, int]:
        """Completions that wait for a slot or for pages, and their known tokens. Cheap; may lag behind by a step."""
        (queued, tokens), (taken, tokens_taken), scheduler = self._queued, self._taken, self.core.scheduler
        completions = sum(len(rank.waiting) for rank in scheduler.ranks)
        return completions + queued - taken, scheduler.waiting_tokens + tokens - tokens_taken

    def start(self) -> None:
        """Begin."""
        if self.core.generations is not None:
            self.core.generations.watch(self.look_at_processes)
            self.look_at_processes()  # one may have gone since it was loaded
        self._thread.start()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._queued = _plus(self._queued, requests)
        self._commands.put(lambda: self._add(requests))

    def abort(self, completion_ids: Sequence[str]) -> None:
        """End those of these completions that this engine has."""
        for completion_id in completion_ids:
            self._commands.put(lambda completion_id=completion_id: self.core.abort(completion_id))

    def between_steps(self, function: Callable[[], object]) -> None:
        """Run a function in the thread, between two steps. It must not raise."""
        self._commands.put(lambda: self._between_steps.append(function))

    def change(self, make: Callable[[], Generation | None]) -> None:
        """Change the mesh or the expert processes, as `EngineCore.change` says, between steps. The thread ends by what `make` raises."""
        try:
            updates = self.core.change(make)
            self.on_change()
            self.on_done(updates, None)
        except BaseException as error:
            self._failure = error  # there is no executor any more
            raise

    def end(self) -> None:
        """End, between two steps."""
        self._commands.put(lambda: setattr(self, "_ending", True))

    def join(self, timeout: float) -> None:
        """Wait for the end, so long at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread as soon as it looks, between steps or while the device computes. It must not raise."""
        self._commands.put(function)

    # In the thread.

    def turn(self, wait: bool = True) -> bool:
        """Take commands, and compute a step; False where the thread is to end.

        wait: for a command, where nothing is to be computed. False, without a thread: hand over what the step did before this returns.
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
            # A process of the group was lost, and the loop has ended before this step did.
            with contextlib.suppress(RuntimeError):
                self._hand_over()
                self.on_death(error)
            self.core.abandon()

    def _step(self, ahead: bool) -> None:
        # Requests that clients send at once come one by one. Those that come during the first one's step go on with the next: it is
        # planned when that one is done, and not ahead of it.
        scheduler = self.core.scheduler
        updates = self.core.step(self._meanwhile, ahead=ahead, before_change=self._hand_over)
        if self.core.scheduler is not scheduler:  # it has gone on without a process
            self.on_change()
            self.on_done(updates, None)
            return
        self._hand_over()  # nothing is left but for a step in which there was nothing to compute
        stats = self.core.stats()
        self._num_idle = self._num_idle + 1 if stats is None else 0
        stats = stats if self.wants_stats() else None
        if updates or stats is not None:
            self._done = (updates, stats)

    def look_at_processes(self) -> None:
        """Go on on another mesh between steps, if a process has gone or come back. From any thread."""

        def look() -> None:
            if self.core.generations.due:
                self.change(self.core.generations.regroup)

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
            except AdmissionError as error:  # it was prepared for a larger mesh
                refused += self.core.park(request, error)
        if refused:
            self.on_done(refused, None)
        self._taken = _plus(self._taken, requests)


def _plus(counts: tuple[int, int], requests: Sequence[Request]) -> tuple[int, int]:
    return counts[0] + len(requests), counts[1] + sum(len(request.token_ids) for request in requests)
