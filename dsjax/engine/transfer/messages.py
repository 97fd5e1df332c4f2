"""Messages between prefill and decode engines, as plain values; `PrefillLink`, the interface through which decode uses a prefill engine.

docs/disaggregation.md has the design. No JAX: executors exchange arrays separately from these messages.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dsjax.engine.contract.executor import Progress

TRANSFER_SECONDS = 30
"""Default of `--transfer-timeout`: seconds without news after which a requested or offered transfer is given up."""
VERSION = 7
"""Version of these messages. Increment it whenever an older engine could misunderstand a newer one."""
MOST_KEPT = 256
"""Pages that a prefill rank buffers in chunks not pulled yet. Further pages stay in its cache until there is room."""
CHUNK_PAGES = 16
"""Maximum number of pages per chunk, all of one transfer; a program moves as many at once (`MOVED_PAGES`)."""


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True, tag="prefill_request"):
    """Compute pages and send them."""

    transfer: str  # ID of this transfer on both sides
    tokens: bytes  # int32, from the start of the prompt to one token after the last page requested
    first: int  # first page requested
    # page after the last one requested; in a model with window pages, `end`'s window page is sent too, as page number `end`
    end: int
    salt: str | None = None
    priority: int = 0  # of the request; prefill orders its queue by it
    # name of the last page requested (`extend_hashes`), if another engine asks: pages with other names are never sent
    page: bytes = b""
    dp_rank: int | None = None  # chosen by an external router; None: prefill chooses


class CancelTransfer(msgspec.Struct, frozen=True, array_like=True, tag="cancel_transfer"):
    """Cancel the rest of a transfer and its chunks."""

    transfer: str
    page: bytes = b""  # name of its last page, if the sender did not request the transfer


class ReleaseChunk(msgspec.Struct, frozen=True, array_like=True, tag="release_chunk"):
    """Release a chunk: decode has pulled it or does not need it."""

    number: int


class FlushPages(msgspec.Struct, frozen=True, array_like=True, tag="flush_pages"):
    """Remove all pages computed so far from the prefix cache (`/flush_cache`)."""


class ChunkReady(msgspec.Struct, frozen=True, array_like=True, tag="chunk_ready"):
    """A chunk can be pulled until its lease expires."""

    transfer: str
    number: int
    first: int  # index in the transfer of the chunk's first page
    count: int  # number of consecutive pages
    cached: int = 0  # tokens of the prompt that prefill had cached
    address: str = ""  # `HOST:PORT` of the process that owns the chunk; empty within one process
    names: bytes = b""  # of its pages, 32 bytes each. Decode rejects pages with names other than it requested


class TransfersUnderWay(msgspec.Struct, frozen=True, array_like=True, tag="transfers_under_way"):
    """These transfers are queued or being computed, however long that takes."""

    transfers: list[str]


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag="transfer_failed"):
    """A transfer ends without the rest of its pages."""

    transfer: str  # empty if the prefill engine, and so every transfer, has ended
    reason: str


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """First message of a decode engine, which prefill accepts or refuses."""

    space: dict[str, Any]  # compatibility fingerprint and transport


class PublishedChunk(msgspec.Struct, frozen=True, array_like=True):
    """Reply to the pull with this number: the chunk can be pulled once."""

    pull: int
    transport: str  # address of the transport
    ticket: bytes  # from `Transport.publish`


class PullDone(msgspec.Struct, frozen=True, array_like=True):
    """The pull with this number has ended."""

    pull: int
    ok: bool = True  # whether the chunk arrived


ToPrefill = PrefillRequest | CancelTransfer | ReleaseChunk | FlushPages
ToDecode = ChunkReady | TransfersUnderWay | TransferFailed
Chunk = dict[str, Any]
"""Arrays `[1, CHUNK_PAGES, layers, page_size, …]` by cache array, on one device. Slots beyond its pages are undefined."""


class Source(NamedTuple):
    """Location of a chunk."""

    link: int  # number of its prefill engine
    address: str = ""  # `ChunkReady.address`


class PulledChunk(NamedTuple):
    """Result of a decode rank's pull of a chunk."""

    rank: int
    link: int  # number of the prefill engine
    number: int
    pages: list[int]  # landing numbers of its pages
    ok: bool  # whether it arrived on all devices of the rank


Pull = Callable[[Source, int, Any], Chunk]
"""`pull(source, number, device)`: returns a chunk, complete, on this device. Raises `ChunkGoneError` or any other exception."""


Offer = Callable[[int, Chunk | None], None]
"""`offer(number, chunk)`: called with a complete chunk, or None if another process owns it."""
Drop = Callable[[Sequence[int]], None]
"""`drop(numbers)`: called with the numbers of chunks to free."""


class ChunkPort(Protocol):
    """Executor extension that sends pages to other engines or pulls pages from them.

    Attributes:
        chunk_shapes: shape and dtype of a chunk's arrays, by name. window_shapes: the same for chunks of window pages, whose numbers
            start at `WINDOW_NUMBERS`.
        processes_of_ranks: processes with devices of each DP rank; the first one owns the rank's chunks.
    """

    chunk_shapes: dict[str, tuple[tuple[int, ...], Any]]
    window_shapes: dict[str, tuple[tuple[int, ...], Any]]
    processes_of_ranks: Sequence[Sequence[int]]

    def send_chunks(self, offer: Offer, drop: Drop = lambda numbers: None) -> None:
        """Call `offer` with each chunk of `SendPages` and `drop` at `DropChunks`, from any thread, in the order of the commands."""

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Use `pull` for `PullPages`, and report each chunk; both from any thread."""


class ChunkGoneError(Exception):
    """A chunk was freed or cannot be reached."""


class PrefillLink:
    """Decode's link to a prefill engine in this process or another one. Thread-safe.

    is_idle: neither connected nor connecting. receive: handles the engine's messages, in a thread of the link.
    """

    is_idle: bool = False
    receive: Callable[[ToDecode], None] = staticmethod(lambda message: None)

    def send(self, message: ToPrefill) -> None:
        """Send a message without blocking. Replies go to `receive`."""
        raise NotImplementedError

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Return an offered chunk, complete, on this device; raise `ChunkGoneError` if it is gone or late. address: from the offer."""
        raise NotImplementedError

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile the prefill engine's programs if it runs in this process."""

    def close(self) -> None:
        """Close the connection."""
