"""`PageSends`: the page source of an engine that computes prompts for others."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from dsjax.engine.contract.commands import Command, SendPages, int32s
from dsjax.engine.schedule.page_source import CommandTurn, PageSource, RankPages
from dsjax.engine.schedule.request import Request
from dsjax.engine.transfer.messages import CHUNK_PAGES
from dsjax.engine.transfer.send_buffers import PageSend, SendBuffers


class PageSends(PageSource):
    """Holds pages from when they are sealed until the plan that copies them into a chunk.

    waiting: of each rank (the transfer, number of its first page, pages), in the order of their sealing.
    """

    def __init__(self, buffers: SendBuffers):
        self._buffers = buffers
        self._sends: dict[Request, PageSend] = {}
        self.waiting: list[deque[tuple[PageSend, int, list[int]]]] = []
        self._sent: list[list[tuple[int, int]]] = []  # (chunk, page)

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Begin with these ranks. Transfers stay until they are ended."""
        self.ranks = ranks
        self.waiting = [deque() for _ in ranks]
        self._sent = [[] for _ in ranks]

    def begin(self, send: PageSend) -> None:
        """Send the pages of a request that is about to come."""
        self._sends[send.request] = send

    def ended(self, request: Request) -> None:
        """Seal nothing more for a request. What waits is sent."""
        self._sends.pop(request, None)

    def has_work(self) -> bool:
        """Whether pages wait, and there is room for a chunk of them."""
        return any(waiting and self._buffers.room(rank) > 0 for rank, waiting in enumerate(self.waiting))

    def transfers_waiting(self) -> set[str]:
        """Names of the transfers with pages that wait."""
        return {send.transfer for waiting in self.waiting for send, _, _ in waiting}

    def sealed(self, rank: int, request: Request) -> None:
        """Hold newly sealed pages of a request that another engine wants."""
        send = self._sends.get(request)
        if send is None:
            return
        if send.cached is None:
            send.cached = request.num_computed_tokens
        end = min(request.num_sealed_pages, send.end)
        if send.next < end:
            pages = request.pages[send.next : end]
            self.ranks[rank].pool.hold(pages)
            waiting = self.waiting[rank]
            if waiting and waiting[-1][0] is send:  # what has found no room goes into one chunk with what follows it
                waiting[-1][2].extend(pages)
            else:
                waiting.append((send, send.next, pages))
            send.next = end

    def begin_rank(self, rank: int, now: float) -> None:
        """Put pages into chunks, as far as there is room. They are copied before anything else of this plan."""
        waiting, pool = self.waiting[rank], self.ranks[rank].pool
        while waiting and self._buffers.room(rank) > 0:
            send, first, pages = waiting.popleft()
            some, rest = pages[:CHUNK_PAGES], pages[CHUNK_PAGES:]
            if rest:
                waiting.appendleft((send, first + len(some), rest))
            number = self._buffers.begin(rank, send, first, len(some))
            self._sent[rank] += [(number, page) for page in some]
            pool.release(some)

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Copy pages into chunks."""
        sent, self._sent = self._sent, [[] for _ in self.ranks]
        if any(sent):
            yield CommandTurn.SEND, SendPages([int32s(itertools.chain.from_iterable(pairs)) for pairs in sent])

    def drop(self, send: PageSend) -> None:
        """Send nothing more of a transfer."""
        for rank, waiting in enumerate(self.waiting):
            for waiting_send, _, pages in waiting:
                if waiting_send is send:
                    self.ranks[rank].pool.release(pages)
            self.waiting[rank] = deque(entry for entry in waiting if entry[0] is not send)
