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
        transfer: by which both sides name this.
        tokens: int32, from the prompt's first one to one behind the last page wanted. first, end: pages [first, end) are wanted, and in a
            model with window pages the one at `end`, which is sent as page number `end`.
        priority: of the request; it orders prefill's queue too.
        page: name of the last page wanted (`extend_hashes`), from other engines: pages of another name are never sent.
        dp_rank: that a router outside has chosen; None: prefill chooses.
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
    """The rest of a transfer and its chunks are not wanted. page: name of its last page, for a sender that did not ask for it."""

    transfer: str
    page: bytes = b""


class ReleaseChunk(msgspec.Struct, frozen=True, array_like=True, tag="release_chunk"):
    """A chunk is not needed any more: it was pulled, or is not wanted."""

    number: int


class FlushPages(msgspec.Struct, frozen=True, array_like=True, tag="flush_pages"):
    """Let no page be found that was computed before (`/flush_cache`)."""


class ChunkReady(msgspec.Struct, frozen=True, array_like=True, tag="chunk_ready"):
    """A chunk can be pulled, as long as its lease runs.

    Attributes:
        first, count: pages of the transfer, in order. cached: tokens of the prompt that prefill had cached.
        address: `HOST:PORT` of the process that keeps the chunk; empty in one process.
        names: of its pages, 32 bytes each. Decode takes no page of another name than it asked for.
    """

    transfer: str
    number: int
    first: int
    count: int
    cached: int = 0
    address: str = ""
    names: bytes = b""


class TransfersUnderWay(msgspec.Struct, frozen=True, array_like=True, tag="transfers_under_way"):
    """These transfers are queued or being computed, however long that takes."""

    transfers: list[str]


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag="transfer_failed"):
    """A transfer ends without the rest of its pages. transfer: empty: the prefill side has ended, and with it all."""

    transfer: str
    reason: str


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """A decode engine's first message, which prefill accepts or refuses. space: what pages' values depend on, and the transport."""

    space: dict[str, Any]


class PublishedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk can be pulled now, once: the answer to its number. ticket: of `Transport.publish`. transport: its address."""

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
    """Where a chunk is: the number of its prefill side, and `ChunkReady.address`."""

    link: int
    address: str = ""


class PulledChunk(NamedTuple):
    """What has come of a chunk that a decode rank was to pull.

    link: number of the prefill side. pages: numbers under which its pages land. ok: whether it has come, on all devices of the rank.
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
    """Extension of an executor that sends pages to other engines, or pulls theirs.

    Attributes:
        chunk_shapes: shape and dtype of a chunk's arrays, by name. window_shapes: of chunks of window pages, whose numbers are
            `WINDOW_NUMBERS` and more.
        processes_of_ranks: processes that have devices of each DP rank; the first one keeps the rank's chunks.
    """

    chunk_shapes: dict[str, tuple[tuple[int, ...], Any]]
    window_shapes: dict[str, tuple[tuple[int, ...], Any]]
    processes_of_ranks: Sequence[Sequence[int]]

    def send_chunks(self, offer: Offer, drop: Drop = lambda numbers: None) -> None:
        """Have what `SendPages` makes offered, and `drop` called at `DropChunks`; from any thread, in the commands' order."""

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Have `PullPages` pull by this, and each chunk reported, from any thread."""


class ChunkGoneError(Exception):
    """A chunk is not kept any more, or cannot be reached."""


class PrefillLink:
    """A prefill side, as decode sees it, in this process or another one. Any thread may use it.

    is_idle: there is no connection to it, and none is being made. receive: takes the side's messages, in a thread of the link.
    """

    is_idle: bool = False
    receive: Callable[[ToDecode], None] = staticmethod(lambda message: None)

    def send(self, message: ToPrefill) -> None:
        """Send a message, without waiting. Answers go to `receive`."""
        raise NotImplementedError

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Return an offered chunk, complete, on this device; a `ChunkGoneError` where it is gone or late. address: of the offer."""
        raise NotImplementedError

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile its programs, where its devices are this process's."""

    def close(self) -> None:
        """End the connection."""
