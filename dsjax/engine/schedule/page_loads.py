"""`PageLoads`: loads pages from a KV connector (`PageSource`) into a DP rank's KV cache for waiting requests. `SourcedPages`: all ranks."""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dsjax.engine.contract.commands import Command, FetchPages, PlacePages, ReadPages, int32s
from dsjax.engine.schedule.landing_area import LandingArea
from dsjax.engine.schedule.page_source import CommandTurn, Lookup, PageSource, RankPages
from dsjax.engine.schedule.pages import PagePool, window_name
from dsjax.engine.schedule.request import Request

MOST_LOADED = 64
"""Maximum number of pages that a rank loads before one step."""


class Admittance(enum.Enum):
    """Action for a waiting request after the lookup of its missing pages."""

    START = "start"  # start, and compute the missing pages
    SKIP = "skip"  # wait; later requests may start
    REMOTE = "remote"  # wait for pages that another engine computes; later requests may start
    BLOCK = "block"  # wait; later requests wait too


class LoadUnderWay(NamedTuple):
    """Pages that are being loaded into the cache for one request."""

    request: Request | None  # the request that waits for the pages; None if it has ended
    pages: list[int]  # pages of the cache to load into; a window page may come last
    first: int  # index of the first page in the request
    names: list[bytes]  # empty if no request may find the pages
    tiers: list[str]  # source tiers of the pages, excluding the window page
    since: float  # time at which the load began


class PageLoads:
    """Page loads of one rank. One plan stages pages on the device, and the next plan places them. Only requests that need them wait.

    under_way: the loads that the last plan staged. landing: KV staging buffer for pages that have no slot in the source.
    """

    def __init__(self, pool: PagePool, source: PageSource, rank: int):
        self._pool, self._source, self._rank = pool, source, rank
        self.landing = LandingArea()
        self.under_way: list[LoadUnderWay] = []
        self._loaded: dict[Request, Counter[str]] = {}  # pages loaded for each waiting request, by tier
        self._places: list[int] = []  # where in the cache to place what the last plan staged
        self._staged: list[int] = []  # numbers of the pages that this plan stages, for `FetchPages`
        pool.on_evict = lambda page, name: source.evict(rank, page, name)

    def has(self, name: bytes) -> bool:
        """Whether the source can provide a page, now or after a wait."""
        return self._source.has(self._rank, name) or name in self.landing

    __contains__ = has

    def begin(self, now: float) -> None:
        """Begin a plan. Pages staged by the last plan can be found from now on, because they are placed before this plan's step."""
        loads, self.under_way = self.under_way, []
        for load in loads:
            if load.names:
                self._pool.seal_of(load.request, load.first, load.pages)
            if load.request is not None:
                load.request.is_loading = False
                load.request.held_pages += load.pages
                self._loaded.setdefault(load.request, Counter()).update(load.tiers)
                if self._source.slot_tier in load.tiers:
                    self.landing.waits.append((self._source.slot_tier, now - load.since))
            self._places += load.pages
        self._source.begin_rank(self._rank, now)

    def look_up(
        self, request: Request, names: list[bytes], cached: list[int], free_slots: int, now: float
    ) -> Admittance:
        """Decide whether a request starts or waits for missing pages. names: of all pages that it may read; `cached` holds the first ones.

        The request waits for loads that already run, then for pages that the source has, then for pages that another engine computes.
        With window pages, each lookup ends with one: for another engine, the window page of the last page; for the source, that of the last
        border up to which pages are available (`PagePool.usable`). Pages beyond that border would be useless.
        """
        all_names, found_pages = names, cached
        if self._pool.num_windows and names:
            all_names = [*names, window_name(names[-1])]
            found_pages = cached if len(cached) < len(names) else cached + self._pool.find(all_names[-1:])
        missing_names = all_names[len(found_pages) :]
        if missing_names and self._source.awaits(self._rank, request, missing_names[0]):
            self._hold(request, found_pages)
            return Admittance.SKIP
        available = found_pages
        if self._pool.num_windows and not (missing_names and missing_names[0] in self.landing):
            border = self._pool.usable(names, self._pool.count(names, elsewhere=self), self)
            wanted = [*names[:border], window_name(names[border - 1])] if border else []
            available = self._pool.find(wanted)
            missing_names = wanted[len(available) :]
        if missing_names and any(missing_names[0] in load.names for load in self.under_way):
            return Admittance.SKIP  # it is being loaded for another request; the next plan finds it
        num_missing = self._pool.pages_for(len(request.token_ids)) - len(cached)
        is_available, num_windows = bool(missing_names) and self.has(missing_names[0]), int(self._pool.num_windows > 0)
        if (
            is_available
            and self._pool.can_hold(available, num_missing, num_windows)
            and self._load(request, missing_names, available, now)
        ):
            return Admittance.SKIP
        if missing_names and self._can_load(missing_names[0]):
            return Admittance.START  # there is no room to load the page; compute it
        answer = self._source.lookup(self._rank, request, all_names, found_pages, free_slots, now)
        if answer is Lookup.WAIT:
            self._hold(request, found_pages)
            return Admittance.REMOTE
        return Admittance.BLOCK if answer is Lookup.FULL else Admittance.START

    def loaded(self, request: Request) -> Mapping[str, int]:
        """Return how many pages have been loaded for a waiting request, by tier. A page may count twice."""
        return self._loaded.get(request, {})

    def hits(self, request: Request) -> dict[str, int]:
        """Return a starting request's cached tokens by tier (including `device`), without tokens that another engine computed for it."""
        page_size = self._pool.page_size
        loaded, left = self.loaded(request), request.num_cached_tokens
        hits = {}
        for tier in self._source.tiers:
            hits[tier] = min(left, loaded.get(tier, 0) * page_size)
            left -= hits[tier]
        return {"device": left, **hits}

    def num_computed_elsewhere(self, request: Request) -> int:
        """Return how many of a request's pages another engine computed for it."""
        return self._source.num_computed(request, self.loaded(request))

    def landed(self, number: int, ok: bool, now: float) -> None:
        """Record that the page with this landing number has arrived (`ok`) or could not be loaded."""
        self.landing.landed(self._rank, number, ok)
        self._source.landed(self._rank, number, ok, now)

    def sealed(self, request: Request) -> None:
        """Tell the source that a request has started, or that more of its pages are full and computed."""
        self._source.sealed(self._rank, request)

    def forget(self, names: Sequence[bytes]) -> None:
        """Make the source forget pages."""
        self._source.forget(self._rank, names)
        self.landing.give_up_names(names)

    def cancel(self) -> None:
        """Make sure that no request finds the pages that are being loaded now."""
        self._source.cancel(self._rank)
        self.under_way = [load._replace(names=[]) for load in self.under_way]

    def clear(self) -> None:
        """Make the source forget and delete every page."""
        self._source.clear(self._rank)
        self.landing.clear()

    def invalidate(self) -> None:
        """Make the source forget pages whose commands may not have been executed."""
        self._source.invalidate(self._rank)
        self.landing.clear()

    def release(self, request: Request) -> None:
        """Release the pages and loads of a request that starts or has ended."""
        self._pool.release(request.held_pages)
        request.held_pages = []
        self._loaded.pop(request, None)
        self._source.release(self._rank, request)
        if request.is_loading:
            # The load still places data in these pages, but before their next owner writes them.
            request.is_loading = False
            for index, load in enumerate(self.under_way):
                if load.request is request:
                    self._pool.release(load.pages)
                    self.under_way[index] = load._replace(request=None, names=[])

    def preempted(self, request: Request) -> None:
        """Tell the source that a running request waits again."""
        self._source.preempted(request)

    def release_held(self, waiting: Iterable[Request], but: Request | None = None) -> bool:
        """Release the pages held for waiting requests except `but`, to avoid deadlock. Return whether any were held."""
        holders = [request for request in waiting if request.held_pages and request is not but]
        for request in holders:
            self._pool.release(request.held_pages)
            request.held_pages = []
        return bool(holders)

    def take(self) -> tuple[list[int], list[int]]:
        """Take two lists: the pages that receive what the last plan staged, in its order, and the numbers of pages that this one stages."""
        places, self._places = self._places, []
        staged, self._staged = self._staged, []
        return places, staged

    def _can_load(self, name: bytes) -> bool:
        return self._source.can_load(self._rank, name) or self.landing.can_load(name)

    def _load(self, request: Request, names: list[bytes], cached: list[int], now: float) -> bool:
        """Stage the longest prefix of `names` that can be loaded now, and prefetch the rest. Return False if there is nothing to wait for.

        With window pages, the last name is that of a window page. cached: the pages before `names`, held while the request waits.
        """
        ready = self._can_load(names[0])
        answer = self._source.prefetch(self._rank, request, names, ready, now)
        if not ready:
            if answer is Lookup.WAIT:
                self._wait(request, cached)
            return answer is not Lookup.ABSENT
        if len(self._staged) >= MOST_LOADED:
            return True  # this step loads no more pages; the next one will
        loads = []
        for name in names[: MOST_LOADED - len(self._staged)]:
            if self._source.can_load(self._rank, name):
                loads.append(self._source.load(self._rank, name))
            elif self.landing.can_load(name):
                loads.append(self.landing.load(self._rank, name))
            else:
                break
        self._wait(request, cached)
        self._staged += [load.number for load in loads]
        num_windows = int(self._pool.num_windows > 0 and len(loads) == len(names))
        pages = self._pool.allocate(len(loads) - num_windows) + self._pool.allocate(num_windows, windows=True)
        tiers = [load.tier for load in loads[: len(loads) - num_windows]]
        self.under_way.append(LoadUnderWay(request, pages, len(cached), names[: len(loads)], tiers, now))
        return True

    def _wait(self, request: Request, cached: list[int]) -> None:
        self._pool.hold(cached)
        request.held_pages += cached
        request.is_loading = True  # skipped until its pages are placed or the source wakes it

    def _hold(self, request: Request, cached: list[int]) -> None:
        """Hold the `cached` pages of a request that waits for more."""
        if not request.held_pages:
            self._pool.hold(cached)
            request.held_pages += cached


class SourcedPages:
    """The page loads of all ranks from one source, and the commands for them before each step."""

    def __init__(self, source: PageSource, pools: Sequence[PagePool]):
        self.source = source
        self.ranks = [PageLoads(pool, source, rank) for rank, pool in enumerate(pools)]
        self._num_staged = 0  # `FetchPages` so far
        source.bind([RankPages(pool, loads.landing) for pool, loads in zip(pools, self.ranks, strict=True)])
        for loads in self.ranks:
            loads.landing.first_number = source.slots

    def commands(self) -> list[Command]:
        """Return the commands to execute before the last planned step, in order."""
        taken = [loads.take() for loads in self.ranks]
        landings = [loads.landing.take() for loads in self.ranks]
        commands: list[tuple[CommandTurn, Command]] = []
        if any(places for places, _ in taken):
            commands.append((CommandTurn.PLACE, PlacePages([int32s(places) for places, _ in taken], self._num_staged)))
        if any(staged for _, staged in taken):
            self._num_staged += 1
            commands.append((CommandTurn.STAGE, FetchPages([int32s(staged) for _, staged in taken], self._num_staged)))
        if any(requests or drops for requests, drops in landings):
            numbers = [int32s(number for number, _ in requests) for requests, _ in landings]
            names = [b"".join(name for _, name in requests) for requests, _ in landings]
            read = ReadPages(numbers, names, [int32s(drops) for _, drops in landings])
            commands.append((CommandTurn.REQUEST, read))
        commands += self.source.commands()
        return [command for _, command in sorted(commands, key=lambda one: one[0])]

    def take_waits(self) -> list[tuple[str, float]]:
        """Take the (tier, seconds) of each wait for pages."""
        waits = [wait for loads in self.ranks for wait in loads.landing.waits]
        for loads in self.ranks:
            loads.landing.waits.clear()
        return waits
