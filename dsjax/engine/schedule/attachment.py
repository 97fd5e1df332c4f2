"""`Attachment`: an engine plugin with hooks for the start and end of steps and for changes of the mesh."""

from typing import Any

from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.page_source import PageSource
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


class Attachment:
    """Base class of engine plugins. The core calls these hooks in the engine's thread; by default each does nothing.

    Attributes:
        source: KV connector that the scheduler asks for pages; None: no connector.
        look_seconds: interval at which to call `begin_step` on an idle engine; None: never.
        wants_page_events: whether the scheduler must collect KV cache events.
        scheduler: the current executor's scheduler; None before the first `scheduled`.
        statistics_name: key of `statistics` in `StepStats.parts`; empty: no statistics.
    """

    source: PageSource | None = None
    look_seconds: float | None = None
    wants_page_events: bool = False
    scheduler: Scheduler | None = None
    statistics_name: str = ""

    def __init__(self, source: PageSource | None = None):
        self.source = source

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Start with a new executor. The core then creates its scheduler, which binds `source`. Commands to the old executor are lost."""

    def scheduled(self, scheduler: Scheduler) -> None:
        """Receive the new executor's scheduler."""
        self.scheduler = scheduler

    @property
    def busy(self) -> bool:
        """Whether the core must keep stepping although no request is unfinished."""
        return False

    def begin_step(self, now: float) -> None:
        """Process external input. Called before a step is planned, and every `look_seconds` on an idle engine."""

    def planned(self) -> None:
        """Called after a step was planned and `send` was called."""

    def send(self) -> None:
        """Send decisions to other processes. Called after a step was planned, a request was aborted, or `begin_step` ran without a step."""

    def before_launch(self, num_under_way: int) -> None:
        """Launch commands that must precede the planned step. num_under_way: steps launched whose results are not yet processed."""

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Called after a step's results were processed, with its duration, its plan and the updates of requests."""

    def idle(self) -> None:
        """Do background work. Called when no step is in flight."""

    def wait(self) -> bool:
        """Wait briefly for data that requests need from this plugin. Return whether it waited."""
        return False

    def flush(self) -> None:
        """Drop pages cached elsewhere (on disk, by other engines). Called after a flush of the prefix cache."""

    def statistics(self) -> Any:
        """Return the plugin's statistics; None if it has none."""
        return None

    def close(self, failed: bool) -> None:
        """Shut down. failed: after an error; do not wait for the devices."""
