"""`MeshChanger`: the interface through which the engine core gets a new executor when the mesh changes. No JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


@dataclass(frozen=True, eq=False)
class Generation:
    """An executor and its scheduler config. larger_is_wanted: whether its mesh is smaller than requested because processes are missing."""

    executor: Executor
    config: SchedulerConfig
    larger_is_wanted: bool = False


class MeshChanger(Protocol):
    """Changes the mesh under a core, in the engine's thread.

    Attributes:
        needs_change: whether the current processes require another mesh.
        phase: current phase of a mesh change; None if none is in progress.
        patience: seconds that a request waits for a larger mesh if the current mesh cannot hold it.
        failure: why the last requested mesh could not be created; the previous mesh is in use again.
    """

    needs_change: bool
    phase: str | None
    patience: float
    failure: Exception | None

    def watch(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called from any thread when `needs_change` may have become true."""

    def has_warmed_up(self) -> None:
        """Note that the current mesh is ready to serve."""

    def take_change(self) -> bool:
        """Whether `needs_change` may have become true since the last call."""

    def recover_from(self, error: Exception) -> Generation:
        """Recover from a failed step. Raise the error if that is impossible."""

    def regroup(self) -> Generation:
        """Change to the mesh for the current processes."""

    def request_change(self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None) -> Any:
        """Check a requested change and return the argument for `change_to`. Raise if it is invalid.

        Blocks other requests until `end_request`.
        """

    def change_to(self, wanted: Any) -> Generation | None:
        """Change to a requested mesh. Return None if the executor has changed in place and keeps its caches and requests."""

    def end_request(self) -> None:
        """End the request begun by `request_change`."""
