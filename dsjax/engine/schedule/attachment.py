"""`Attachment`: an optional part of an engine's core, which is told when steps begin and end, and when the mesh changes."""

from typing import Any

from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.page_source import PageSource
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


class Attachment:
    """A part that the core calls by these verbs, in the engine's thread. A method that it does not define does nothing.

    Attributes:
        source: which the scheduler asks for pages; None: it has none.
        look_seconds: how often `begin_step` is wanted although nothing is to be computed; None: it need not be called then.
        wants_page_events: whether the scheduler collects which pages can be found. scheduler: None before the first `scheduled`.
        statistics_name: under which `StepStats.parts` has what `statistics` gives; empty: it gives nothing.
    """

    source: PageSource | None = None
    look_seconds: float | None = None
    wants_page_events: bool = False
    scheduler: Scheduler | None = None
    statistics_name: str = ""

    def __init__(self, source: PageSource | None = None):
        self.source = source

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Begin with an executor, whose scheduler is made after this and binds `source`. What the one before was asked for is lost."""

    def scheduled(self, scheduler: Scheduler) -> None:
        """The scheduler for that executor is this one, from now on."""
        self.scheduler = scheduler

    @property
    def busy(self) -> bool:
        """Whether the core must go on stepping although no request is unfinished."""
        return False

    def begin_step(self, now: float) -> None:
        """Enter what came from outside; a step may be planned next."""

    def planned(self) -> None:
        """Take notice that a step was planned."""

    def send(self) -> None:
        """Send other processes what was decided: after a step was planned, and when a request was ended from outside."""

    def before_launch(self, num_under_way: int) -> None:
        """Launch commands that go before the step that is launched next. num_under_way: steps launched and not entered."""

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Take notice of a step that was entered: how long it took, what it was to compute, and what it did to requests."""

    def idle(self) -> None:
        """Do a piece of work that needs no step: none is under way."""

    def wait(self) -> bool:
        """Wait a moment for what requests wait for, where that comes from this part; whether it was waited."""
        return False

    def flush(self) -> None:
        """Forget what is cached elsewhere; the prefix cache was flushed."""

    def statistics(self) -> Any:
        """What the part has done so far, and holds; None where there is nothing to say."""
        return None

    def close(self, failed: bool) -> None:
        """End. failed: after an error, when the devices must not be waited for."""
