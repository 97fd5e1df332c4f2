"""What a prefill side and a decode side say to each other, as plain values; `PrefillLink`, all that decode needs of a prefill side.

docs/disaggregation.md has the design. No JAX: arrays go beside these messages, from executor to executor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dsjax.engine.contract.executor import Progress

TRANSFER_SECONDS = 30
"""Default of `--transfer-timeout`: what was asked for or offered, and then not heard of, is given up after it."""
VERSION = 7
"""Version of these messages. It changes whenever an older side could misunderstand a newer one."""
MOST_KEPT = 256
"""Pages that a prefill rank has room for in chunks that decode has not taken. Further ones stay in its cache until there is room."""
CHUNK_PAGES = 16
"""Pages of one transfer in a chunk, at most; as many as a program moves at once (`MOVED_PAGES`)."""


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True, tag="prefill_request"):
    """Compute pages and send them.

    Attributes:
        transfer: by which both sides name this. tokens: int32, from the prompt's first one on, to one behind the last page wanted.
        first, end: pages [first, end) are wanted.
        priority: of the request; it orders prefill's queue too.
        page: the name of the last page wanted (`extend_hashes`), which stands for all tokens up to its end and for the salt. Whoever asks
            from another engine gives it: pages that have another name are never sent.
        dp_rank: number of the DP rank that a router outside has chosen to compute them; None: prefill chooses.
    """

    transfer: str
    tokens: bytes
    first: int
    end: int
    salt: str | None = None
    priority: int = 0
    page: bytes = b""
    dp_rank: int | None = None


class CancelTransfer(msgspec.Struct, frozen=True, array_like=True, tag="cancel_transfer"):
    """Nobody wants the rest of a transfer, nor its chunks.

    page: the name of its last page, which shows that whoever cancels a transfer without having asked for it knows its prompt.
    """

    transfer: str
    page: bytes = b""


class ReleaseChunk(msgspec.Struct, frozen=True, array_like=True, tag="release_chunk"):
    """A chunk is not needed any more: it was pulled, or is not wanted."""

    number: int


class FlushPages(msgspec.Struct, frozen=True, array_like=True, tag="flush_pages"):
    """Let no page be found any more that is computed now (`/flush_cache`)."""


class ChunkReady(msgspec.Struct, frozen=True, array_like=True, tag="chunk_ready"):
    """A chunk can be pulled, as long as its lease runs.

    Attributes:
        first, count: which pages of the transfer it has, in their order.
        cached: tokens, from the prompt's first one on, that prefill had cached and did not compute for this transfer.
        address: `HOST:PORT` of the process that keeps the chunk; empty in one process.
        names: of its pages, 32 bytes each. Decode takes no page that has another name than the one it asked for.
    """

    transfer: str
    number: int
    first: int
    count: int
    cached: int = 0
    address: str = ""
    names: bytes = b""


class TransfersUnderWay(msgspec.Struct, frozen=True, array_like=True, tag="transfers_under_way"):
    """These transfers are queued or being computed, however long that takes: what is left of them will be offered."""

    transfers: list[str]


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag="transfer_failed"):
    """A transfer ends without the rest of its pages. transfer: empty where every one does: the prefill side has ended."""

    transfer: str
    reason: str


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """A decode engine's first message to a prefill engine, which accepts it or says what differs.

    space: what both must have alike: everything that a page's values depend on beside its tokens, and the transport.
    """

    space: dict[str, Any]


class PublishedChunk(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a process that asks for a chunk by its number: the chunk can be pulled now, once.

    Attributes:
        pull: number of this pull. transport: address of the transport.
        ticket: what the transport of the process that pulls needs beside the number (`Transport.publish`).
    """

    pull: int
    transport: str
    ticket: bytes


class PullDone(msgspec.Struct, frozen=True, array_like=True):
    """The pull of this number is over. ok: the chunk has come."""

    pull: int
    ok: bool = True


ToPrefill = PrefillRequest | CancelTransfer | ReleaseChunk | FlushPages
ToDecode = ChunkReady | TransfersUnderWay | TransferFailed
Chunk = dict[str, Any]
"""By array of the cache `[1, CHUNK_PAGES, layers, page_size, …]`, on one device; what its pages do not fill is anything."""


class Source(NamedTuple):
    """Where a chunk is: which prefill side has it, by its number, and at which address it is pulled (`ChunkReady.address`)."""

    link: int
    address: str = ""


class PulledChunk(NamedTuple):
    """What has come of a chunk that a decode rank was to pull.

    Attributes:
        link: which prefill side had it. number: of the chunk there. pages: numbers under which its pages land.
        ok: whether it has come, on all devices of the rank.
    """

    rank: int
    link: int
    number: int
    pages: list[int]
    ok: bool


Pull = Callable[[Source, int, Any], Chunk]
"""`pull(source, number, device)`: a chunk on this device, complete. Raises `ChunkGoneError`, or anything else."""


Offer = Callable[[int, Chunk | None], None]
"""`offer(number, chunk)`, for a chunk that is complete; None: another process keeps it."""
Drop = Callable[[Sequence[int]], None]
"""`drop(numbers)`, for chunks that need not be kept any more."""


class ChunkPort(Protocol):
    """What an executor offers that sends pages to other engines, or pulls theirs (`Executor.extension`).

    Attributes:
        chunk_shapes: shape and dtype of a chunk's arrays, by name.
        processes_of_ranks: the processes that have devices of each DP rank; the first one keeps the rank's chunks.
    """

    chunk_shapes: dict[str, tuple[tuple[int, ...], Any]]
    processes_of_ranks: Sequence[Sequence[int]]

    def send_chunks(self, offer: Offer, drop: Drop = lambda numbers: None) -> None:
        """Have what `SendPages` makes offered, and `drop` called at `DropChunks`, from any thread and in the order of the commands."""

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Have `PullPages` pull by this, and what came of each chunk reported, from any thread."""


class ChunkGoneError(Exception):
    """A chunk that is to be pulled is not kept any more, or cannot be reached."""


class PrefillLink:
    """A prefill side, as decode sees it: in this process, or in another one. All methods may be called from any thread.

    Attributes:
        is_idle: whether there is no connection to it, and none is being made.
        receive: takes the side's messages, in its own thread; `connect` says who does.
    """

    is_idle: bool = False

    def __init__(self):
        self.receive: Callable[[ToDecode], None] = lambda message: None

    def connect(self, receive: Callable[[ToDecode], None]) -> None:
        """Have its messages handed to `receive` from now on."""
        self.receive = receive

    def send(self, message: ToPrefill) -> None:
        """Tell it something, without waiting. What it answers comes to the receiver that `connect` named."""
        raise NotImplementedError

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Return a chunk that was offered, on this device, complete; give up after the timeout. address: that the offer has named.

        Raises:
            ChunkGoneError: it is not kept any more, or its side cannot be reached.
        """
        raise NotImplementedError

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile what it will need, where its devices are this process's."""

    def close(self) -> None:
        """End the connection: nothing is asked or pulled any more."""
