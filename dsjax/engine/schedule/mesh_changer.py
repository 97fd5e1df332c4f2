"""`MeshChanger`: what gives an engine's core another executor, as the core knows it. No JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


@dataclass(frozen=True, eq=False)
class Generation:
    """An executor, and the scheduler's sizes for it. larger_is_wanted: its mesh is smaller than asked for: processes are missing."""

    executor: Executor
    config: SchedulerConfig
    larger_is_wanted: bool = False


class MeshChanger(Protocol):
    """Changes the mesh under a core, in the engine's thread.

    Attributes:
        due: whether the processes of now call for another mesh. phase: what is being done to change it; None while nothing is.
        patience: seconds that a request waits for a larger mesh where the one of now cannot hold it.
        failure: why the mesh that was asked for last could not be had; the one before is in its place.
    """

    due: bool
    phase: str | None
    patience: float
    failure: Exception | None

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from now on, from any thread, when `due` may have become true."""

    def has_warmed_up(self) -> None:
        """Take notice that the mesh of now can serve."""

    def take_change(self) -> bool:
        """Whether `due` may have become true since this was asked."""

    def after(self, error: Exception) -> Generation:
        """Go on after a step failed, or raise the error where nothing can go on."""

    def regroup(self) -> Generation:
        """Change to the mesh that the processes of now call for."""

    def ask(self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None) -> Any:
        """Check a requested change, or raise; give what `to` takes. No other can be requested until `forget`."""

    def to(self, wanted: Any) -> Generation | None:
        """Change to a requested mesh; None where the executor has changed in place, and its caches and requests stay."""

    def forget(self) -> None:
        """End the request that `ask` began."""
