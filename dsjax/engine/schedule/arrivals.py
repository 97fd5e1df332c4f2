"""`Arrivals`: requests of one rank that wait for pages to come from below, and what is kept for them meanwhile. Plain Python."""

from collections.abc import Iterable
from typing import NamedTuple

from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import Request
from dsjax.engine.tiers.page_tiers import PATIENCE, PageMoves
from dsjax.engine.transfer.incoming import Incoming

MOST_FETCHED = 64
"""Pages that a rank fetches before one step."""


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

    What only the disk has is read before that, and what a prefill side computes is pulled, which takes as long as it takes: the request
    waits, and others go on.

    Args:
        incoming: what was asked of prefill sides, for all ranks; None: there are none. rank: this one's number.

    Attributes:
        under_way: what the last plan fetched. reading: requests that wait for the disk.
        waits: (tier, seconds) that requests have waited for pages of it. Whoever reads it empties it.
    """

    def __init__(self, pool: PagePool, incoming: Incoming | None = None, rank: int = 0):
        self._pool, self._incoming, self._rank = pool, incoming, rank
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
                request.num_prefill_pages += tiers.count("prefill")
                if "host" in tiers:
                    self.waits.append(("host", now - since))
        moves = PageMoves(places=[page for arrival in arrivals for page in arrival.pages])
        if self._incoming is not None:
            self._incoming.pull(self._rank, moves, now)
        return moves

    def fetch(self, request: Request, names: list[bytes], found: list[int], moves: PageMoves, now: float) -> bool:
        """Have the pages fetched that are below, behind those `found`; False where there are none, or there is no room for the request.

        True also where the request has to wait for others, which fill the room for what is read. names: of all pages that it may read.
        """
        pool, below = self._pool, self._pool.below
        rest = names[len(found) :]
        missing = pool.pages_for(len(request.token_ids)) - len(found)
        if rest and self._incoming is not None and self._incoming.awaits(self._rank, request, rest[0]):
            self._keep(request, found)
            return True
        if rest and any(rest[0] in arrival.names for arrival in self.under_way):
            return True  # somebody else has it fetched; the next plan finds it
        if not rest or rest[0] not in below or not pool.can_hold(found, missing):
            return False
        awaited, full = (set(), False) if request.ignores_disk else below.read(rest, moves, now)
        if len(moves.fetches) >= MOST_FETCHED and below.find(rest[:1]):
            return True  # others fill this step; it is fetched with the next one
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
        """The executor has read a page from the disk or pulled one, or could not."""
        self._pool.below.landed(number, ok)
        if self._incoming is not None:
            self._incoming.landed(self._rank, number, ok, now)
        for request, numbers, since in self.reading:
            numbers.discard(number)
            if not numbers:
                request.is_arriving = False
                self.waits.append(("disk", now - since))
        self.reading = [one for one in self.reading if one.numbers]

    def ask(self, request: Request, names: list[bytes], found: list[int], free_slots: int, now: float) -> bool | None:
        """Have a prefill side compute what nobody here has. None: it shall not, and the request may begin; False: there is no room for
        the request beside those that wait already.
        """
        pool, incoming = self._pool, self._incoming
        if incoming is None or not incoming.may_ask(request, len(found), len(names), now):
            return None
        if pool.below.find(names[len(found) : len(found) + 1]):
            return None  # there was no room to fetch it
        requests, pages = incoming.reserved(self._rank)
        missing = pool.pages_for(len(request.token_ids)) - len(found)
        if requests >= free_slots or not pool.can_hold(found, missing + pages):
            return False if requests else None  # without others nothing comes back that could be waited for here
        incoming.ask(self._rank, request, len(found), names, now)
        self._keep(request, found)
        return True

    def num_computed_elsewhere(self, request: Request) -> int:
        """Of the pages that a request has, those that were computed for it by a prefill side."""
        return request.num_prefill_pages - (self._incoming.num_cached_elsewhere(request) if self._incoming else 0)

    def forget(self) -> None:
        """Let what is under way be found by nobody when it has come."""
        if self._incoming is not None:
            self._incoming.forget(self._rank)
        self.under_way = [arrival._replace(names=[]) for arrival in self.under_way]
        for request, _, _ in self.reading:
            request.is_arriving = False
        self.reading = []

    def release(self, request: Request) -> None:
        """Keep nothing any more for a request that has begun, or is gone."""
        self._pool.release(request.held_pages)
        request.held_pages = []
        if self._incoming is not None:
            self._incoming.leave(request)
        if request.is_arriving:
            # Whoever gets such a page next writes it after it was placed.
            request.is_arriving = False
            self.reading = [one for one in self.reading if one.request is not request]
            for index, arrival in enumerate(self.under_way):
                if arrival.request is request:
                    self._pool.release(arrival.pages)
                    self.under_way[index] = arrival._replace(request=None, names=[])

    def _keep(self, request: Request, found: list[int]) -> None:
        """Keep what was found for a request that waits for more."""
        if not request.held_pages:
            self._pool.hold(found)
            request.held_pages += found

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
