"""`Executor`: the interface between the engine and its devices. No JAX: a mesh, a recording and the tests' fake implement it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from dsjax.engine.contract.commands import Command

if TYPE_CHECKING:  # the scheduler's side of the engine loads neither NumPy nor JAX
    import numpy as np

Kind = TypeVar("Kind")


class ErrorKind(enum.StrEnum):
    """Why a request ended with `FinishReason.ERROR`. The values are the codes in the server's answers and metrics."""

    NON_FINITE = "non_finite_values"  # the logits have a NaN or an infinity
    STRUCTURED_OUTPUT = "structured_output_failed"  # the grammar allows no further token, or cost too much
    NO_TOKEN_ALLOWED = "no_token_allowed"  # allowed tokens, bad words and minimum length exclude each other
    NO_ROOM = "no_room_on_the_new_mesh"  # the mesh changed while it ran, and the new KV cache cannot hold it


TokenScore = tuple[int, float, int, list[tuple[int, float]]]
"""(token, log-probability, rank among all tokens, most probable tokens with their log-probabilities)."""


class RowResult(NamedTuple):
    """Result of a row.

    Attributes:
        token_ids: generated tokens, in order: one, or with drafts the accepted ones and one more. Empty if the row samples none. If the row
            has failed, only the tokens before the failure; then `finite` is False or `error` says why.
        finite: False if the logits have a NaN or an infinity, which fails the request. Also set for rows that sample no token.
        scores: one per generated token, if the request wants log-probabilities.
        prompt_scores: if requested, one per prompt token that the row predicts: start + 1 … start + length, up to the end of the prompt.
        error: why the request fails although its logits are finite. kind: kind of the error; None: `error_kind` derives it.
        num_drafts: number of verified drafts. drafts: the next drafts, if the slot has a grammar, because the host must check them.
    """

    token_ids: Sequence[int] = ()
    finite: bool = True
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None
    error: str | None = None
    num_drafts: int = 0
    drafts: Sequence[int] = ()
    kind: ErrorKind | None = None

    @property
    def failed(self) -> bool:
        """Whether the request ends with this result and gets no further token."""
        return not self.finite or self.error is not None


class RankResults(NamedTuple):
    """One rank's results, in the row order of its `RankStep`."""

    decodes: list[RowResult]
    prefills: list[RowResult]


@dataclass(frozen=True)
class ExecutorLimits:
    """Sizes that an executor has room for, per DP rank. Page 0 of each rank is never allocated.

    Attributes:
        windows_per_rank: window pages, with numbers after the other pages; the first is never allocated either. 0: the model has none.
        window_columns: entries of a slot's ring of window pages, after its page table. host_windows_per_rank: window pages in host memory.
        host_pages_per_rank: pages in host memory. disk_pages: pages on disk, for all ranks. disk_page_bytes: bytes of each.
        disk_pages_per_window: number of disk pages that a window page occupies.
        transfers: whether pages move to or from other engines. moves_pages: whether any pages leave the devices or come from outside.
        num_stages: pipeline stages, and therefore the number of steps that can be computed at the same time.
    """

    max_rows_decode: int
    max_rows_prefill: int
    max_chunk: int
    page_size: int
    pages_per_rank: int
    num_ranks: int
    max_model_len: int
    vocab_size: int
    host_pages_per_rank: int = 0
    disk_pages: int = 0
    disk_page_bytes: int = 0
    disk_pages_per_window: int = 1
    transfers: bool = False
    moves_pages: bool = False
    num_stages: int = 1
    windows_per_rank: int = 0
    window_columns: int = 0
    host_windows_per_rank: int = 0

    @property
    def max_pages(self) -> int:
        """Entries of a slot's page table, without the ring of window pages."""
        return -(-self.max_model_len // self.page_size)

    @property
    def of_programs(self) -> ExecutorLimits:
        """Limits on which compiled programs depend: offload tiers and transfers are left out."""
        no_offload = {"host_pages_per_rank": 0, "host_windows_per_rank": 0, "disk_pages": 0, "disk_page_bytes": 0}
        return replace(self, **no_offload, disk_pages_per_window=1, transfers=False, moves_pages=False)


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """Expert load and dispatch counters since recording began.

    Attributes:
        tokens_per_expert: `[layers, physical experts]`, tokens of each slot in the MoE layers, whichever logical experts it has held.
        rows_sent: `[ranks]`, token rows that each device has sent to others.
        logical_load: `[layers, logical experts]`, tokens of each expert on all devices.
        physical_to_logical: `[layers, physical experts]`, the expert in each slot at the last counted token.
        rounds: dispatch rounds: the maximum over ranks, summed over layers and launches.
        dispatch_bytes: bytes sent by all devices. padding_share: share of these bytes that is padding; 0 to 1.
    """

    tokens_per_expert: np.ndarray
    rows_sent: np.ndarray
    logical_load: np.ndarray
    physical_to_logical: np.ndarray
    rounds: int
    dispatch_bytes: int
    padding_share: float


class ExecutorCounts(NamedTuple):
    """Counters of an executor. num_padding_tokens: padding token slots in the last step's launches, on all ranks.

    experts: None unless recording is on. Lacks the last launches, because reports are read in batches once a second. With pipeline stages
    in several processes, the result of the last `Executor.expert_counts`.
    """

    num_padding_tokens: int = 0
    compilations_after_warm_up: int = 0
    experts: ExpertCounts | None = None


class Offering(Protocol):
    """A part of an executor that offers an interface besides commands, such as `ChunkPort`."""

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return the interface of this type, or None if the part has none."""


Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)` between the compilations of a warm-up. An exception ends the warm-up."""

CompileRest = Callable[[Callable[[], None]], None]
"""Compiles the remaining programs in a thread of its own. Calls its argument between two programs; an exception stops it."""


class Executor(Protocol):
    """Executes commands on the devices, in order: `launch` enqueues a command, `collect` returns its result.

    Calls come from one thread at a time, not always the same one, so each method enters thread-local contexts such as `jax.set_mesh`.

    max_in_flight: steps that may run at once: 1, 2, or the number of stages. With 1, a second step may still be launched: its inputs are
    laid out and sent, and it starts when the first is done.
    """

    limits: ExecutorLimits
    max_in_flight: int

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return the executor's interface of this type, besides commands; None if it has none."""

    def launch(self, command: Command) -> Any:
        """Enqueue a command and return while the device computes. Commands are executed in order."""

    def wait(self, pending: Any) -> None:
        """Wait until a launched command is done. Start the next launched command if it has not started yet."""

    def collect(self, pending: Any) -> Any:
        """Wait for a command and return its result: for `Step` a `RankResults` per rank, for `Score` float32 logits `[tokens, V]`,
        for `ReadLoads` a `LoadWindow`, for `StageExperts` and `PlaceExperts` an `Exchanged`, for others None. Collect each step once,
        in order; `Copy`, `Clear` and commands that move experts need not be collected.
        """

    def counts(self) -> ExecutorCounts:
        """Return the counters of the last step and those since the start."""

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""

    def set_recording(self, on: bool) -> None:
        """Switch the recording of the experts' load on or off, from the next step on. Switching on resets the counts."""

    def expert_counts(self) -> ExpertCounts | None:
        """Return the counters since recording began; None if it is off or the model has no experts."""

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> CompileRest | None:
        """Compile every program that commands can need.

        lazily: skip programs that few requests need and that compile within seconds. Return a function that compiles them while commands
        run, or None if there are none. A command that needs one earlier waits for its compilation.
        """

    def shutdown(self) -> None:
        """Release all memory, including the parameters, even if the last step has failed."""


class ExecutorWrapper:
    """An executor around another one, `inner`, to which it forwards everything that it does not define."""

    def __init__(self, inner: Executor):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
