"""`PrefillLinks`: engine plugin that lets prefill engines compute prompts; `LocalLink`: link to one in this process."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dsjax.engine.contract.executor import Executor, Progress
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.transfer.messages import (
    TRANSFER_SECONDS,
    Chunk,
    ChunkGoneError,
    ChunkPort,
    FlushPages,
    PrefillLink,
    PulledChunk,
    ReleaseChunk,
    Source,
    ToDecode,
    ToPrefill,
)
from dsjax.engine.transfer.page_network import RemoteLinks
from dsjax.engine.transfer.remote_prefill import RemotePrefills

TRANSFER_WAIT = 0.01
"""Longest time in seconds that the engine blocks when every request waits for prefill engines."""


class PrefillLinks(Attachment):
    """Links to prefill engines, used by the engine's thread. Their messages are queued until the next step begins.

    Args:
        links: the initial links.
        dialer: connects to further prefill engines by the address in a request; idle links that no request uses are closed.
        local_tokens, timeout: see `RemotePrefills`.

    Attributes:
        source: bookkeeping of the transfers. links: by number.
        wake: set when a message has arrived from a prefill engine or a pull has ended.
    """

    source: RemotePrefills
    statistics_name = "transfers"

    def __init__(
        self,
        links: Sequence[PrefillLink],
        dialer: RemoteLinks | None = None,
        *,
        local_tokens: int = 1,
        timeout: float = TRANSFER_SECONDS,
    ):
        self.source, self._dialer = RemotePrefills(len(links), local_tokens, timeout), dialer
        if dialer is not None:
            self.source.connect = self.number_of
        self._addresses: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[tuple[int, ToDecode]] = queue.SimpleQueue()
        self._pulled: queue.SimpleQueue[PulledChunk] = queue.SimpleQueue()
        self.links: dict[int, PrefillLink] = {}
        self._has_flushed = False
        self.wake = threading.Event()
        for number, link in enumerate(links):
            self._add(number, link)

    def number_of(self, address: str) -> int:
        """Return the number of the prefill engine at an address; connect to it if it is new."""
        if address not in self._addresses:
            link = self._dialer.link_to(address)
            if self._has_flushed:  # its cached pages may predate the flush
                link.send(FlushPages())
            self._addresses[address] = number = self.source.add_link()
            self._add(number, link)
        return self._addresses[address]

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Attach to an executor, which then pulls the chunks that are ready."""
        self.take_pulled()  # discard the results of the previous executor
        executor.extension(ChunkPort).pull_chunks(self.pull, self.report)

    def begin_step(self, now: float) -> None:
        """Process the messages of prefill engines and the results of pulls."""
        self.wake.clear()  # anything that arrives from now on ends the next wait at once
        while not self._inbox.empty():
            number, message = self._inbox.get()
            if number in self.links:
                self.source.receive(number, message, now)
        for rank, _, _, landing_numbers, ok in self.take_pulled():
            self.scheduler.landed(rank, landing_numbers, ok, now)
        for address, number in list(self._addresses.items()):
            if self.links[number].is_idle and self.source.forget_link(number, now):
                self.links.pop(number).close()
                del self._addresses[address]

    def wait(self) -> bool:
        """Wait briefly for prefill engines if a request waits for one. Return whether it did."""
        if self.source.num_under_way:
            self.wake.wait(TRANSFER_WAIT)
            return True
        return False

    def statistics(self) -> Any:
        """Return the transfer counters."""
        return self.source.transfer_counts

    def pull(self, source: Source, number: int, device: Any) -> Chunk:
        """Pull chunk `number` from its prefill engine to this device. The executor calls this from any thread."""
        link = self.links.get(source.link)
        if link is None:
            raise ChunkGoneError(f"the prefill engine of chunk {number} is gone")
        return link.pull(number, device, source.address)

    def report(self, chunk: PulledChunk) -> None:
        """Queue the result of a pull. The executor calls this from any thread."""
        self._pulled.put(chunk)
        self.wake.set()

    def take_pulled(self) -> list[PulledChunk]:
        """Return the results of pulls so far, and tell the prefill engines to release those chunks."""
        pulled = []
        while not self._pulled.empty():
            pulled.append(self._pulled.get())
            self._send(pulled[-1].link, ReleaseChunk(pulled[-1].number))
        return pulled

    def send(self) -> None:
        """Send the scheduler's messages to the prefill engines."""
        for number, message in self.source.take_messages():
            self._send(number, message)

    def flush(self) -> None:
        """Make all prefill engines drop their computed pages from the prefix cache."""
        self.send()
        self._has_flushed = True
        for link in self.links.values():
            link.send(FlushPages())

    def close(self, failed: bool) -> None:
        """Close all links."""
        for link in self.links.values():
            link.close()
        if self._dialer is not None:
            self._dialer.close()

    def _add(self, number: int, link: PrefillLink) -> None:
        self.links[number] = link
        link.receive = partial(self._receive, number)

    def _send(self, number: int, message: ToPrefill) -> None:
        link = self.links.get(number)
        if link is not None:
            link.send(message)

    def _receive(self, number: int, message: ToDecode) -> None:
        self._inbox.put((number, message))
        self.wake.set()


class LocalLink(PrefillLink):
    """Link to a `PrefillEngine` in this process. move: copies a chunk to another device."""

    def __init__(self, engine: Any, move: Callable[[Chunk, Any], Chunk] = lambda chunk, device: chunk):
        self.engine, self._move = engine, move

    def send(self, message: ToPrefill) -> None:
        """Post a message to the engine."""
        self.engine.post(message, self.receive)

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Copy a chunk to this device."""
        chunk = self.engine.buffers.take(number)
        if chunk is None:
            raise ChunkGoneError(f"chunk {number} is not kept any more")
        return self._move(chunk, device)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile the engine's programs."""
        self.engine.warm_up(progress)

    def close(self) -> None:
        """Shut the engine down."""
        self.engine.shutdown()
