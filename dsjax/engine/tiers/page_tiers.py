"""`HostTier`: index of the pages in a rank's host memory; `SegmentedLru`: eviction order. Plain Python. docs/cache-tiers.md"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

PROTECTED_SHARE = 0.75
"""Largest share of a tier's pages in the protected segment (pages hit at least once)."""
NOWHERE = -1


class TierCounts(NamedTuple):
    """Page counts of a tier: `used_pages` and `usable_pages` at present, the others since the start."""

    used_pages: int
    usable_pages: int
    stored: int
    fetched: int
    evicted: int


class SegmentedLru:
    """Map from page names to numbers (slots or sizes), in eviction order.

    Segmented LRU (Karedla, Love and Wherry 1994): a new name enters the probationary segment, whose least recently used name is evicted
    first. A hit moves a name to the protected segment. Above `PROTECTED_SHARE` of `size`, that segment's LRU name returns to probation.
    """

    def __init__(self, size: int):
        self.size = size
        self._probation: OrderedDict[bytes, int] = OrderedDict()
        self._protected: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._probation or name in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._probation
        yield from self._protected

    def add(self, name: bytes, number: int = 0) -> None:
        """Add a new name to the probationary segment."""
        self._probation[name] = number

    def ask(self, name: bytes) -> int:
        """Return a name's number, and move the name to the protected segment."""
        number = self._protected[name] = self.remove(name)
        if len(self._protected) > PROTECTED_SHARE * self.size:
            self.add(*self._protected.popitem(last=False))
        return number

    def remove(self, name: bytes) -> int:
        """Remove a name and return its number."""
        return self._probation.pop(name) if name in self._probation else self._protected.pop(name)

    def remove_first(self) -> tuple[bytes, int]:
        """Remove and return the next name to evict, with its number."""
        return (self._probation or self._protected).popitem(last=False)


class HostTier:
    """Host-memory slots for the evicted pages of one rank, indexed by page name.

    under_way: maximum number of steps in flight. After that many more planned steps, a stored page has left the device and can be fetched.
    first: number of the first slot.
    """

    def __init__(self, num_slots: int, under_way: int = 2, first: int = 0):
        self.num_slots, self._under_way = num_slots, under_way
        self._free = list(range(first + num_slots - 1, first - 1, -1))
        self._names = SegmentedLru(num_slots)
        self._leaving: dict[bytes, int] = {}  # page → steps planned since its store
        self._stored = self._fetched = self._evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def counts(self) -> TierCounts:
        """Return the counters of this tier."""
        return TierCounts(self.num_slots - len(self._free), self.num_slots, self._stored, self._fetched, self._evicted)

    def begin_step(self) -> None:
        """Note a planned step; pages stored `under_way` steps ago have left the device."""
        if self._leaving:
            self._leaving = {name: age + 1 for name, age in self._leaving.items() if age + 1 < self._under_way}

    def store(self, name: bytes) -> tuple[int, bytes | None] | None:
        """Allocate a slot for a page that leaves the device. Return (slot, evicted page or None), or None if the page is already stored."""
        if name in self._names:
            return None
        victim = None
        if not self._free:
            victim, slot = self._names.remove_first()
            self._leaving.pop(victim, None)
            self._evicted += 1
        else:
            slot = self._free.pop()
        self._names.add(name, slot)
        self._leaving[name] = 0
        self._stored += 1
        return slot, victim

    def can_fetch(self, name: bytes) -> bool:
        """Whether a page is stored and its copy from the device is complete."""
        return name in self._names and name not in self._leaving

    def fetch(self, name: bytes) -> int:
        """Return the slot of a page that can be fetched. The page stays stored and becomes protected."""
        self._fetched += 1
        return self._names.ask(name)

    def forget(self, names: Iterable[bytes]) -> list[bytes]:
        """Remove pages from the index. Return the ones that were stored."""
        known_names = [name for name in names if name in self._names]
        for name in known_names:
            self._free.append(self._names.remove(name))
            self._leaving.pop(name, None)
        return known_names

    def flush(self) -> list[bytes]:
        """Forget every page. Return them all."""
        return self.forget(list(self._names))


class PageReports(NamedTuple):
    """Results of disk reads and writes since the last report."""

    read: list[tuple[int, int, bool]]  # (rank, number, success)
    written: list[tuple[int, bool]]  # (number, success)
    # pages that an earlier run left on the disk → size in context pages, least recently used first. Only the first report after these were
    # listed has them; None in all others
    listed: dict[bytes, int] | None = None


class PageReporter(Protocol):
    """Extension of an executor with offload tiers (`Executor.extension`)."""

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Return the reports since the last call. If there are none, wait up to `seconds` for the disk's first."""
