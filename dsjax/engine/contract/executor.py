"""`Executor`: what computes, as the engine sees it. No JAX: the mesh, a recording and the tests' fake are behind the same face."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from dsjax.engine.contract.commands import Command

if TYPE_CHECKING:  # the scheduler's side of the engine loads neither NumPy nor JAX
    import numpy as np

Kind = TypeVar("Kind")


class ErrorKind(enum.StrEnum):
    """Why a request ended with `FinishReason.ERROR`. The values are the codes of the server's answers and metrics."""

    NON_FINITE = "non_finite_values"  # the logits held a NaN or an infinity
    STRUCTURED_OUTPUT = "structured_output_failed"  # the grammar came to no legal token, or cost too much
    NO_TOKEN_ALLOWED = "no_token_allowed"  # allowed tokens, bad words and minimum length exclude each other
    NO_ROOM = "no_room_on_the_new_mesh"  # the mesh has changed while it ran, and the new one's cache cannot hold it


TokenScore = tuple[int, float, int, list[tuple[int, float]]]
"""(token, log-probability, its place among all tokens, the most probable tokens with theirs)."""


class RowResult(NamedTuple):
    """What a row yielded.

    Attributes:
        token_ids: the tokens made, in order: one, or with drafts one more than were accepted. None where the row makes none, or could not:
            then `finite` is False or `error` says why.
        finite: False where the logits held a NaN or an infinity; the request then fails. It is said of every row.
        scores: of each token made, where the slot wants log-probabilities.
        prompt_scores: where asked for, one for each prompt token that these positions predict: start + 1 … start + length, as far as the
            prompt goes.
        error: why the request fails although its logits are finite. kind: of the error, where that does not follow from the request's
            parameters.
        num_drafts: drafts that were verified. drafts: proposed next, where the slot has a guide: the host must check them.
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
        """Whether the request ends with this result, without a further token."""
        return not self.finite or self.error is not None


class RankResults(NamedTuple):
    """One rank's results, row by row as its `RankStep` has them."""

    decodes: list[RowResult]
    prefills: list[RowResult]


@dataclass(frozen=True)
class ExecutorLimits:
    """The shapes an executor has room for, all per DP rank. Page 0 of each rank is never allocated.

    Attributes:
        windows_per_rank: window pages, numbered behind the others in commands; the first is never allocated either. 0: the model has none.
        window_columns: entries of a slot's ring of window pages, behind its page table. host_windows_per_rank: of host memory, too.
        host_pages_per_rank: of host memory, for evicted pages. disk_pages: of all ranks together; disk_page_bytes: that each takes there.
        transfers: whether pages go to other engines, or come from them. moves_pages: whether they go anywhere beside the devices.
        num_stages: stages that a step goes through, and so steps that can be computed at the same time.
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


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """How tokens reached their experts since recording began.

    Attributes:
        tokens_per_expert: `[layers, physical experts]`, of the model's MoE layers; where experts move, of whichever a slot held.
        rows_sent: `[ranks]`, rows of tokens that each device sent to others.
        logical_load: `[layers, logical experts]`, tokens, wherever they were computed.
        physical_to_logical: `[layers, physical experts]`, when the last of them was computed.
        rounds: of dispatch, of each layer the most of any rank; summed over layers and launches.
        dispatch_bytes: sent by all devices. padding_share: of them, without a token's row; 0 to 1.
    """

    tokens_per_expert: np.ndarray
    rows_sent: np.ndarray
    logical_load: np.ndarray
    physical_to_logical: np.ndarray
    rounds: int
    dispatch_bytes: int
    padding_share: float


class ExecutorCounts(NamedTuple):
    """What an executor counts. num_padding_tokens: token slots of the last step's launches, on all ranks, that held no token.

    experts: only while recording is on; without the last launches, which are read together once a second, and with stages of several
    processes what the last `Executor.expert_counts` gave.
    """

    num_padding_tokens: int = 0
    compilations_after_warm_up: int = 0
    experts: ExpertCounts | None = None


class Offering(Protocol):
    """A part of an executor that offers something beside commands."""

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Give what the part offers to those who know of it by this type; None: nothing of the kind."""


Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)` between the programs that an executor compiles to warm up. What it raises ends the warm-up."""

CompileRest = Callable[[Callable[[], None]], None]
"""Called in a thread of its own with a function that is called between two programs. What that raises ends it."""


class Executor(Protocol):
    """Carries out commands in their order.

    One thread at a time calls it, not always the same one: what is bound to a thread, such as `jax.set_mesh`, is entered in each method.

    max_in_flight: steps that may run at once: 1 or 2, or as many as there are stages. With 1, a second step may be launched all the same:
    its inputs are laid out and sent, and it starts when the first is done.
    """

    limits: ExecutorLimits
    max_in_flight: int

    def extension(self, kind: type[Kind]) -> Kind | None:
        """What the executor offers beside commands, by the type that a part of the engine knows it by; None: nothing of the kind."""

    def launch(self, command: Command) -> Any:
        """Take a command, and return while the device computes. The command is executed after all those before it."""

    def wait(self, pending: Any) -> None:
        """Wait until a launched command is done. What was launched behind it starts, if it has not started yet."""

    def collect(self, pending: Any) -> Any:
        """Wait, and give what came of a command: of a `Step` a `RankResults` for each rank, of `Score` float32 logits
        `[tokens, V]`, of `ReadLoads` a `LoadWindow`, of `StageExperts` and `PlaceExperts` an `Exchanged`, of the others None.
        Steps are collected in their order, each once; `Copy`, `Clear` and what moves experts need not be.
        """

    def counts(self) -> ExecutorCounts:
        """What the last step did, and what happened since the start."""

    @property
    def recording(self) -> bool:
        """Whether the experts' load is recorded."""

    def set_recording(self, on: bool) -> None:
        """Whether the experts' load is recorded from the next step on; turning it on begins anew. Compiles nothing."""

    def expert_counts(self) -> ExpertCounts | None:
        """What was recorded since recording began; None while it is off, or the model has no experts."""

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> CompileRest | None:
        """Compile every program that commands can ask for.

        lazily: leave those out that few requests need, if each takes seconds only; what is given then compiles them while commands run.
        A command that wants one of them before waits for it. None: nothing is left.
        """

    def shutdown(self) -> None:
        """Give back what the executor holds, parameters included, whatever became of the last step."""


class ExecutorWrapper:
    """An executor around another one, `inner`. What it does not define itself, the inner executor has or does."""

    def __init__(self, inner: Executor):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
