"""`SendBuffers`: chunks that a prefill engine keeps for decode engines until they are pulled, cancelled or expired."""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsjax.engine.contract.commands import WINDOW_NUMBERS
from dsjax.engine.schedule.pages import window_name
from dsjax.engine.schedule.request import Request
from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT, Chunk, ChunkReady, ToDecode

_NUM_NUMBERS = WINDOW_NUMBERS  # chunks of window pages have these numbers plus `WINDOW_NUMBERS`


@dataclass(eq=False)
class PageSend:
    """A transfer: the pages of one prompt, which this engine computes and sends to a decode engine."""

    transfer: str
    request: Request
    receive: Callable[[ToDecode], None] | None  # sends a message to the decode engine; None until one asks
    first: int  # first page requested
    next: int  # first page that has not been computed yet; those before are in chunks or wait for one
    end: int  # page after the last one requested
    # 1 in a model with window pages, else 0: the window page at `end` is sent after the others, as page number `end`
    windows: int = 0
    cached: int | None = None  # tokens found in the cache at its first admission; None before that

    @property
    def is_complete(self) -> bool:
        """Whether every page has been computed, and is in a chunk or waits for one."""
        return self.next >= self.end + self.windows

    def notify(self, message: ToDecode) -> None:
        """Send a message to the decode engine, if one has asked."""
        if self.receive is not None:
            self.receive(message)


class ChunkOwner(NamedTuple):
    """The process that keeps a rank's chunks: its address (empty if there is only one process), and whether it is not this process."""

    address: str = ""
    is_remote: bool = False


@dataclass(eq=False)
class SendBuffer:
    """State of one chunk of a transfer."""

    rank: int
    send: PageSend
    offer: ChunkReady  # message that offers the chunk to the decode engine
    deadline: float  # when the chunk expires
    chunk: Chunk | None = None  # arrays of its pages; None before they are gathered, or if another process keeps them
    is_ready: bool = False  # whether it has been offered


class SendBuffers:
    """Tracks chunks from the plan that gathers their pages until they are dropped, and limits the number of chunks of each rank.

    The engine's thread begins chunks and drops them, the executor's thread calls `ready`, and other threads take them.

    Args:
        timeout: seconds for which a chunk is kept. offer: called with each chunk that can be pulled, and its transfer.
    """

    def __init__(self, timeout: float, offer: Callable[[PageSend, ChunkReady], None]):
        self.timeout, self._offer = timeout, offer
        self._dropped_elsewhere: list[int] = []  # chunk numbers for `take_dropped`
        self._buffers: dict[int, SendBuffer] = {}
        # Random, so that numbers change after a restart and cannot be guessed.
        self._numbers = itertools.count(secrets.randbelow(_NUM_NUMBERS))
        self._lock = threading.Lock()
        self.pages_sent = self.expired = 0
        self.reset([])

    def reset(self, owners: Sequence[ChunkOwner]) -> None:
        """Forget all chunks and start with a new executor. owners: of the executor's ranks."""
        with self._lock:
            self._owners, self._room = list(owners), [MOST_KEPT // CHUNK_PAGES] * len(owners)  # chunks that fit
            self._buffers.clear()
            self._dropped_elsewhere.clear()

    @property
    def num_kept(self) -> int:
        """Number of chunks that are kept."""
        return len(self._buffers)

    @property
    def num_pages_kept(self) -> int:
        """Number of pages in the chunks of all ranks."""
        with self._lock:
            return sum(buffer.offer.count for buffer in self._buffers.values())

    def room(self, rank: int) -> int:
        """Return how many more chunks of a rank can be started. A chunk takes the same memory whether it is full or not."""
        return self._room[rank]

    def begin(self, rank: int, send: PageSend, first: int, count: int) -> int:
        """Begin a chunk for `count` pages from `first` on (page `send.end` is the window page), and return its number."""
        with self._lock:
            number = next(self._numbers) % _NUM_NUMBERS
            self._room[rank] -= 1
            address, hashes = self._owners[rank].address, send.request.page_hashes
            names = b"".join(hashes[first : first + count])
            if first == send.end:  # the window page
                number, names = number + WINDOW_NUMBERS, window_name(hashes[first - 1])
            offer = ChunkReady(send.transfer, number, first, count, send.cached or 0, address, names)
            self._buffers[number] = SendBuffer(rank, send, offer, time.monotonic() + self.timeout)
        return number

    def ready(self, number: int, chunk: Chunk | None) -> None:
        """Offer a complete chunk and begin its timeout, unless it was dropped. chunk: None if another process keeps it."""
        with self._lock:
            buffer = self._buffers.get(number)
            if buffer is None:
                return
            buffer.chunk, buffer.is_ready, buffer.deadline = chunk, True, time.monotonic() + self.timeout
            self.pages_sent += buffer.offer.count
        self._offer(buffer.send, buffer.offer)

    def take(self, number: int) -> Chunk | None:
        """Return a chunk and keep it until it is released; None if this process does not have it (any more, or yet)."""
        buffer = self._buffers.get(number)
        return None if buffer is None else buffer.chunk

    def transfer_of(self, number: int) -> PageSend | None:
        """Return the transfer of a chunk; None if the chunk is not kept."""
        buffer = self._buffers.get(number)
        return None if buffer is None else buffer.send

    def buffers_of(self, send: PageSend) -> dict[int, SendBuffer]:
        """Return the chunks of a transfer, by their numbers."""
        with self._lock:
            return {number: buffer for number, buffer in self._buffers.items() if buffer.send is send}

    def release(self, numbers: Iterable[int]) -> None:
        """Drop chunks, which makes room for others."""
        with self._lock:
            for number in numbers:
                buffer = self._buffers.pop(number, None)
                if buffer is not None:
                    self._room[buffer.rank] += 1
                    if self._owners[buffer.rank].is_remote:
                        self._dropped_elsewhere.append(number)

    def expire(self) -> list[PageSend]:
        """Return the transfers with a chunk that was not pulled in time, for the caller to cancel."""
        now = time.monotonic()
        with self._lock:
            late = [buffer for buffer in self._buffers.values() if buffer.deadline < now]
            self.expired += len(late)
        return list(dict.fromkeys(buffer.send for buffer in late))

    def take_dropped(self) -> list[int]:
        """Return the numbers of dropped chunks that other processes keep, each number once."""
        with self._lock:
            dropped, self._dropped_elsewhere = self._dropped_elsewhere, []
            return dropped
