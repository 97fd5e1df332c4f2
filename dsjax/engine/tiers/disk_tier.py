"""`DiskTier`: which pages lie on the disk, and when the disk is left alone. docs/cache-tiers.md has the design."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dsjax.engine.contract.backoff import Backoff
from dsjax.engine.tiers.page_tiers import NOWHERE, SegmentedLru

MOST_WRITING = 256
"""Pages on their way to the disk. What leaves the device while there are so many is not written: a slow disk must not fill the memory."""


class DiskCounts(NamedTuple):
    """What the disk has done for all ranks, and holds. For the first five see `TierCounts`.

    writing: pages on their way there. not_written: pages that were lost because too many were, or the disk was left alone. failed_reads,
    failed_writes: pages. late: requests that went on without pages that were too long in coming. page_bytes: of one page there.
    """

    used_pages: int = 0
    usable_pages: int = 0
    stored: int = 0
    fetched: int = 0
    evicted: int = 0
    writing: int = 0
    not_written: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    late: int = 0
    page_bytes: int = 0


class DiskTier:
    """The names of the pages on the disk, which all ranks share, and of those on their way there.

    The executor's reports come in with `written`, `read_failed` and `listed`; what is to be deleted is taken out with `take_dropped`.

    Attributes:
        reads_pause: whether no page is found now, as the disk was too slow. writes_pause: whether none is written, as that failed.
        on_gone: is told the names of pages that can be found no more.
    """

    def __init__(self, num_pages: int, page_bytes: int = 0):
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.reads_pause = self.writes_pause = False
        self.on_gone: Callable[[Sequence[bytes]], None] = lambda names: None
        self._is_listed = False
        self._names = SegmentedLru(num_pages)
        self._writing: dict[bytes, int] = {}
        self._by_number: dict[int, bytes] = {}
        self._dropped: list[bytes] = []
        self._flushed = False
        self._numbers = 0
        self._reads, self._writes = Backoff(), Backoff()
        self._counts: Counter[str] = Counter()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names and not self.reads_pause

    def counts(self) -> DiskCounts:
        """Count what it has done, and holds."""
        now = {"used_pages": len(self._names), "usable_pages": self.num_pages, "page_bytes": self.page_bytes}
        return DiskCounts(**now, **self._counts, writing=len(self._writing))

    def begin_step(self, now: float) -> None:
        """Take the time of the step that is planned next."""
        self.reads_pause, self.writes_pause = self._reads.holds(now), self._writes.holds(now)

    def listed(self, names: Iterable[bytes]) -> None:
        """Take in the pages that an earlier run has left, least recently used first. Nothing is written before they are known."""
        self._is_listed = True
        for name in names:
            if name not in self._names and name not in self._writing:
                self._names.add(name)
        self._make_room(0)

    def write(self, name: bytes) -> int:
        """Begin to write a page that leaves the device, and give the writing's number; −1 where it is not to be written."""
        if name in self._names or name in self._writing:
            return NOWHERE
        if not self._is_listed or self.writes_pause or len(self._writing) >= MOST_WRITING or not self._make_room(1):
            self._counts["not_written"] += 1
            return NOWHERE
        number = self._numbers
        self._numbers = (number + 1) % 2**30
        self._writing[name] = number
        self._by_number[number] = name
        return number

    @property
    def writable(self) -> int:
        """How many further pages may be on their way there now."""
        return MOST_WRITING - len(self._writing) if self._is_listed and not self.writes_pause else 0

    def has(self, name: bytes) -> bool:
        """Whether a page is there, whether or not it can be read now, or on its way there."""
        return name in self._names or name in self._writing

    def written(self, number: int, ok: bool, now: float) -> bytes | None:
        """End a writing, and give the page's name unless it was forgotten meanwhile. It can be found from now on if all went well."""
        name = self._by_number.pop(number, None)
        if not ok:
            self._counts["failed_writes"] += 1
            self._writes.begin(now)
        if name is None:
            return None
        del self._writing[name]
        if not ok:
            return name
        self._writes.end()
        self._names.add(name)
        self._counts["stored"] += 1
        return name

    def fetch(self, name: bytes) -> None:
        """Protect a page that came from the disk and goes to a device."""
        self._counts["fetched"] += 1
        self._reads.end()
        if name in self._names:
            self._names.ask(name)

    def read_failed(self, name: bytes) -> None:
        """Give up a page that could not be read."""
        self._counts["failed_reads"] += 1
        if name in self._names:  # it may be on its way there again
            self.forget([name])

    def late(self, now: float) -> None:
        """Leave the disk alone for a while, since a request has waited too long for its pages."""
        self._counts["late"] += 1
        self._reads.begin(now)

    def forget(self, names: Iterable[bytes]) -> None:
        """Let pages be found no more, and delete them; one that is on its way is deleted when it has been written."""
        gone = [name for name in names if self.has(name)]
        for name in gone:
            if name in self._writing:
                del self._by_number[self._writing.pop(name)]
            else:
                self._names.remove(name)
        self._dropped += gone
        if gone:
            self.on_gone(gone)

    def invalidate(self) -> None:
        """Forget what is on its way."""
        self.forget(list(self._writing))

    def drop_again(self, flushed: bool, names: Iterable[bytes]) -> None:
        """Delete once more what `take_dropped` gave, which may not have been deleted."""
        self._flushed |= flushed
        self._dropped += names

    def flush(self) -> None:
        """Forget every page, and delete them all."""
        self._names = SegmentedLru(self.num_pages)
        self._writing, self._by_number, self._dropped = {}, {}, []
        self._flushed = True

    def take_dropped(self) -> tuple[bool, list[bytes]]:
        """Whether every page is to be deleted, and then which further ones. Each is told of once."""
        dropped, self._dropped = self._dropped, []
        flushed, self._flushed = self._flushed, False
        return flushed, dropped

    def _make_room(self, count: int) -> bool:
        """Evict until `count` more pages have room; False where what is on its way takes all of it."""
        while len(self._names) + len(self._writing) + count > self.num_pages:
            if not self._names:
                return False
            victim, _ = self._names.remove_first()
            self._dropped.append(victim)
            self._counts["evicted"] += 1
            self.on_gone([victim])
        return True
