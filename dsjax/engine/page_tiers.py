"""`HostTier` and `DiskTier`: which pages lie below the device's, and what goes when room is needed. The executor has the bytes.

docs/cache-tiers.md has the design.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.engine.page_transfer import PulledPages, SentPages

PROTECTED_SHARE = 0.75
"""Of a tier's pages, at most so many are ones that were asked for again."""
STEPS_TO_STORE = 2
"""Planned steps after which a stored page can be fetched: by then it has left the device, and nobody waits for it."""
MOST_WRITING = 256
"""Pages on their way to the disk. What leaves the device while there are so many is not written: a slow disk must not fill the memory."""
PATIENCE = 2.0
"""Seconds that a request waits for pages that are read from the disk. Then it goes on without, and the disk is left alone for a while."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which a disk that failed, or was too slow, is left alone; twice as long each time, until it does its work again."""

NOWHERE = -1


class StoredPage(NamedTuple):
    """A page whose room is needed.

    Attributes:
        slot: of host memory that it is copied to; −1: none. number: of the writing to the disk, under which its end is reported; −1: none.
    """

    page: int
    slot: int
    number: int
    name: bytes


@dataclass
class PageMoves:
    """What moves between one rank's device and what lies below it before a step.

    Attributes:
        stores: pages whose room is needed; they are copied before anything else happens to the page.
        fetches: host slots whose pages are sent to the device, where they are staged; numbers from the count of slots on mean pages
            that came from the disk, by the numbers under which they were read.
        places: pages that get what the fetches of the last such plan staged, in their order.
        reads: (number, name) of pages that are to be read from the disk.
        drops: numbers of those read or pulled that nobody wants any more.
        pulls: pages of other engines' parcels that are to land. sends: pages that go into parcels for other engines.
    """

    stores: list[StoredPage] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    pulls: list[PulledPages] = field(default_factory=list)
    sends: list[SentPages] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.stores or self.fetches or self.places or self.reads or self.drops or self.pulls or self.sends
        )


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


class TierHits(NamedTuple):
    """Tokens that were found cached, by the tier that had them."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def plus(self, cached: int, host_pages: int, disk_pages: int, page_size: int) -> "TierHits":
        """With a request's: `cached` tokens, of which so many pages came from below. A page can have come twice."""
        disk = min(cached, disk_pages * page_size)
        host = min(cached - disk, host_pages * page_size)
        return TierHits(self.device + cached - disk - host, self.host + host, self.disk + disk)


class DiskCounts(NamedTuple):
    """What the disk has done for all ranks, and holds. The first five as of `TierCounts`.

    Attributes:
        writing: pages on their way there.
        not_written: pages that were lost because too many were, or the disk was left alone.
        failed_reads, failed_writes: pages that could not be read, or not written.
        late: requests that went on without pages that were too long in coming.
        page_bytes: of one page, as it takes room there.
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


class SegmentedLru:
    """Names with a number each, in the order in which they go when room is needed.

    It follows recency and frequency, as segmented LRU does (Karedla, Love and Wherry 1994): a name comes in on probation, where the
    least recently used one goes first; one that was asked for is protected, and goes back on probation when the protected ones are
    more than their share of `size`.
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

    def __getitem__(self, name: bytes) -> int:
        return self._probation[name] if name in self._probation else self._protected[name]

    def add(self, name: bytes, number: int = 0) -> None:
        """Put a new name on probation."""
        self._probation[name] = number

    def ask(self, name: bytes) -> int:
        """A name's number. It is protected from now on."""
        number = self._probation.pop(name, None)
        if number is None:
            number = self._protected.pop(name)
        self._protected[name] = number
        if len(self._protected) > PROTECTED_SHARE * self.size:
            oldest, its_number = self._protected.popitem(last=False)
            self._probation[oldest] = its_number
        return number

    def remove(self, name: bytes) -> int:
        """Take a name out; give its number."""
        return self._probation.pop(name) if name in self._probation else self._protected.pop(name)

    def remove_first(self) -> tuple[bytes, int]:
        """Take out the name whose turn it is to go."""
        return (self._probation or self._protected).popitem(last=False)


class Pause:
    """How long something that failed is left alone: twice as long each time, until it does its work again."""

    def __init__(self):
        self._seconds, self._until = FIRST_PAUSE, float("-inf")

    def begin(self, now: float) -> None:
        """It failed. What fails while it is left alone was begun before, and changes nothing."""
        if not self.holds(now):
            self._until = now + self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_PAUSE)

    def holds(self, now: float) -> bool:
        """Whether it is left alone now."""
        return now < self._until

    def end(self) -> None:
        """It has done its work."""
        self._seconds = FIRST_PAUSE


class HostTier:
    """The slots of host memory that one rank's evicted pages go to, and the names by which they are found."""

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"found {num_slots} slots, expected at least 1")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._names = SegmentedLru(num_slots)
        self._leaving: dict[bytes, int] = {}  # stored so many planned steps ago
        self._stored = self._fetched = self._evicted = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def counts(self) -> TierCounts:
        """What it has done, and holds."""
        return TierCounts(self.num_slots - len(self._free), self.num_slots, self._stored, self._fetched, self._evicted)

    def begin_step(self) -> None:
        """Another step is planned."""
        if self._leaving:
            self._leaving = {name: age + 1 for name, age in self._leaving.items() if age + 1 < STEPS_TO_STORE}

    def store(self, name: bytes) -> tuple[int, bytes | None] | None:
        """A slot for a page that leaves the device, and the page that had to go for it; None where it is here already."""
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
        """The slot of a page that can be fetched. The page stays, and is protected from now on."""
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


class DiskTier:
    """The names of the pages on the disk, which all ranks share, and of those on their way there.

    The executor's reports come in with `written`, `read_failed` and `found`; what is to be deleted is taken out with `take_dropped`.

    Attributes:
        reads_pause, writes_pause: whether the disk is left alone now: it was too slow, and no page of it is found meanwhile; or it
            could not be written.
        gone: names that can be found no more; kept only where `tells_gone`, and then whoever reads it empties it.
    """

    tells_gone = False

    def __init__(self, num_pages: int, page_bytes: int = 0):
        if num_pages < 1:
            raise ValueError(f"found room for {num_pages} pages, expected at least 1")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.reads_pause = self.writes_pause = False
        self._listed = False
        self._names = SegmentedLru(num_pages)
        self._writing: dict[bytes, int] = {}
        self._by_number: dict[int, bytes] = {}
        self._dropped: list[bytes] = []
        self.gone: list[bytes] = []
        self._flushed = False
        self._numbers = 0
        self._reads, self._writes = Pause(), Pause()
        self._counts = DiskCounts(usable_pages=num_pages, page_bytes=page_bytes)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names and not self.reads_pause

    def counts(self) -> DiskCounts:
        """What it has done, and holds."""
        return self._counts._replace(used_pages=len(self._names), writing=len(self._writing))

    def begin_step(self, now: float) -> None:
        """Another step is planned."""
        self.reads_pause, self.writes_pause = self._reads.holds(now), self._writes.holds(now)

    def found(self, names: Iterable[bytes]) -> None:
        """Pages that an earlier run has left, least recently used first. Nothing is written before they are known."""
        self._listed = True
        for name in names:
            if name not in self._names and name not in self._writing:
                self._names.add(name)
        self._make_room(0)

    def write(self, name: bytes) -> int:
        """The number of a new writing, of a page that leaves the device; −1 where it is not to be written."""
        if name in self._names or name in self._writing:
            return NOWHERE
        if not self._listed or self.writes_pause or len(self._writing) >= MOST_WRITING or not self._make_room(1):
            self._count("not_written")
            return NOWHERE
        number = self._numbers
        self._numbers = (number + 1) % 2**30
        self._writing[name] = number
        self._by_number[number] = name
        return number

    @property
    def writable(self) -> int:
        """How many further pages may be on their way there now."""
        return MOST_WRITING - len(self._writing) if self._listed and not self.writes_pause else 0

    def has(self, name: bytes) -> bool:
        """Whether a page is there, whether or not it can be read now, or on its way there."""
        return name in self._names or name in self._writing

    def written(self, number: int, ok: bool, now: float) -> bytes | None:
        """A writing has ended; the page's name, unless it was forgotten meanwhile. It can be found from now on if all went well."""
        name = self._by_number.pop(number, None)
        if not ok:
            self._count("failed_writes")
            self._writes.begin(now)
        if name is None or self._writing.get(name) != number:
            return None
        del self._writing[name]
        if not ok:
            return name
        self._writes.end()
        self._names.add(name)
        self._count("stored")
        return name

    def fetch(self, name: bytes) -> None:
        """A page that came from the disk goes to a device. It is protected from now on."""
        self._count("fetched")
        self._reads.end()
        if name in self._names:
            self._names.ask(name)

    def read_failed(self, name: bytes) -> bool:
        """A page could not be read: it is lost. Whether it was still known."""
        self._count("failed_reads")
        return bool(self._drop([name]))

    def late(self, now: float) -> None:
        """A request has waited too long for its pages, and goes on without."""
        self._count("late")
        self._reads.begin(now)

    def forget(self, names: Iterable[bytes]) -> list[bytes]:
        """Let pages be found no more, and delete them; give those that could be found."""
        names = list(names)
        for name in names:
            if name in self._writing:  # it is deleted when it has been written
                del self._by_number[self._writing.pop(name)]
                self._dropped.append(name)
                if self.tells_gone:
                    self.gone.append(name)
        return self._drop(names)

    def doubt(self) -> None:
        """Forget what is on its way."""
        self.forget(list(self._writing))

    def drop_again(self, flushed: bool, names: Iterable[bytes]) -> None:
        """What `take_dropped` gave may not have been deleted."""
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
            self._count("evicted")
            if self.tells_gone:
                self.gone.append(victim)
        return True

    def _drop(self, names: Iterable[bytes]) -> list[bytes]:
        gone = [name for name in names if name in self._names]
        for name in gone:
            self._names.remove(name)
        self._dropped += gone
        if self.tells_gone:
            self.gone += gone
        return gone

    def _count(self, what: str) -> None:
        self._counts = self._counts._replace(**{what: getattr(self._counts, what) + 1})
