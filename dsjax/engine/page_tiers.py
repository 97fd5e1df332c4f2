"""`HostTier`: which pages of one DP rank lie in host memory, below the device's. Plain Python: the executor has the bytes.

docs/cache-tiers.md has the design.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

PROTECTED_SHARE = 0.75
"""Of the slots, at most so many hold pages that were asked for again."""
STEPS_TO_STORE = 2
"""Planned steps after which a stored page can be fetched: by then it has left the device, and nobody waits for it."""


@dataclass
class PageMoves:
    """What moves between one rank's device and host before a step.

    Attributes:
        stores: (page, host slot) of pages whose room is needed; they are copied before anything else happens to the page.
        fetches: host slots whose pages are sent to the device, where they are staged.
        places: pages that get what the fetches of the last such plan staged, in their order.
    """

    stores: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.fetches or self.places)


class TierCounts(NamedTuple):
    """What a tier has done, and holds.

    Attributes:
        used_pages, usable_pages: that it holds, and has room for.
        stored, fetched, evicted: pages, since the start.
    """

    used_pages: int
    usable_pages: int
    stored: int
    fetched: int
    evicted: int


class HostTier:
    """The slots of host memory that one rank's evicted pages go to, and the names by which they are found.

    What goes when room is needed follows recency and frequency, as segmented LRU does (Karedla, Love and Wherry 1994): a page
    comes in on probation, where the least recently used one goes first; one that was fetched is protected, and goes back on
    probation when the protected ones are too many.
    """

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"found {num_slots} slots, expected at least 1")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._probation: OrderedDict[bytes, int] = OrderedDict()
        self._protected: OrderedDict[bytes, int] = OrderedDict()
        self._leaving: dict[bytes, int] = {}  # stored so many planned steps ago
        self._stored = self._fetched = self._evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._probation or name in self._protected

    def counts(self) -> TierCounts:
        """What it has done, and holds."""
        return TierCounts(self.num_slots - len(self._free), self.num_slots, self._stored, self._fetched, self._evicted)

    def begin_step(self) -> None:
        """Another step is planned."""
        if self._leaving:
            self._leaving = {name: age + 1 for name, age in self._leaving.items() if age + 1 < STEPS_TO_STORE}

    def store(self, name: bytes) -> int | None:
        """A slot for a page that leaves the device; None where it is here already."""
        if name in self:
            return None
        if not self._free:
            segment = self._probation or self._protected
            victim, slot = segment.popitem(last=False)
            self._leaving.pop(victim, None)
            self._evicted += 1
        else:
            slot = self._free.pop()
        self._probation[name] = slot
        self._leaving[name] = 0
        self._stored += 1
        return slot

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """The longest beginning of `names` that is here and can be fetched now."""
        found = []
        for name in names:
            if name not in self or name in self._leaving:
                break
            found.append(name)
        return found

    def fetch(self, name: bytes) -> int:
        """The slot of a page that `find` gave. The page stays, and is protected from now on."""
        slot = self._probation.pop(name, None)
        if slot is None:
            slot = self._protected.pop(name)
        self._protected[name] = slot
        if len(self._protected) > PROTECTED_SHARE * self.num_slots:
            oldest, its_slot = self._protected.popitem(last=False)
            self._probation[oldest] = its_slot
        self._fetched += 1
        return slot

    def forget(self, names: Iterable[bytes]) -> None:
        """Let pages be found no more."""
        for name in names:
            for segment in (self._probation, self._protected):
                if name in segment:
                    self._free.append(segment.pop(name))
                    self._leaving.pop(name, None)

    def flush(self) -> None:
        """Forget every page."""
        self.forget([*self._probation, *self._protected])
