"""`OffloadTiers`: KV connector that offloads pages to the host memory of each DP rank and to one disk. docs/cache-tiers.md"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dsjax.engine.contract.commands import WINDOW_NUMBERS, Command, DropPages, StorePages, int32s
from dsjax.engine.contract.executor import Executor
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_source import CommandTurn, Lookup, PageLoad, PageSource, RankPages
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.tiers.disk_tier import DiskTier
from dsjax.engine.tiers.page_tiers import NOWHERE, HostTier, PageReporter, PageReports

PATIENCE = 2.0
"""Timeout in seconds for reading a request's pages from the disk. The request then runs without them, and disk reads pause for a while."""
DISK_WAIT = 0.002
"""Seconds that the engine blocks on the disk per poll when every request waits for it. It checks for new requests between polls."""
CLOSE_SECONDS = 3.0
"""Longest time in seconds that a closing engine spends writing pages that only its devices hold to the disk."""


class StoredPage(NamedTuple):
    """Evicted page."""

    page: int
    slot: int  # of host memory; −1: not copied there
    number: int  # of the disk write; −1: not written
    name: bytes


class Reading(NamedTuple):
    """Request that waits for disk reads."""

    request: Request
    numbers: set[int]  # of the reads still outstanding
    since: float  # time at which the wait began


class OffloadTiers(PageSource):
    """Host tier and disk tier, both optional. Lookups try host memory first. A page read from the disk is staged before its load.

    Models with window pages have separate host slots for them. On the disk both kinds share the room.

    config: sizes of the tiers, applied at the next `bind`. host, windows: one tier per rank, or empty. disk: None without a disk tier.
    """

    slot_tier = "host"
    tiers = ("disk", "host")

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.host: list[HostTier] = []
        self.windows: list[HostTier] = []
        self.disk: DiskTier | None = None

    @property
    def slots(self) -> int:
        """Host slots per rank, for the page kind that has more of them."""
        return max(self.config.host_pages_per_rank, self.config.host_windows_per_rank)

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Start with empty host memory and a disk whose pages are not listed yet."""
        self.ranks = ranks
        config = self.config
        slots = config.host_pages_per_rank
        windows = config.host_windows_per_rank
        under_way = max(2, config.num_batches)
        self.host = [HostTier(slots, under_way) for _ in ranks] if slots else []
        self.windows = [HostTier(windows, under_way, WINDOW_NUMBERS) for _ in ranks] if windows else []
        self.disk = DiskTier(config.disk_pages, config.disk_page_bytes) if config.disk_pages else None
        self._events = ranks[0].pool.events
        if self.disk is not None and self._events is not None:
            self.disk.on_gone = self._events.gone_from_disk
        self._stores: list[list[StoredPage]] = [[] for _ in ranks]
        self._readings: list[list[Reading]] = [[] for _ in ranks]
        self._ignored_by: set[Request] = set()  # requests whose disk reads timed out
        self._dropped: tuple[bool, list[bytes]] = (False, [])  # deletions that the last commands ask for

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are read from the disk."""
        return any(self._readings)

    def begin_step(self, now: float) -> None:
        """Pass the current time to the disk tier."""
        if self.disk is not None:
            self.disk.begin_step(now)

    def begin_rank(self, rank: int, now: float) -> None:
        """Give up disk reads that timed out, and wake requests whose pages have arrived."""
        for host in self._hosts(rank):
            host.begin_step()
        landing = self.ranks[rank].landing
        readings = self._readings[rank]
        for request, numbers, since in readings:
            if now - since > PATIENCE:
                request.is_loading = False
                self._ignored_by.add(request)
                landing.waits.append(("disk", now - since))
                landing.give_up(numbers)
                self.disk.late(now)
        for request, numbers, _ in readings:
            landing.keep_expected(numbers)
            if not numbers:
                request.is_loading = False
        self._readings[rank] = [reading for reading in readings if reading.request.is_loading]

    def has(self, rank: int, name: bytes) -> bool:
        """Whether a page is in host memory, or on the disk and readable now."""
        return any(name in host for host in self._hosts(rank)) or (self.disk is not None and name in self.disk)

    def can_load(self, rank: int, name: bytes) -> bool:
        """Whether a page is in host memory and its copy there is complete."""
        return any(host.can_fetch(name) for host in self._hosts(rank))

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Load a page from its slot, and protect it in the LRU."""
        return PageLoad(next(host for host in self._hosts(rank) if name in host).fetch(name), "host")

    def prefetch(self, rank: int, request: Request, names: Sequence[bytes], ready: bool, now: float) -> Lookup:
        """Read the pages of the longest available prefix of `names` that only the disk has, while there is room for them to land."""
        if self.disk is None or request in self._ignored_by:
            return Lookup.ABSENT
        landing = self.ranks[rank].landing
        awaited: set[int] = set()
        wanted: set[bytes] = set()
        is_full = False
        for count, name in enumerate(names, start=1):
            page = landing.get(name)
            if page is not None:
                if not page.here:
                    if page.source is not self:
                        break  # the source that fetches it wakes the waiting requests
                    awaited.add(page.number)
                continue
            if any(name in host for host in self._hosts(rank)):
                continue
            if name not in self.disk:
                break
            if landing.is_full:
                wanted = wanted or set(names)
                if not landing.make_room(1, wanted, now):
                    is_full = True
                    break
            window = self.ranks[rank].pool.num_windows > 0 and count == len(names)
            number = landing.expect(name, self, "disk", now, PATIENCE, window=window)
            landing.requests.append((number, name))
            awaited.add(number)
        if awaited and not ready:
            self._readings[rank].append(Reading(request, awaited, now))
            return Lookup.WAIT
        return Lookup.LATER if is_full else Lookup.ABSENT

    def evict(self, rank: int, page: int, name: bytes) -> None:
        """Copy a page to host memory and write it to the disk, unless a tier already has it or has no room."""
        hosts = self.windows if self.ranks[rank].pool.is_window(page) else self.host
        stored = hosts[rank].store(name) if hosts else None
        slot = NOWHERE if stored is None else stored[0]
        number = NOWHERE if self.disk is None else self._write(rank, page, name)
        if self._events is not None:
            if number != NOWHERE:
                self._events.holds(name)
            if stored is not None:
                if stored[1] is not None:
                    self._events.removed(rank, "host", (stored[1],))
                self._events.stored(rank, "host", name)
        if slot != NOWHERE or number != NOWHERE:
            self._stores[rank].append(StoredPage(page, slot, number, name))

    def landed(self, rank: int, number: int, ok: bool, now: float) -> None:
        """Wake each request whose pages have all arrived."""
        for request, numbers, since in self._readings[rank]:
            numbers.discard(number)
            if not numbers:
                request.is_loading = False
                self.ranks[rank].landing.waits.append(("disk", now - since))
        self._readings[rank] = [reading for reading in self._readings[rank] if reading.numbers]

    def loaded(self, rank: int, name: bytes) -> None:
        """Protect a page that was read."""
        self.disk.fetch(name)

    def load_failed(self, rank: int, name: bytes, number: int) -> None:
        """Forget a page that could not be read."""
        self.disk.read_failed(name)

    def release(self, rank: int, request: Request) -> None:
        """Stop waiting for a request's disk reads."""
        if request.is_loading:
            self._readings[rank] = [reading for reading in self._readings[rank] if reading.request is not request]

    def ended(self, request: Request) -> None:
        """Forget that a request ignores the disk."""
        self._ignored_by.discard(request)

    def forget(self, rank: int, names: Sequence[bytes]) -> None:
        """Remove pages from the host index and delete them from the disk."""
        for host in self._hosts(rank):
            self._tell_gone(rank, host.forget(names))
        if self.disk is not None:
            self.disk.forget(names)

    def cancel(self, rank: int) -> None:
        """End the wait of every request that waits for the disk."""
        for request, _, _ in self._readings[rank]:
            request.is_loading = False
        self._readings[rank] = []

    def clear(self, rank: int) -> None:
        """Forget every page, including pending stores, and delete all pages from the disk."""
        self._stores[rank] = []
        for host in self._hosts(rank):
            host.flush()
        if self.disk is not None:
            self.disk.flush()

    def invalidate(self, rank: int) -> None:
        """Forget all pages in host memory and all pending disk writes."""
        for host in self._hosts(rank):
            self._tell_gone(rank, host.flush())
        if self.disk is not None:
            self.disk.invalidate()

    def withdrawn(self) -> None:
        """Repeat the deletions of the last commands, which may not have run."""
        if self.disk is not None:
            self.disk.drop_again(*self._dropped)

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Yield the commands that delete pages the disk tier dropped and store evicted pages."""
        if self.disk is not None:
            self._dropped = self.disk.take_dropped()
            if any(self._dropped):
                yield CommandTurn.DELETE, drop_command(*self._dropped)
        stores = self._stores
        self._stores = [[] for _ in self.ranks]
        if any(stores):
            yield CommandTurn.STORE, store_command(stores)

    def counts(self, rank: int) -> Mapping[str, Any]:
        """Return the counters of one rank's host memory."""
        return {"host": self.host[rank].counts()} if self.host else {}

    def enter(self, reports: PageReports, now: float) -> None:
        """Record which disk writes finished, and which pages an earlier run left on the disk."""
        if reports.listed is not None:
            self.disk.listed(reports.listed)
        for number, ok in reports.written:
            name = self.disk.written(number, ok, now)
            if self._events is not None and name is not None:
                if ok:
                    self._events.stored(None, "disk", name)
                else:
                    self._events.removed(None, "disk", (name,), told=False)

    def write_cached(self, most: int, now: float) -> list[list[StoredPage]]:
        """Start writing up to `most` recently used cached pages that the disk lacks. Return them per rank, most recently used last."""
        self.disk.begin_step(now)
        per_rank = -(-min(most, self.disk.writable) // len(self.ranks))
        stores = []
        for number, pages in enumerate(self.ranks):
            lacking = [(page, name) for page, name in pages.pool.idle_names() if not self.disk.has(name)][:per_rank]
            stored = [StoredPage(page, NOWHERE, self._write(number, page, name), name) for page, name in lacking]
            stores.append([one for one in reversed(stored) if one.number != NOWHERE])
        return stores

    def _write(self, rank: int, page: int, name: bytes) -> int:
        """Start writing a page to the disk, as `DiskTier.write` does."""
        is_window = self.ranks[rank].pool.is_window(page)
        return self.disk.write(name, self.config.disk_pages_per_window if is_window else 1)

    def _hosts(self, rank: int) -> list[HostTier]:
        """Return the host tiers of a rank, one per page kind."""
        return [tiers[rank] for tiers in (self.host, self.windows) if tiers]

    def _tell_gone(self, rank: int, names: Iterable[bytes]) -> None:
        if self._events is not None:
            self._events.removed(rank, "host", names)


class OffloadAttachment(Attachment):
    """Engine plugin of the offload tiers: handles disk reports, and writes cached pages to the disk at shutdown."""

    statistics_name = "disk"

    def __init__(self, config: SchedulerConfig):
        self.source = OffloadTiers(config)

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Attach to the executor's host memory and disk."""
        self._executor = executor
        self._reporter = executor.extension(PageReporter)
        self.source.config = config

    def begin_step(self, now: float) -> None:
        """Process the disk's reports."""
        if self.source.disk is not None:
            self._enter(0.0, now)

    def wait(self) -> bool:
        """Wait briefly for the disk if a request waits for it. Return whether it did."""
        if self.source.is_reading:
            self._enter(DISK_WAIT, time.monotonic())
            return True
        return False

    def flush(self) -> None:
        """Delete all pages from the disk."""
        if self.source.disk is not None:
            self._executor.launch(drop_command(*self.source.disk.take_dropped()))

    def statistics(self) -> Any:
        """Return the disk tier's counters, or None without a disk tier."""
        return None if self.source.disk is None else self.source.disk.counts()

    def close(self, failed: bool) -> None:
        """Write pages that only the devices hold to the disk, most recently used first, for at most `CLOSE_SECONDS`."""
        disk = self.source.disk
        if failed or disk is None:
            return
        end = time.monotonic() + CLOSE_SECONDS
        room = disk.num_pages  # so that pages written here do not evict each other
        while (now := time.monotonic()) < end and room:
            stores = self.source.write_cached(room, now)
            if any(stores):
                dropped = disk.take_dropped()
                if any(dropped):
                    self._executor.launch(drop_command(*dropped))
                self._executor.launch(store_command(stores))
                room = max(0, room - sum(map(len, stores)))
            elif disk.writable:
                return
            self._enter(0.05, now)

    def _enter(self, seconds: float, now: float) -> None:
        reports = self._reporter.page_reports(seconds)
        self.source.enter(reports, now)
        for rank, number, ok in reports.read:
            self.scheduler.landed(rank, (number,), ok, now)


def drop_command(everything: bool, names: Iterable[bytes]) -> DropPages:
    """Return the command that deletes pages from the disk."""
    return DropPages(everything, b"".join(names))


def store_command(stores: Sequence[Sequence[StoredPage]]) -> StorePages:
    """Return the command that copies each rank's pages to host memory and to the disk."""
    return StorePages(
        [int32s(number for stored in rank_stores for number in stored[:3]) for rank_stores in stores],
        [b"".join(stored.name for stored in rank_stores if stored.number >= 0) for rank_stores in stores],
    )
