"""`Departures`: sealed pages of one rank that another engine wants, and that wait to be sent. Plain Python."""

from collections import deque

from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import Request
from dsjax.engine.tiers.page_tiers import PageMoves
from dsjax.engine.transfer.leases import Leases, Sending
from dsjax.engine.transfer.page_transfer import PARCEL_PAGES


class Departures:
    """Holds pages from when they are sealed until the plan that has them copied into a parcel.

    Attributes:
        waiting: (what they are computed for, the first one's number in the transfer, pages), in the order of their sealing.
    """

    def __init__(self, pool: PagePool, leases: Leases | None, rank: int):
        self._pool, self._leases, self._rank = pool, leases, rank
        self.waiting: deque[tuple[Sending, int, list[int]]] = deque()

    @property
    def due(self) -> bool:
        """Whether pages wait, and there is room for them in parcels."""
        return bool(self.waiting) and self._leases.room(self._rank) > 0

    def has(self, sending: Sending) -> bool:
        """Whether pages of a transfer wait."""
        return any(own is sending for own, _, _ in self.waiting)

    def keep(self, request: Request) -> None:
        """Hold the sealed pages of a request that another engine wants and that were not handed over yet."""
        sending = request.sending
        if sending is None:
            return
        if sending.cached is None:
            sending.cached = request.num_computed_tokens
        end = min(request.num_sealed_pages, sending.end)
        if sending.next < end:
            pages = request.pages[sending.next : end]
            self._pool.hold(pages)
            self.waiting.append((sending, sending.next, pages))
            sending.next = end

    def send(self, moves: PageMoves) -> None:
        """Have pages put into parcels, as far as there is room. They are copied before anything else of this plan happens to them."""
        while self.waiting and (room := self._leases.room(self._rank)) > 0:
            sending, first, pages = self.waiting.popleft()
            most = min(PARCEL_PAGES, room)
            some, rest = pages[:most], pages[most:]
            if rest:
                self.waiting.appendleft((sending, first + len(some), rest))
            moves.sends.append(self._leases.begin(self._rank, sending, first, some))
            self._pool.release(some)

    def forget(self, sending: Sending) -> None:
        """Nobody wants pages of a transfer any more that have not been sent."""
        for own, _, pages in self.waiting:
            if own is sending:
                self._pool.release(pages)
        self.waiting = deque(entry for entry in self.waiting if entry[0] is not sending)
