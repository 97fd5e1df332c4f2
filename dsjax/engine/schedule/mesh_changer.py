"""`MeshChanger`: the interface through which the engine core gets a new executor when the mesh changes. No JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


@dataclass(frozen=True, eq=False)
class MeshEpoch:
    """The time between two mesh changes, with one executor and its scheduler config."""

    executor: Executor
    config: SchedulerConfig
    is_reduced: bool = False  # whether the mesh is smaller than requested because processes are missing


class MeshChanger(Protocol):
    """Changes the mesh under a core, in the engine's thread.

    Attributes:
        needs_change: whether the current processes require another mesh.
        phase: current phase of a mesh change; None if none is in progress.
        patience: seconds that an inference request waits for a larger mesh if the current mesh cannot hold it.
        failure: why the last wanted mesh could not be created; the previous mesh is in use again.
    """

    needs_change: bool
    phase: str | None
    patience: float
    failure: Exception | None

    def watch(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called from any thread when `needs_change` may have become true."""

    def on_warmed_up(self) -> None:
        """Note that the current mesh is ready to serve."""

    def poll_change(self) -> bool:
        """Return whether `needs_change` may have become true since the last call."""

    def recover_from(self, error: Exception) -> MeshEpoch:
        """Replace the executor after a failed step. Raise the error if that is impossible."""

    def regroup(self) -> MeshEpoch:
        """Change to the mesh for the current processes, because `needs_change` is true."""

    def begin_change(self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None) -> Any:
        """Check a change that a user wants, and return the argument for `change_to`. Raise if it is impossible.

        No other change can begin until `end_change`, unless this one raises.
        """

    def change_to(self, wanted: Any) -> MeshEpoch | None:
        """Change to a wanted mesh. Return None if the executor has changed in place and keeps its caches and requests."""

    def end_change(self) -> None:
        """Let other changes begin, whether or not `change_to` was called."""
