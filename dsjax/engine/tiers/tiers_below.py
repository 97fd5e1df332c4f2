"""`TiersBelow`: what one rank has below its device: host memory of its own, the disk that all ranks share, and what other engines send.
Plain Python."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from dsjax.engine.schedule.page_events import RankEvents
from dsjax.engine.tiers.disk_tier import DiskTier
from dsjax.engine.tiers.page_tiers import NOWHERE, PATIENCE, HostTier, PageMoves, StoredPage

MOST_LANDED = 128
"""Pages of a rank that have been read from the disk or pulled from another engine, or are being, and have not gone to the device."""


@dataclass
class _Landed:
    """A page that is read from the disk, or pulled from another engine, since a time, and whether it has come."""

    number: int
    since: float
    here: bool = False
    pulled: bool = False


class TiersBelow:
    """Either tier may be missing; both only where pages are pulled. The pool stores pages through it; arrivals fetch them.

    A page is looked for in host memory first. One that is read from the disk *lands* in memory of its own; from there it goes to the
    device like one of host memory, under a number instead of a slot. What has landed and is not fetched goes when others need the room.
    A page that another engine sends lands likewise.
    """

    def __init__(
        self, host: HostTier | None, disk: DiskTier | None, events: RankEvents | None = None, *, pulls: bool = False
    ):
        if host is None and disk is None and not pulls:
            raise ValueError("found neither host memory nor a disk, expected one of them")
        self.host, self.disk, self._events = host, disk, events
        self._first_number = 0 if host is None else host.num_slots
        self._numbers = 0
        self._landed: OrderedDict[bytes, _Landed] = OrderedDict()
        self._by_number: dict[int, bytes] = {}
        self._drops: list[int] = []

    def __contains__(self, name: bytes) -> bool:
        return (
            (self.host is not None and name in self.host)
            or name in self._landed
            or (self.disk is not None and name in self.disk)
        )

    @property
    def num_pulled(self) -> int:
        """Pages that have been pulled, or are being, and have not gone to the cache."""
        return sum(landed.pulled for landed in self._landed.values())

    def begin_step(self) -> None:
        """Another step is planned."""
        if self.host is not None:
            self.host.begin_step()

    def take_drops(self) -> list[int]:
        """Numbers of pages that were read and that nobody wants any more; each is told of once."""
        drops, self._drops = self._drops, []
        return drops

    def store(self, page: int, name: bytes) -> StoredPage | None:
        """Where a page goes whose room is needed; None: nowhere, or it is there already."""
        found = None if self.host is None else self.host.store(name)
        slot = NOWHERE if found is None else found[0]
        number = NOWHERE if self.disk is None else self.disk.write(name)
        if self._events is not None:
            self._tell_stored(name, found, number)
        return None if slot == number == NOWHERE else StoredPage(page, slot, number, name)

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """The longest beginning of `names` that can be fetched now."""
        found = []
        for name in names:
            if not self._can_fetch(name):
                break
            found.append(name)
        return found

    def read(self, names: Sequence[bytes], moves: PageMoves, now: float) -> tuple[set[int], bool]:
        """Have those of the longest beginning of `names` that is below read that only the disk has, as far as there is room.

        Gives the numbers of those that have not come yet, and whether room was lacking.
        """
        awaited: set[int] = set()
        if self.disk is None:
            return awaited, False  # what is pulled is awaited by its transfer
        wanted: set[bytes] | None = None
        for name in names:
            landed = self._landed.get(name)
            if landed is not None:
                if landed.pulled and not landed.here:
                    break
                if not landed.here:
                    awaited.add(landed.number)
                continue
            if self.host is not None and name in self.host:
                continue
            if name not in self.disk:
                break
            if len(self._landed) >= MOST_LANDED:
                wanted = set(names) if wanted is None else wanted
                if not self.make_room(1, wanted, now):
                    return awaited, True
            number = self.expect(name, now, pulled=False)
            moves.reads.append((number, name))
            awaited.add(number)
        return awaited, False

    def fetch(self, name: bytes) -> tuple[int, str]:
        """The slot or number of a page that `find` gave, and the tier that it comes from."""
        if self.host is not None and self.host.can_fetch(name):
            return self.host.fetch(name), "host"
        landed = self._landed.pop(name)
        del self._by_number[landed.number]
        if landed.pulled:
            return landed.number, "prefill"
        self.disk.fetch(name)
        return landed.number, "disk"

    def lands(self, name: bytes) -> bool:
        """Whether a page has landed, or is about to."""
        return name in self._landed

    def expect(self, name: bytes, now: float, *, pulled: bool = True) -> int:
        """The number under which a page will land. There is room for it."""
        number = self._first_number + self._numbers
        self._numbers = (self._numbers + 1) % 2**30
        self._landed[name] = _Landed(number, now, pulled=pulled)
        self._by_number[number] = name
        return number

    def make_room(self, count: int, wanted: Container[bytes], now: float) -> bool:
        """Have room for so many pages to land; False where what has landed and is wanted takes it."""
        while len(self._landed) + count > max(MOST_LANDED, count):
            if not self._give_up_one(wanted, now):
                return False
        return True

    def still_read(self, numbers: set[int]) -> None:
        """Take out of `numbers` what will not be reported any more, because it was given up."""
        numbers &= self._by_number.keys()

    def landed(self, number: int, ok: bool) -> None:
        """The executor has read or pulled a page, or could not."""
        name = self._by_number.get(number)
        if name is None:
            return
        if ok:
            self._landed[name].here = True
            return
        landed = self._landed.pop(name)
        del self._by_number[number]
        if landed.pulled:
            self._drops.append(number)  # another process may have its part of it
        else:
            self.disk.read_failed(name)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Wait no longer for what is read under these numbers."""
        for number in numbers:
            name = self._by_number.pop(number, None)
            if name is not None:
                del self._landed[name]
                self._drops.append(number)

    def forget(self, names: Iterable[bytes]) -> None:
        """Let pages be found no more."""
        names = list(names)
        if self.host is not None:
            gone = self.host.forget(names)
            if self._events is not None:
                self._events.removed("host", gone)
        if self.disk is not None:
            self.disk.forget(names)
        self.give_up([self._landed[name].number for name in names if name in self._landed])

    def flush(self) -> None:
        """Forget every page."""
        if self.host is not None:
            self.host.flush()
        if self.disk is not None:
            self.disk.flush()
        self.give_up(list(self._by_number))

    def doubt(self) -> None:
        """Forget what may not have happened: a plan was withdrawn, of whose commands nobody knows which were carried out."""
        if self.host is not None:
            gone = self.host.flush()
            if self._events is not None:
                self._events.removed("host", gone)
        if self.disk is not None:
            self.disk.doubt()
        self.give_up(list(self._by_number))

    def _tell_stored(self, name: bytes, stored: tuple[int, bytes | None] | None, number: int) -> None:
        if number != NOWHERE:
            self._events.goes_to_disk(name)
        if stored is not None:
            if stored[1] is not None:
                self._events.removed("host", (stored[1],))
            self._events.stored_in_host(name)

    def _can_fetch(self, name: bytes) -> bool:
        if self.host is not None and self.host.can_fetch(name):
            return True
        landed = self._landed.get(name)
        return landed is not None and landed.here

    def _give_up_one(self, wanted: Container[bytes], now: float) -> bool:
        """Give up the page that was asked for longest ago, is here and is none of `wanted`; or that should have come long ago: who
        asked for it may be gone.
        """
        for name, landed in self._landed.items():
            late = not landed.here and not landed.pulled and now - landed.since > PATIENCE
            if late or (landed.here and name not in wanted):
                self.give_up([landed.number])
                return True
        return False
