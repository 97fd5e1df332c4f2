"""`Arrivals`: requests of one rank that wait for pages to come from host memory, and what is kept for them meanwhile. Plain Python."""

from collections.abc import Iterable
from typing import NamedTuple

from dsjax.engine.page_tiers import PageMoves
from dsjax.engine.pages import PagePool
from dsjax.engine.request import Request

MOST_FETCHED = 64
"""Pages that a rank fetches before one step."""


class Arrival(NamedTuple):
    """Pages on their way, their names, and who waits for them: nobody where it has ended and given them back."""

    request: Request | None
    pages: list[int]
    names: list[bytes]


class Arrivals:
    """What one plan fetches from the tier below a pool, the next one places.

    Attributes:
        under_way: what the last plan fetched.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        self.under_way: list[Arrival] = []

    def enter(self) -> PageMoves | None:
        """Begin a plan: the pages that the last one fetched are placed before its step, and can be found. None without a tier."""
        if self._pool.below is None:
            return None
        self._pool.below.begin_step()
        arrivals, self.under_way = self.under_way, []
        for request, pages, names in arrivals:
            for page, name in zip(pages, names, strict=False):
                self._pool.seal(page, name)
            if request is not None:
                request.is_arriving = False
                request.held_pages += pages
        return PageMoves(places=[page for arrival in arrivals for page in arrival.pages])

    def fetch(self, request: Request, names: list[bytes], found: list[int], moves: PageMoves) -> bool:
        """Have the pages fetched that the tier has behind those `found`; False where it has none, or there is no room for the request.

        names: of all pages that the request may read.
        """
        names = self._pool.below.find(names[len(found) : len(found) + MOST_FETCHED - len(moves.fetches)])
        missing = self._pool.pages_for(len(request.token_ids)) - len(found)
        if not names or not self._pool.can_hold(found, missing):
            return False
        self._pool.hold(found)
        request.held_pages += found
        request.is_arriving = True
        moves.fetches += map(self._pool.below.fetch, names)
        self.under_way.append(Arrival(request, self._pool.allocate(len(names)), names))
        return True

    def forget(self) -> None:
        """Let what is under way be found by nobody when it has come."""
        self.under_way = [arrival._replace(names=[]) for arrival in self.under_way]

    def release(self, request: Request) -> None:
        """Keep nothing any more for a request that has begun, or is gone."""
        self._pool.release(request.held_pages)
        request.held_pages = []
        if request.is_arriving:
            # Whoever gets such a page next writes it after it was placed.
            request.is_arriving = False
            for index, arrival in enumerate(self.under_way):
                if arrival.request is request:
                    self._pool.release(arrival.pages)
                    self.under_way[index] = arrival._replace(request=None, names=[])

    def release_kept(self, waiting: Iterable[Request], but: Request | None = None) -> bool:
        """Let go of the cached pages that are kept for waiting requests; False where there are none.

        Without it, requests that each keep some could wait for one another.
        """
        if self._pool.below is None:
            return False
        found = [request for request in waiting if request.held_pages and request is not but]
        for request in found:
            self._pool.release(request.held_pages)
            request.held_pages = []
        return bool(found)
