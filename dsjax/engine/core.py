"""`EngineCore`: the loop body. Plan a step, compute it, enter its results."""

import time

from dsjax.engine.plan import Runner
from dsjax.engine.request import Request
from dsjax.engine.scheduler import Scheduler, SchedulerConfig, Update


class EngineCore:
    """Scheduler and runner together. Everything here happens in one thread; text is made elsewhere."""

    def __init__(self, runner: Runner, scheduler_config: SchedulerConfig):
        self.runner = runner
        self.scheduler = Scheduler(scheduler_config, runner.limits.num_ranks)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.num_unfinished > 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request; its pages are free at once."""
        return self.scheduler.abort(request_id, time.monotonic())

    def step(self) -> list[Update]:
        """Compute one step; give what it did to each request. Returns at once where there is nothing to do."""
        plan = self.scheduler.schedule(time.monotonic())
        if plan.is_empty:
            return []
        results = self.runner.execute(plan)
        return self.scheduler.update(plan, results, time.monotonic())
