"""`PrefillLinks`: the part of an engine's core that has prompts computed by prefill engines; `LocalLink`: one of this process."""

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
"""Seconds that the engine waits for prefill engines where every request does, at most."""


class PrefillLinks(Attachment):
    """Belongs to the engine's thread. What prefill engines say waits until a step begins.

    Args:
        links: those that are there from the start.
        dialer: makes further ones, by the address that a request names; an idle one that no request names is dropped.
        local_tokens, timeout: see `RemotePrefills`.

    Attributes:
        source: the account of transfers. links: by their numbers.
        wake: set when a prefill engine has said something, or a chunk was pulled.
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
        """The number of the prefill engine at an address; a new one is added."""
        if address not in self._addresses:
            link = self._dialer.link_to(address)
            if self._has_flushed:  # what it has computed may be older
                link.send(FlushPages())
            self._addresses[address] = number = self.source.add_link()
            self._add(number, link)
        return self._addresses[address]

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Have this executor pull what is ready."""
        self.take_pulled()  # by the executor before
        executor.extension(ChunkPort).pull_chunks(self.pull, self.report)

    def begin_step(self, now: float) -> None:
        """Hand on what prefill engines have said, and what was pulled."""
        self.wake.clear()  # what comes from now on ends the next wait at once
        while not self._inbox.empty():
            number, message = self._inbox.get()
            if number in self.links:
                self.source.receive(number, message, now)
        for rank, _, _, numbers, ok in self.take_pulled():
            self.scheduler.landed(rank, numbers, ok, now)
        for address, number in list(self._addresses.items()):
            if self.links[number].is_idle and self.source.forget_link(number, now):
                self.links.pop(number).close()
                del self._addresses[address]

    def wait(self) -> bool:
        """Wait for prefill engines, if a request does."""
        if self.source.num_under_way:
            self.wake.wait(TRANSFER_WAIT)
            return True
        return False

    def statistics(self) -> Any:
        """Count what has come of transfers so far."""
        return self.source.transfer_counts

    def pull(self, source: Source, number: int, device: Any) -> Chunk:
        """Pull a chunk to this device, for the executor and from any thread."""
        link = self.links.get(source.link)
        if link is None:
            raise ChunkGoneError(f"the prefill engine of chunk {number} is gone")
        return link.pull(number, device, source.address)

    def report(self, chunk: PulledChunk) -> None:
        """Take in what has come of a chunk, for the executor and from any thread."""
        self._pulled.put(chunk)
        self.wake.set()

    def take_pulled(self) -> list[PulledChunk]:
        """Take the chunks that have come, or could not; their prefill engines are told that they may go."""
        pulled = []
        while not self._pulled.empty():
            pulled.append(self._pulled.get())
            self._send(pulled[-1].link, ReleaseChunk(pulled[-1].number))
        return pulled

    def send(self) -> None:
        """Send the prefill engines what the scheduler has for them."""
        for link, message in self.source.take_messages():
            self._send(link, message)

    def flush(self) -> None:
        """Have all prefill engines let no page be found that they have computed."""
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
    """The link to a `PrefillEngine` of this process. move: gives a chunk on another device."""

    def __init__(self, engine: Any, move: Callable[[Chunk, Any], Chunk] = lambda chunk, device: chunk):
        self.engine, self._move = engine, move

    def send(self, message: ToPrefill) -> None:
        """Post it a message."""
        self.engine.post(message, self.receive)

    def pull(self, number: int, device: Any, address: str = "") -> Chunk:
        """Copy a chunk to this device."""
        chunk = self.engine.buffers.take(number)
        if chunk is None:
            raise ChunkGoneError(f"chunk {number} is not kept any more")
        return self._move(chunk, device)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile its programs."""
        self.engine.warm_up(progress)

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()
