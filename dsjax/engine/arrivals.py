"""`Arrivals`: requests of one rank that wait for pages to come from below, and what is kept for them meanwhile. Plain Python."""

from collections.abc import Iterable
from typing import NamedTuple

from dsjax.engine.page_tiers import PageMoves
from dsjax.engine.pages import PagePool
from dsjax.engine.request import Request

MOST_FETCHED = 64
"""Pages that a rank fetches before one step."""
PATIENCE = 2.0
"""Seconds that a request waits for pages that are read from the disk. Then it goes on without, and the disk is left alone for a while."""


class Arrival(NamedTuple):
    """Pages on their way, which of the request's the first one is, their names, the tier that each comes from, since when, and who waits.

    request: None where it has ended and given them back. names: none where they are to be found by nobody when they have come.
    """

    request: Request | None
    pages: list[int]
    first: int
    names: list[bytes]
    tiers: list[str]
    since: float


class Reading(NamedTuple):
    """A request that waits for pages that are read from the disk, the numbers of those that have not come, and since when it waits."""

    request: Request
    numbers: set[int]
    since: float


class Arrivals:
    """What one plan fetches from the tiers below a pool, the next one places.

    What only the disk has is read before that, which takes as long as it takes: the request waits, and others go on.

    Attributes:
        under_way: what the last plan fetched. reading: requests that wait for the disk.
        waits: (tier, seconds) that requests have waited for pages of it. Whoever reads it empties it.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        self.under_way: list[Arrival] = []
        self.reading: list[Reading] = []
        self.waits: list[tuple[str, float]] = []

    def enter(self, now: float) -> PageMoves | None:
        """Begin a plan: the pages that the last one fetched are placed before its step, and can be found. None without a tier."""
        below = self._pool.below
        if below is None:
            return None
        below.begin_step()
        late = [one for one in self.reading if now - one.since > PATIENCE]
        for request, numbers, since in late:
            request.is_arriving, request.ignores_disk = False, True
            self.waits.append(("disk", now - since))
            below.give_up(numbers)
            below.disk.late(now)
        for request, numbers, _ in self.reading:
            below.still_read(numbers)
            if not numbers:
                request.is_arriving = False
        self.reading = [one for one in self.reading if one.request.is_arriving]
        arrivals, self.under_way = self.under_way, []
        for request, pages, first, names, tiers, since in arrivals:
            if names:
                self._pool.seal_of(request, first, pages)
            if request is not None:
                request.is_arriving = False
                request.held_pages += pages
                request.num_host_pages += tiers.count("host")
                request.num_disk_pages += tiers.count("disk")
                if "host" in tiers:
                    self.waits.append(("host", now - since))
        return PageMoves(places=[page for arrival in arrivals for page in arrival.pages])

    def fetch(self, request: Request, names: list[bytes], found: list[int], moves: PageMoves, now: float) -> bool:
        """Have the pages fetched that are below, behind those `found`; False where there are none, or there is no room for the request.

        True also where the request has to wait for others, which fill the room for what is read. names: of all pages that it may read.
        """
        pool, below = self._pool, self._pool.below
        rest = names[len(found) :]
        missing = pool.pages_for(len(request.token_ids)) - len(found)
        if not rest or rest[0] not in below or not pool.can_hold(found, missing):
            return False
        awaited, full = (set(), False) if request.ignores_disk else below.read(rest, moves)
        here = below.find(rest[: MOST_FETCHED - len(moves.fetches)])
        if not here and not awaited:
            return full
        pool.hold(found)
        request.held_pages += found
        request.is_arriving = True
        if here:
            numbers, tiers = zip(*map(below.fetch, here), strict=True)
            moves.fetches += numbers
            self.under_way.append(Arrival(request, pool.allocate(len(here)), len(found), here, list(tiers), now))
        else:
            self.reading.append(Reading(request, awaited, now))
        return True

    def landed(self, number: int, ok: bool, now: float) -> None:
        """The executor has read a page from the disk, or could not."""
        self._pool.below.landed(number, ok)
        for request, numbers, since in self.reading:
            numbers.discard(number)
            if not numbers:
                request.is_arriving = False
                self.waits.append(("disk", now - since))
        self.reading = [one for one in self.reading if one.numbers]

    def forget(self) -> None:
        """Let what is under way be found by nobody when it has come."""
        self.under_way = [arrival._replace(names=[]) for arrival in self.under_way]
        for request, _, _ in self.reading:
            request.is_arriving = False
        self.reading = []

    def release(self, request: Request) -> None:
        """Keep nothing any more for a request that has begun, or is gone."""
        self._pool.release(request.held_pages)
        request.held_pages = []
        if request.is_arriving:
            # Whoever gets such a page next writes it after it was placed.
            request.is_arriving = False
            self.reading = [one for one in self.reading if one.request is not request]
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
