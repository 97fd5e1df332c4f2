"""`HostTier`: which pages lie in a rank's host memory; `SegmentedLru`: the order in which pages go. Plain Python. docs/cache-tiers.md"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

PROTECTED_SHARE = 0.75
"""The share of a tier's pages, at most, that are protected because they were asked for again."""
NOWHERE = -1


class TierCounts(NamedTuple):
    """What a tier has done, and holds. stored, fetched, evicted: pages, since the start."""

    used_pages: int
    usable_pages: int
    stored: int
    fetched: int
    evicted: int


class SegmentedLru:
    """Names with a number each, in the order in which they go when room is needed.

    Segmented LRU (Karedla, Love and Wherry 1994): a name comes in on probation, where the least recently used one goes first; one that was
    asked for is protected, and goes back on probation when the protected ones are more than their share of `size`.
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
        """Put a new name on probation."""
        self._probation[name] = number

    def ask(self, name: bytes) -> int:
        """Give a name's number, and protect the name from now on."""
        number = self._protected[name] = self.remove(name)
        if len(self._protected) > PROTECTED_SHARE * self.size:
            self.add(*self._protected.popitem(last=False))
        return number

    def remove(self, name: bytes) -> int:
        """Take a name out; give its number."""
        return self._probation.pop(name) if name in self._probation else self._protected.pop(name)

    def remove_first(self) -> tuple[bytes, int]:
        """Take out the name whose turn it is to go."""
        return (self._probation or self._protected).popitem(last=False)


class HostTier:
    """The slots of host memory that one rank's evicted pages go to, and the names by which they are found.

    under_way: most steps at a time. A stored page can be fetched so many planned steps later: it has left the device by then.
    first: number of its first slot.
    """

    def __init__(self, num_slots: int, under_way: int = 2, first: int = 0):
        self.num_slots, self._under_way = num_slots, under_way
        self._free = list(range(first + num_slots - 1, first - 1, -1))
        self._names = SegmentedLru(num_slots)
        self._leaving: dict[bytes, int] = {}  # stored so many planned steps ago
        self._stored = self._fetched = self._evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def counts(self) -> TierCounts:
        """Count what it has done, and holds."""
        return TierCounts(self.num_slots - len(self._free), self.num_slots, self._stored, self._fetched, self._evicted)

    def begin_step(self) -> None:
        """Count one more planned step for the pages that are leaving the device."""
        if self._leaving:
            self._leaving = {name: age + 1 for name, age in self._leaving.items() if age + 1 < self._under_way}

    def store(self, name: bytes) -> tuple[int, bytes | None] | None:
        """Take a slot for a page that leaves the device; give it, and the page that went for it. None where the page is here already."""
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
        """Whether a page is here and can be fetched now."""
        return name in self._names and name not in self._leaving

    def fetch(self, name: bytes) -> int:
        """Give the slot of a page that can be fetched. The page stays, and is protected from now on."""
        self._fetched += 1
        return self._names.ask(name)

    def forget(self, names: Iterable[bytes]) -> list[bytes]:
        """Let pages be found no more; give those that were here."""
        gone = [name for name in names if name in self._names]
        for name in gone:
            self._free.append(self._names.remove(name))
            self._leaving.pop(name, None)
        return gone

    def flush(self) -> list[bytes]:
        """Forget every page; give them."""
        return self.forget(list(self._names))


class PageReports(NamedTuple):
    """What came of pages on their way to the disk and from it since the last time.

    read: (rank, number, whether it has come). written: (number, whether it was written). listed: names of the pages that an earlier run has
    left, least recently used first; None until they are known, and ever after.
    """

    read: list[tuple[int, int, bool]]
    written: list[tuple[int, bool]]
    listed: list[bytes] | None = None


class PageReporter(Protocol):
    """What an executor with offload tiers offers (`Executor.extension`)."""

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Report what came of pages and the disk since the last time; where that is nothing, wait so long for the disk's first."""
