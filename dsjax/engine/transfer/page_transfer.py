"""What a prefill side and a decode side say to each other, as plain values; `PrefillLink`, all that decode needs of a prefill side.

docs/disaggregation.md has the design. No JAX: arrays go beside these messages, from executor to executor.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from dsjax.engine.contract.executor import Progress

TRANSFER_SECONDS = 30
"""Default of `--transfer-timeout`: what was asked for or offered, and then not heard of, is given up after it."""
MOST_KEPT = 256
"""Pages of a prefill rank in parcels that decode has not taken. Further ones stay in the rank's cache until there is room."""
PARCEL_PAGES = 16
"""Pages of one transfer in a parcel, at most; as many as a program moves at once (`MOVED_PAGES`)."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Compute pages and send them.

    Attributes:
        transfer: by which both sides name this. tokens: int32, from the prompt's first one on, to one behind the last page wanted.
        first, end: pages [first, end) are wanted.
        priority: of the request; it orders prefill's queue too.
    """

    transfer: str
    tokens: bytes
    first: int
    end: int
    salt: str | None = None
    priority: int = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody wants the rest of a transfer, nor its parcels."""

    transfer: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A parcel is not needed any more: it was pulled, or is not wanted."""

    number: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Let no page be found any more that is computed now (`/flush_cache`)."""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """A parcel can be pulled, as long as its lease runs.

    Attributes:
        first, count: which pages of the transfer it has, in their order.
        cached: tokens, from the prompt's first one on, that prefill had cached and did not compute for this transfer.
        address: of the process that keeps the parcel, as `ChunkServer` has it; empty in one process.
    """

    transfer: str
    number: int
    first: int
    count: int
    cached: int = 0
    address: str = ""


class UnderWay(msgspec.Struct, frozen=True, array_like=True, tag="under_way"):
    """These transfers are queued or being computed, however long that takes: what is left of them will be offered."""

    transfers: list[str]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A transfer ends without the rest of its pages. transfer: empty where every one does: the prefill side has ended."""

    transfer: str
    reason: str


class PullRequest(msgspec.Struct, frozen=True, array_like=True, tag="pull_request"):
    """A process of the decode side is about to pull a parcel, from the process that keeps it."""

    number: int


class PullResponse(msgspec.Struct, frozen=True, array_like=True, tag="pull_response"):
    """The parcel can be pulled now, once, by the number of this pull.

    Attributes:
        pull: 0 where the parcel is not kept any more.
        ticket: what the transport of the process that pulls needs beside the number (`Transport.publish`).
    """

    number: int
    pull: int
    ticket: bytes = b""


class PullDone(msgspec.Struct, frozen=True, array_like=True, tag="pull_done"):
    """The pull of this number is over: the parcel has come."""

    pull: int


ToPrefill = Ask | Cancel | Release | Forget
ToDecode = Offer | UnderWay | Failed
Parcel = dict[str, Any]
"""By array of the cache `[1, PARCEL_PAGES, layers, page_size, …]`, on one device; what its pages do not fill is anything."""


class Source(NamedTuple):
    """Where a parcel is: which prefill side has it, by its number, and at which address it is pulled (`Offer.address`)."""

    link: int
    address: str = ""


class PulledParcel(NamedTuple):
    """What has come of a parcel that a decode rank was to pull.

    Attributes:
        link: which prefill side had it. number: of the parcel there. pages: numbers under which its pages land.
        ok: whether it has come, on all devices of the rank.
    """

    rank: int
    link: int
    number: int
    pages: list[int]
    ok: bool


Pull = Callable[[Source, int, Any], Parcel]
"""`pull(source, number, device)`: a parcel on this device, complete. Raises `ParcelGoneError`, or anything else."""


class ParcelPort(Protocol):
    """What an executor offers that sends pages to other engines, or pulls theirs (`Executor.extension`)."""

    @property
    def parcel_shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of a parcel's arrays, by name."""

    @property
    def processes_of_ranks(self) -> Sequence[Sequence[int]]:
        """The processes that have devices of each DP rank; the first one keeps the rank's parcels."""

    def send_parcels(
        self,
        offer: Callable[[int, Parcel | None], None],
        drop: Callable[[Sequence[int]], None] = lambda numbers: None,
    ) -> None:
        """Have what `SendPages` makes offered as `offer(number, parcel)` when it is complete, and `drop(numbers)` called at `DropParcels`,
        from any thread and in the order of the commands. The parcel is None where another process keeps it.
        """

    def pull_parcels(self, pull: Pull, report: Callable[[PulledParcel], None]) -> None:
        """Have `PullPages` pull by this, and what came of each parcel reported, from any thread."""


class ParcelGoneError(Exception):
    """A parcel that is to be pulled is not kept any more, or cannot be reached."""


class PrefillLink(Protocol):
    """A prefill side, as decode sees it: in this process, or in another one. Both methods may be called from any thread.

    `send` never waits. `pull` does, and gives up by itself after the transfer's timeout.
    """

    def send(self, message: ToPrefill) -> None:
        """Tell it something. What it answers comes to the receiver that `connect` named."""

    def connect(self, receive: Callable[[ToDecode], None]) -> None:
        """Have its messages handed to `receive`, in its own thread, from now on."""

    def pull(self, number: int, device: Any, address: str = "") -> Parcel:
        """A parcel that was offered, on this device, complete. address: that the offer has named.

        Raises:
            ParcelGoneError: it is not kept any more, or its side cannot be reached.
        """

    def warm_up(self, progress: "Progress | None" = None) -> None:
        """Compile what it will need, where its devices are this process's."""

    def close(self) -> None:
        """Nothing is asked or pulled any more."""


class SentPages(NamedTuple):
    """Pages of a prefill rank that go into a parcel before a step.

    Attributes:
        number: of the parcel.
    """

    number: int
    pages: list[int]


class PulledPages(NamedTuple):
    """Pages of a parcel that land on a decode rank.

    Attributes:
        source: where it is. parcel: its number there. pages: (place in the parcel, number under which the page lands).
    """

    source: Source
    parcel: int
    pages: list[tuple[int, int]]
