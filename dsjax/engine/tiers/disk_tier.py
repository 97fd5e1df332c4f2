"""`DiskTier`: tracks the pages on the disk, and pauses access after failures. docs/cache-tiers.md has the design."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dsjax.engine.contract.backoff import Backoff
from dsjax.engine.tiers.page_tiers import NOWHERE, SegmentedLru

MOST_WRITING = 256
"""Maximum pages being written to the disk. Further evicted pages are not written, so that a slow disk cannot fill the memory."""


class DiskCounts(NamedTuple):
    """Counters and sizes of the disk tier, over all ranks. For the first five see `TierCounts`."""

    used_pages: int = 0  # room, in context pages; a window page may take the room of several
    usable_pages: int = 0  # likewise
    stored: int = 0
    fetched: int = 0
    evicted: int = 0
    writing: int = 0  # pages being written
    not_written: int = 0  # pages dropped because too many were being written or writes were paused
    failed_reads: int = 0  # pages
    failed_writes: int = 0  # pages
    late: int = 0  # requests that continued without pages that took too long
    page_bytes: int = 0  # size of one context page on the disk


class DiskTier:
    """Names of the pages on the disk, shared by all ranks, and of the pages being written.

    The executor reports through `written`, `read_failed` and `listed`; `take_dropped` returns the pages to delete.

    Attributes:
        reads_pause: whether lookups miss because the disk was too slow.
        writes_pause: whether writes are paused after a failure.
        on_gone: called with the names of removed pages.
    """

    def __init__(self, num_pages: int, page_bytes: int = 0):
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.reads_pause = self.writes_pause = False
        self.on_gone: Callable[[Sequence[bytes]], None] = lambda names: None
        self._is_listed = False
        self._names = SegmentedLru(num_pages)
        self._writing: dict[bytes, tuple[int, int]] = {}  # number of the write, and room
        self._taken = 0  # room of all pages, in context pages
        self._by_number: dict[int, bytes] = {}
        self._dropped: list[bytes] = []
        self._flushed = False
        self._numbers = 0
        self._reads, self._writes = Backoff(), Backoff()
        self._counts: Counter[str] = Counter()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names and not self.reads_pause

    def counts(self) -> DiskCounts:
        """Return the counters and sizes."""
        written = self._taken - sum(room for _, room in self._writing.values())
        now = {"used_pages": written, "usable_pages": self.num_pages, "page_bytes": self.page_bytes}
        return DiskCounts(**now, **self._counts, writing=len(self._writing))

    def begin_step(self, now: float) -> None:
        """Update the pauses for the step planned at time `now`."""
        self.reads_pause, self.writes_pause = self._reads.holds(now), self._writes.holds(now)

    def listed(self, names: Mapping[bytes, int]) -> None:
        """Add the pages of an earlier run (`PageReports.listed`). Nothing is written before this call."""
        self._is_listed = True
        for name, room in names.items():
            if not self.has(name):
                self._names.add(name, room)
                self._taken += room
        self._make_room(0)

    def write(self, name: bytes, room: int = 1) -> int:
        """Start writing an evicted page, and return the number of the write; −1 if the page is not to be written.

        room: that the page takes, in context pages.
        """
        if name in self._names or name in self._writing:
            return NOWHERE
        if not self._is_listed or self.writes_pause or len(self._writing) >= MOST_WRITING or not self._make_room(room):
            self._counts["not_written"] += 1
            return NOWHERE
        number = self._numbers
        self._numbers = (number + 1) % 2**30
        self._writing[name] = number, room
        self._taken += room
        self._by_number[number] = name
        return number

    @property
    def writable(self) -> int:
        """Number of further pages that may be written now."""
        return MOST_WRITING - len(self._writing) if self._is_listed and not self.writes_pause else 0

    def has(self, name: bytes) -> bool:
        """Whether a page is on the disk, even if reads are paused, or being written."""
        return name in self._names or name in self._writing

    def written(self, number: int, ok: bool, now: float) -> bytes | None:
        """Finish a write, and return the page's name unless it was forgotten meanwhile. If `ok`, the page can be found from now on."""
        name = self._by_number.pop(number, None)
        if not ok:
            self._counts["failed_writes"] += 1
            self._writes.begin(now)
        if name is None:
            return None
        _, room = self._writing.pop(name)
        if not ok:
            self._taken -= room
            return name
        self._writes.end()
        self._names.add(name, room)
        self._counts["stored"] += 1
        return name

    def fetch(self, name: bytes) -> None:
        """Count a page read from the disk for a device, and move it to the LRU's protected segment."""
        self._counts["fetched"] += 1
        self._reads.end()
        if name in self._names:
            self._names.ask(name)

    def read_failed(self, name: bytes) -> None:
        """Remove a page that could not be read."""
        self._counts["failed_reads"] += 1
        if name in self._names:  # otherwise another write may be in progress
            self.forget([name])

    def late(self, now: float) -> None:
        """Pause reads for a while, since a request has waited too long for its pages."""
        self._counts["late"] += 1
        self._reads.begin(now)

    def forget(self, names: Iterable[bytes]) -> None:
        """Remove and delete pages. A page being written is deleted after the write."""
        known_names = [name for name in names if self.has(name)]
        for name in known_names:
            if name in self._writing:
                number, room = self._writing.pop(name)
                del self._by_number[number]
            else:
                room = self._names.remove(name)
            self._taken -= room
        self._dropped += known_names
        if known_names:
            self.on_gone(known_names)

    def invalidate(self) -> None:
        """Forget the pages being written."""
        self.forget(list(self._writing))

    def drop_again(self, flushed: bool, names: Iterable[bytes]) -> None:
        """Queue the pages of an earlier `take_dropped` for deletion again, since they may not have been deleted."""
        self._flushed |= flushed
        self._dropped += names

    def flush(self) -> None:
        """Forget and delete all pages."""
        self._names = SegmentedLru(self.num_pages)
        self._taken = 0
        self._writing = {}
        self._by_number = {}
        self._dropped = []
        self._flushed = True

    def take_dropped(self) -> tuple[bool, list[bytes]]:
        """Return and clear the deletions: whether to delete all pages, and then the names of further ones."""
        dropped = self._dropped
        self._dropped = []
        flushed = self._flushed
        self._flushed = False
        return flushed, dropped

    def _make_room(self, room: int) -> bool:
        """Evict until `room` more context pages fit. Return False if pages being written occupy the space."""
        while self._taken + room > self.num_pages:
            if not self._names:
                return False
            victim, freed = self._names.remove_first()
            self._taken -= freed
            self._dropped.append(victim)
            self._counts["evicted"] += 1
            self.on_gone([victim])
        return True
