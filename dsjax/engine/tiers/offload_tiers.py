"""`OffloadTiers`: the page source for pages that left the devices: host memory of each DP rank, and one disk. docs/cache-tiers.md"""

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
"""Seconds that a request waits for pages that are read from the disk. Then it goes on without, and the disk is left alone for a while."""
DISK_WAIT = 0.002
"""Seconds that the engine waits for the disk at a time where every request does. It looks for new requests in between."""
CLOSE_SECONDS = 3.0
"""At the end of an engine pages that only its devices have are sent to the disk for so long at most."""


class StoredPage(NamedTuple):
    """A page whose room is needed; the slot of host memory, and the number of the writing to the disk, that it goes to; −1: none."""

    page: int
    slot: int
    number: int
    name: bytes


class Reading(NamedTuple):
    """A request that waits for pages from the disk, the numbers of those that have not come, and since when it waits."""

    request: Request
    numbers: set[int]
    since: float


class OffloadTiers(PageSource):
    """Either tier may be missing. A page is looked for in host memory first; one that is read from the disk lands before it is loaded.

    Of a model with window pages, host memory has slots of their own, and there is no disk.

    config: whose sizes the tiers have from the next `bind` on. host, windows: of each rank; empty without any. disk: None without one.
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
        """Pages of host memory of each rank, of the kind that has most."""
        return max(self.config.host_pages_per_rank, self.config.host_windows_per_rank)

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Begin with empty host memory, and with a disk whose pages are not known yet."""
        self.ranks, config = ranks, self.config
        slots, windows, under_way = config.host_pages_per_rank, config.host_windows_per_rank, max(2, config.num_batches)
        self.host = [HostTier(slots, under_way) for _ in ranks] if slots else []
        self.windows = [HostTier(windows, under_way, WINDOW_NUMBERS) for _ in ranks] if windows else []
        self.disk = DiskTier(config.disk_pages, config.disk_page_bytes) if config.disk_pages else None
        self._events = ranks[0].pool.events
        if self.disk is not None and self._events is not None:
            self.disk.on_gone = self._events.gone_from_disk
        self._stores: list[list[StoredPage]] = [[] for _ in ranks]
        self._readings: list[list[Reading]] = [[] for _ in ranks]
        self._ignored_by: set[Request] = set()  # who has waited too long for the disk, and goes on without
        self._dropped: tuple[bool, list[bytes]] = (False, [])  # what the last commands delete

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are read from the disk."""
        return any(self._readings)

    def begin_step(self, now: float) -> None:
        """Let the disk know the time."""
        if self.disk is not None:
            self.disk.begin_step(now)

    def begin_rank(self, rank: int, now: float) -> None:
        """Give up readings that took too long, and wake requests whose pages have come."""
        for host in self._hosts(rank):
            host.begin_step()
        landing, readings = self.ranks[rank].landing, self._readings[rank]
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
        """Whether a page is in host memory, or on the disk and may be read."""
        return any(name in host for host in self._hosts(rank)) or (self.disk is not None and name in self.disk)

    def can_load(self, rank: int, name: bytes) -> bool:
        """Whether a page is in host memory and has come there."""
        return any(host.can_fetch(name) for host in self._hosts(rank))

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Load a page from its slot. It is protected from now on."""
        return PageLoad(next(host for host in self._hosts(rank) if name in host).fetch(name), "host")

    def prefetch(self, rank: int, request: Request, names: Sequence[bytes], ready: bool, now: float) -> Lookup:
        """Have those of the longest beginning of `names` read that only the disk has, as far as there is room for them to land."""
        if self.disk is None or request in self._ignored_by:
            return Lookup.ABSENT
        landing = self.ranks[rank].landing
        awaited: set[int] = set()
        wanted: set[bytes] = set()
        is_full = False
        for name in names:
            page = landing.get(name)
            if page is not None:
                if not page.here:
                    if page.source is not self:
                        break  # whoever brings it wakes those who wait for it
                    awaited.add(page.number)
                continue
            if self.host and name in self.host[rank]:
                continue
            if name not in self.disk:
                break
            if landing.is_full:
                wanted = wanted or set(names)
                if not landing.make_room(1, wanted, now):
                    is_full = True
                    break
            number = landing.expect(name, self, "disk", now, PATIENCE)
            landing.requests.append((number, name))
            awaited.add(number)
        if awaited and not ready:
            self._readings[rank].append(Reading(request, awaited, now))
            return Lookup.WAIT
        return Lookup.LATER if is_full else Lookup.ABSENT

    def evict(self, rank: int, page: int, name: bytes) -> None:
        """Copy a page to host memory and write it to the disk, where it is not there already and there is room."""
        hosts = self.windows if self.ranks[rank].pool.is_window(page) else self.host
        stored = hosts[rank].store(name) if hosts else None
        slot = NOWHERE if stored is None else stored[0]
        number = NOWHERE if self.disk is None else self.disk.write(name)
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
        """Wake requests all of whose pages have come."""
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
        """Wait for the disk no longer on behalf of a request."""
        if request.is_loading:
            self._readings[rank] = [reading for reading in self._readings[rank] if reading.request is not request]

    def ended(self, request: Request) -> None:
        """Forget that a request ignores the disk."""
        self._ignored_by.discard(request)

    def forget(self, rank: int, names: Sequence[bytes]) -> None:
        """Let pages be found no more, and delete them from the disk."""
        for host in self._hosts(rank):
            self._tell_gone(rank, host.forget(names))
        if self.disk is not None:
            self.disk.forget(names)

    def cancel(self, rank: int) -> None:
        """Let requests wait for the disk no longer."""
        for request, _, _ in self._readings[rank]:
            request.is_loading = False
        self._readings[rank] = []

    def clear(self, rank: int) -> None:
        """Forget every page, those that were about to be stored among them, and delete those of the disk."""
        self._stores[rank] = []
        for host in self._hosts(rank):
            host.flush()
        if self.disk is not None:
            self.disk.flush()

    def invalidate(self, rank: int) -> None:
        """Forget host memory, and what was on its way to the disk."""
        for host in self._hosts(rank):
            self._tell_gone(rank, host.flush())
        if self.disk is not None:
            self.disk.invalidate()

    def withdrawn(self) -> None:
        """Delete once more what the last commands deleted."""
        if self.disk is not None:
            self.disk.drop_again(*self._dropped)

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Delete what the disk has lost, and store what was evicted."""
        if self.disk is not None:
            self._dropped = self.disk.take_dropped()
            if any(self._dropped):
                yield CommandTurn.DELETE, drop_command(*self._dropped)
        stores, self._stores = self._stores, [[] for _ in self.ranks]
        if any(stores):
            yield CommandTurn.STORE, store_command(stores)

    def counts(self, rank: int) -> Mapping[str, Any]:
        """Count what host memory holds of one rank, and has done for it."""
        return {"host": self.host[rank].counts()} if self.host else {}

    def enter(self, reports: PageReports, now: float) -> None:
        """Enter what came of pages that were written to the disk, and which ones an earlier run has left there."""
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
        """Begin to write the most recently used cached pages that the disk has not, `most` in all; give each rank's, the last used last."""
        self.disk.begin_step(now)
        each = -(-min(most, self.disk.writable) // len(self.ranks))
        stores = []
        for pages in self.ranks:
            lacking = [(page, name) for page, name in pages.pool.idle_names() if not self.disk.has(name)][:each]
            stored = [StoredPage(page, NOWHERE, self.disk.write(name), name) for page, name in lacking]
            stores.append([one for one in reversed(stored) if one.number != NOWHERE])
        return stores

    def _hosts(self, rank: int) -> list[HostTier]:
        """Host memory of a rank for pages of each kind."""
        return [tiers[rank] for tiers in (self.host, self.windows) if tiers]

    def _tell_gone(self, rank: int, names: Iterable[bytes]) -> None:
        if self._events is not None:
            self._events.removed(rank, "host", names)


class OffloadAttachment(Attachment):
    """Offload tiers as a part of the core: reports of the disk, and what is written to it at the end."""

    statistics_name = "disk"

    def __init__(self, config: SchedulerConfig):
        self.source = OffloadTiers(config)

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Begin with the executor's host memory and disk."""
        self._executor, self._reporter = executor, executor.extension(PageReporter)
        self.source.config = config

    def begin_step(self, now: float) -> None:
        """Enter what came of the disk."""
        if self.source.disk is not None:
            self._enter(0.0, now)

    def wait(self) -> bool:
        """Wait for the disk, if a request does."""
        if self.source.is_reading:
            self._enter(DISK_WAIT, time.monotonic())
            return True
        return False

    def flush(self) -> None:
        """Delete all pages from the disk."""
        if self.source.disk is not None:
            self._executor.launch(drop_command(*self.source.disk.take_dropped()))

    def statistics(self) -> Any:
        """Count what the disk holds, and has done; None without one."""
        return None if self.source.disk is None else self.source.disk.counts()

    def close(self, failed: bool) -> None:
        """Write what only the devices hold to the disk, most recently used first, for `CLOSE_SECONDS` at most."""
        disk = self.source.disk
        if failed or disk is None:
            return
        end = time.monotonic() + CLOSE_SECONDS
        room = disk.num_pages  # lest what is written now goes for more of it
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
    """Make the command that deletes pages from the disk."""
    return DropPages(everything, b"".join(names))


def store_command(stores: Sequence[Sequence[StoredPage]]) -> StorePages:
    """Make the command that copies pages to host memory and to the disk, given rank by rank."""
    return StorePages(
        [int32s(number for stored in rank_stores for number in stored[:3]) for rank_stores in stores],
        [b"".join(stored.name for stored in rank_stores if stored.number >= 0) for rank_stores in stores],
    )
