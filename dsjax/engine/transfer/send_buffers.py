"""`SendBuffers`: the chunks that a prefill engine keeps for others, each until it was pulled, nobody wants it, or its time is over."""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsjax.engine.schedule.request import Request
from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT, Chunk, ChunkGoneError, ChunkReady, ToDecode

_NUMBERS = 2**31


@dataclass(eq=False)
class PageSend:
    """A transfer that is computed for another engine.

    Attributes:
        receive: takes what its decode engine is told; None until that one has asked.
        first, end: pages [first, end) are wanted. next: the first of them that has not been handed to be sent.
        cached: tokens that its first admission found cached; None before.
    """

    transfer: str
    request: Request
    receive: Callable[[ToDecode], None] | None
    first: int
    next: int
    end: int
    cached: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every page is sent, or is about to be."""
        return self.next >= self.end

    def tell(self, message: ToDecode) -> None:
        """Send a message to the decode engine that has asked, if one has yet."""
        if self.receive is not None:
            self.receive(message)


class Keeper(NamedTuple):
    """Which process keeps the chunks of a rank. address: where others pull from it; empty in one process. elsewhere: not this one."""

    address: str = ""
    elsewhere: bool = False


@dataclass(eq=False)
class _Buffer:
    rank: int
    send: PageSend
    offer: ChunkReady
    until: float
    chunk: Chunk | None = None
    is_ready: bool = False


class SendBuffers:
    """Counts a rank's chunks, from the plan that has their pages gathered until the chunk goes.

    The engine's thread begins, cancels and expires; the executor's thread says what is ready; those who pull take and release from threads
    of their own.

    Args:
        timeout: seconds. offer: told of each chunk that can be pulled, and of its transfer.
        first_number: of the chunks. None: a random one, so that the numbers of a side that was started again are not those of before, and
            a process that was not offered a chunk has to guess 31 bits.
    """

    def __init__(
        self,
        timeout: float,
        offer: Callable[[PageSend, ChunkReady], None],
        first_number: int | None = None,
    ):
        self.timeout, self._offer = timeout, offer
        self._gone: list[int] = []
        self._buffers: dict[int, _Buffer] = {}
        self._numbers = itertools.count(secrets.randbelow(_NUMBERS) if first_number is None else first_number)
        self._lock = threading.Lock()
        self.pages_sent = self.expired = 0
        self.reset([])

    def reset(self, keepers: Sequence[Keeper]) -> None:
        """Keep no chunk any longer: another executor is to make them, on ranks with these keepers."""
        with self._lock:
            self._keepers, self._room = list(keepers), [MOST_KEPT // CHUNK_PAGES] * len(keepers)
            self._buffers.clear()
            self._gone.clear()

    @property
    def num_kept(self) -> int:
        """Chunks that have not gone."""
        return len(self._buffers)

    @property
    def num_pages_kept(self) -> int:
        """Pages of all ranks in chunks that have not gone."""
        with self._lock:
            return sum(buffer.offer.count for buffer in self._buffers.values())

    def room(self, rank: int) -> int:
        """Count the further chunks of a rank that may be made now. One with a single page takes as much memory as a full one."""
        return self._room[rank]

    def begin(self, rank: int, send: PageSend, first: int, count: int) -> int:
        """Have pages go into a new chunk, and return its number."""
        with self._lock:
            number = next(self._numbers) % _NUMBERS
            self._room[rank] -= 1
            address = self._keepers[rank].address
            names = b"".join(send.request.page_hashes[first : first + count])
            offer = ChunkReady(send.transfer, number, first, count, send.cached or 0, address, names)
            self._buffers[number] = _Buffer(rank, send, offer, time.monotonic() + self.timeout)
        return number

    def ready(self, number: int, chunk: Chunk | None) -> None:
        """Offer a chunk that is complete, and begin its time, unless nobody wants it any more. None: another process keeps it."""
        with self._lock:
            buffer = self._buffers.get(number)
            if buffer is None:
                return
            buffer.chunk, buffer.is_ready, buffer.until = chunk, True, time.monotonic() + self.timeout
            self.pages_sent += buffer.offer.count
        self._offer(buffer.send, buffer.offer)

    def take(self, number: int) -> Chunk:
        """Give a chunk that was offered. It is kept until it is released.

        Raises:
            ChunkGoneError: it is not kept any more.
        """
        with self._lock:
            buffer = self._buffers.get(number)
            if buffer is None or buffer.chunk is None:
                raise ChunkGoneError(f"chunk {number} is not kept any more")
            return buffer.chunk

    def open(self, number: int, take: Callable[[Chunk | None], object]) -> None:
        """Call `take` with a chunk that another process pulls; with None where it is not kept any more."""
        with self._lock:
            buffer = self._buffers.get(number)
        take(None if buffer is None else buffer.chunk)

    def transfer_of(self, number: int) -> PageSend | None:
        """Give the transfer that a chunk is of; None where it is not kept any more."""
        with self._lock:
            buffer = self._buffers.get(number)
            return None if buffer is None else buffer.send

    def release(self, number: int) -> None:
        """Keep a chunk no longer."""
        with self._lock:
            self._drop(number)

    def cancel(self, send: PageSend) -> None:
        """Keep no chunk of a transfer any longer."""
        with self._lock:
            for number in [number for number, buffer in self._buffers.items() if buffer.send is send]:
                self._drop(number)

    def expire(self) -> list[PageSend]:
        """List the transfers of which a chunk was not pulled in time. Whoever asks cancels them."""
        now = time.monotonic()
        with self._lock:
            late = [buffer for buffer in self._buffers.values() if buffer.until < now]
            self.expired += len(late)
        return list(dict.fromkeys(buffer.send for buffer in late))

    def offers(self, send: PageSend) -> list[ChunkReady]:
        """List what can be pulled of a transfer now."""
        with self._lock:
            return [buffer.offer for buffer in self._buffers.values() if buffer.send is send and buffer.is_ready]

    def take_gone(self) -> list[int]:
        """Take the chunks that other processes keep and need not keep any more; each is told of once."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def kept_for(self, send: PageSend) -> bool:
        """Say whether a chunk of a transfer is kept."""
        with self._lock:
            return any(buffer.send is send for buffer in self._buffers.values())

    def _drop(self, number: int) -> None:
        buffer = self._buffers.pop(number, None)
        if buffer is not None:
            self._room[buffer.rank] += 1
            if self._keepers[buffer.rank].elsewhere:
                self._gone.append(number)
