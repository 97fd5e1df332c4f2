"""`Executor`: what computes, as the engine sees it. No JAX: the mesh, a recording and the tests' fake are behind the same face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dsjax.engine.contract.commands import Command

if TYPE_CHECKING:  # the scheduler's side of the engine loads neither NumPy nor JAX
    import numpy as np

    from dsjax.engine.schedule.request import ErrorKind
    from dsjax.engine.transfer.page_transfer import Parcel, Pull, PulledParcel

TokenScore = tuple[int, float, int, list[tuple[int, float]]]
"""(token, log-probability, its place among all tokens, the most probable tokens with theirs)."""


class RowResult(NamedTuple):
    """What a row yielded.

    Attributes:
        token_ids: the tokens made, in order: one, or with drafts one more than were accepted. None where the row makes none, or
            could not: then `finite` is False or `error` says why.
        finite: False where the logits held a NaN or an infinity; the request then fails. It is said of every row.
        scores: of each token made, where the slot wants log-probabilities.
        prompt_scores: where asked for, one entry for each prompt token that this row's positions predict: of positions
            [start, start + length) the tokens start + 1 …, as far as the prompt goes.
        error: why the request fails although its logits are finite: no token was allowed, or its grammar cannot go on.
        num_drafts: drafts that were verified.
        drafts: what the MTP module proposes next, where the slot has a guide: the host must check it.
        kind: of the error, where that does not follow from the request's parameters.
    """

    token_ids: tuple[int, ...] | list[int] = ()
    finite: bool = True
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None
    error: str | None = None
    num_drafts: int = 0
    drafts: tuple[int, ...] | list[int] = ()
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
        disk_pages: that the disk has room for, of all ranks together; disk_page_bytes: that each takes there.
        transfers: whether pages go to other engines, or come from them.
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

    @property
    def max_pages(self) -> int:
        """Entries of a slot's page table."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """How tokens reached their experts since recording began.

    Attributes:
        tokens_per_expert: `[layers, physical experts]`, of the model's MoE layers; where experts move, of whichever a slot held.
        rows_sent: `[ranks]`, rows of tokens that each device sent to others.
        rounds: of dispatch, of each layer the most of any rank; summed over layers and launches.
        dispatch_bytes: sent by all devices.
        padding_share: of those bytes, the share that carried no token's row; 0 to 1.
        logical_load: `[layers, logical experts]`, tokens, wherever they were computed.
        physical_to_logical: `[layers, physical experts]`, the logical expert in each slot when the last of them was computed.
    """

    tokens_per_expert: np.ndarray
    rows_sent: np.ndarray
    rounds: int
    dispatch_bytes: int
    padding_share: float
    logical_load: np.ndarray
    physical_to_logical: np.ndarray


class ExecutorCounts(NamedTuple):
    """What an executor counts.

    Attributes:
        num_padding_tokens: token slots of the last step's launches, on all ranks, that held no token.
        compilations_after_warm_up: programs compiled since warm-up ended; 0 as long as there was none.
        experts: only while recording is on; without the last launches, which are read together once a second.
    """

    num_padding_tokens: int = 0
    compilations_after_warm_up: int = 0
    experts: ExpertCounts | None = None


@dataclass(frozen=True, eq=False)
class ExpertSlots:
    """Where experts are, and what it takes to move them.

    Attributes:
        physical_to_logical: `[MoE layers, physical slots]`, with the MTP module's layer last; slots lie rank by rank.
        ranks: of an EP group; hosts: runs of them that are on one machine. groups: of experts, where routing is limited to some of them.
        expert_share: of a token's arithmetic, the routed experts' part: their parameters among those that act on it.
        expert_bytes: of one expert on one device. per_exchange: experts that a rank sends and receives in one `StageExperts`, at most.
        seconds: that a `StageExperts` and a `PlaceExperts` took when they were tried during warm-up; None before.
    """

    physical_to_logical: np.ndarray
    n_logical: int
    ranks: int
    hosts: int
    groups: int
    expert_share: float
    expert_bytes: int
    per_exchange: int
    seconds: tuple[float, float] | None = None


class LoadWindow(NamedTuple):
    """What `ReadLoads` gives: tokens since the last time, of the MoE layers, with the MTP module's layer last.

    Attributes:
        logical: `[layers, logical experts]`, int64. by_rank: `[layers, ranks of an EP group]`, what each really computed.
    """

    logical: np.ndarray
    by_rank: np.ndarray


class Exchanged(NamedTuple):
    """What `StageExperts` and `PlaceExperts` give: how long they took, and what went wrong. A layer is then placed as before."""

    seconds: float
    error: str | None = None


class PageReports(NamedTuple):
    """What came of the pages' ways to the disk and from it since the last time it was asked.

    Attributes:
        read: (rank, number, whether it has come) of pages that were to be read.
        written: (number, whether it was written) of those to be written.
        found: names of the pages that an earlier run has left, least recently used first; None until they are known, and ever after.
    """

    read: list[tuple[int, int, bool]]
    written: list[tuple[int, bool]]
    found: list[bytes] | None = None


Progress = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)` between the programs that an executor compiles to warm up. What it raises ends the warm-up."""


class Executor(Protocol):
    """Carries out commands in their order.

    One thread at a time calls it, not always the same one: the server warms up in its main thread and then steps in the
    engine's. Whatever is bound to a thread, such as `jax.set_mesh`, is entered inside each method.

    Attributes:
        max_in_flight: how many steps may be launched before the first is waited for: 1 or 2. With 1, a second step may be
            launched all the same: its inputs are laid out and sent, and it starts when the first is done.
    """

    limits: ExecutorLimits
    max_in_flight: int

    @property
    def expert_slots(self) -> ExpertSlots | None:
        """Where experts are now; None where they cannot be moved."""

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

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """What came of pages and the disk since the last time; where that is nothing, wait so long for the disk's first. Only where
        `limits.disk_pages` is not 0, or `limits.transfers`.
        """

    @property
    def parcel_shapes(self) -> "dict[str, tuple[tuple[int, ...], np.dtype]]":
        """Of a parcel's arrays, by name: shape and dtype. Only with `limits.transfers`."""

    @property
    def processes_of_ranks(self) -> Sequence[Sequence[int]]:
        """Of each DP rank the processes that have devices of it; the first one keeps its parcels."""

    def send_parcels(
        self,
        offer: "Callable[[int, Parcel | None], None]",
        drop: Callable[[Sequence[int]], None] = lambda numbers: None,
    ) -> None:
        """Have what `SendPages` makes offered as `offer(number, parcel)` when it is complete, and `drop(numbers)` called at `DropParcels`,
        from any thread and in the order of the commands. The parcel is None where another process keeps it. Only with `limits.transfers`.
        """

    def pull_parcels(self, pull: "Pull", report: "Callable[[PulledParcel], None]") -> None:
        """Have `PullPages` pull by this, and what came of each parcel reported, from any thread. Only with `limits.transfers`."""

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program that commands can ask for."""

    def shutdown(self) -> None:
        """Give back what the executor holds."""


class ExecutorAround:
    """An executor around another one: what it does not do otherwise is the inner executor's."""

    def __init__(self, inner: Executor):
        self.inner = inner

    @property
    def limits(self) -> ExecutorLimits:
        """The inner executor's."""
        return self.inner.limits

    @property
    def max_in_flight(self) -> int:
        """The inner executor's."""
        return self.inner.max_in_flight

    @property
    def expert_slots(self) -> ExpertSlots | None:
        """The inner executor's."""
        return self.inner.expert_slots

    def wait(self, pending: Any) -> None:
        """As the inner executor."""
        self.inner.wait(pending)

    def counts(self) -> ExecutorCounts:
        """The inner executor's."""
        return self.inner.counts()

    @property
    def recording(self) -> bool:
        """The inner executor's."""
        return self.inner.recording

    def set_recording(self, on: bool) -> None:
        """As of the inner executor: whether experts' load is recorded."""
        self.inner.set_recording(on)

    def expert_counts(self) -> ExpertCounts | None:
        """The inner executor's."""
        return self.inner.expert_counts()

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """The inner executor's."""
        return self.inner.page_reports(seconds)

    @property
    def parcel_shapes(self) -> "dict[str, tuple[tuple[int, ...], np.dtype]]":
        """The inner executor's."""
        return self.inner.parcel_shapes

    @property
    def processes_of_ranks(self) -> Sequence[Sequence[int]]:
        """The inner executor's."""
        return self.inner.processes_of_ranks

    def send_parcels(
        self,
        offer: "Callable[[int, Parcel | None], None]",
        drop: Callable[[Sequence[int]], None] = lambda numbers: None,
    ) -> None:
        """As of the inner executor."""
        self.inner.send_parcels(offer, drop)

    def pull_parcels(self, pull: "Pull", report: "Callable[[PulledParcel], None]") -> None:
        """As of the inner executor."""
        self.inner.pull_parcels(pull, report)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile the inner executor's programs."""
        self.inner.warm_up(progress)
