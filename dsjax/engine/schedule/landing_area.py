"""`LandingArea`: KV staging buffer of one DP rank, for pages from a page source that are not in the cache yet. Plain Python."""

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsjax.engine.contract.commands import WINDOW_NUMBERS

MOST_LANDED = 128
"""Capacity of a rank's staging buffer, in pages that have landed or are expected."""


class PageLoad(NamedTuple):
    """A page ready to be sent to the device: its number in `FetchPages` (a slot or a landing number), and its tier for statistics."""

    number: int
    tier: str


@dataclass(eq=False, slots=True)
class LandingBuffer:
    """Memory in which several pages land together. It occupies `size` pages until the last of `names` is removed."""

    size: int
    names: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class LandingPage:
    """One landing page: its number, request time, `PageSource`, tier and buffer, and whether it has arrived (`here`)."""

    number: int
    since: float
    source: Any
    tier: str
    # seconds after which a missing page may be dropped for another one; None: its source decides
    patience: float | None
    buffer: LandingBuffer
    here: bool = False


class LandingArea:
    """Names and numbers of landing pages. A page moves to the cache by its number, like a page in a slot.

    A page that is not loaded is dropped, with its whole buffer, when others need the room. requests: (number, name) for the next
    `ReadPages`. waits: (tier, seconds) that requests waited for pages; added by the sources.
    """

    def __init__(self):
        self.first_number = 0
        self.requests: list[tuple[int, bytes]] = []
        self.waits: list[tuple[str, float]] = []
        self._numbers, self._taken = 0, 0
        self._pages: OrderedDict[bytes, LandingPage] = OrderedDict()
        self._by_number: dict[int, bytes] = {}
        self._drops: list[int] = []

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another page."""
        return self._taken >= MOST_LANDED

    def get(self, name: bytes) -> LandingPage | None:
        """Return the landed or expected page of this name; None if there is none."""
        return self._pages.get(name)

    def room_of(self, source: Any) -> int:
        """Return the total size, in pages, of one source's buffers."""
        buffers = {id(page.buffer): page.buffer.size for page in self._pages.values() if page.source is source}
        return sum(buffers.values())

    def can_load(self, name: bytes) -> bool:
        """Whether a page has landed."""
        page = self._pages.get(name)
        return page is not None and page.here

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Remove a landed page, which moves to the cache."""
        page = self._remove(name)
        page.source.loaded(rank, name)
        return PageLoad(page.number, page.tier)

    def expect(
        self,
        name: bytes,
        source: Any,
        tier: str,
        now: float,
        patience: float | None = None,
        buffer: LandingBuffer | None = None,
        *,
        window: bool = False,
    ) -> int:
        """Reserve and return a landing number, in `buffer` or a buffer of its own. The caller has made room. window: a window page."""
        number = self.first_number + self._numbers + (WINDOW_NUMBERS if window else 0)
        self._numbers = (self._numbers + 1) % 2**29
        buffer = buffer or LandingBuffer(1)
        if not buffer.names:
            self._taken += buffer.size
        buffer.names[name] = None
        self._pages[name] = LandingPage(number, now, source, tier, patience, buffer)
        self._by_number[number] = name
        return number

    def make_room(self, count: int, wanted: Container[bytes], now: float) -> bool:
        """Make room for a buffer of `count` pages; return False if wanted pages occupy it."""
        while self._taken + count > max(MOST_LANDED, count):
            if not self._give_up_one(wanted, now):
                return False
        return True

    def landed(self, rank: int, number: int, ok: bool) -> None:
        """Record that a page has landed (`ok`) or could not be fetched."""
        name = self._by_number.get(number)
        if name is None:
            return
        if ok:
            self._pages[name].here = True
            return
        page = self._remove(name)
        page.source.load_failed(rank, name, number)

    def keep_expected(self, numbers: set[int]) -> None:
        """Remove dropped pages from `numbers`, in place; their arrival will not be reported."""
        numbers &= self._by_number.keys()

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop the pages with these numbers, whether landed or not."""
        for number in numbers:
            name = self._by_number.get(number)
            if name is not None:
                self._remove(name)
                self._drops.append(number)

    def give_up_names(self, names: Iterable[bytes]) -> None:
        """`give_up` the pages with these names, if landed or expected."""
        self.give_up([self._pages[name].number for name in names if name in self._pages])

    def clear(self) -> None:
        """`give_up` every page."""
        self.give_up(list(self._by_number))

    def drop(self, number: int) -> None:
        """Tell the executor to drop a number no longer expected, since a process may hold its part of the page."""
        self._drops.append(number)

    def take(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Return and clear `requests` and the numbers that the executor may drop."""
        requests, self.requests = self.requests, []
        drops, self._drops = self._drops, []
        return requests, drops

    def _remove(self, name: bytes) -> LandingPage:
        """Remove a page, and free its buffer if it was the last page there."""
        page = self._pages.pop(name)
        del self._by_number[page.number]
        del page.buffer.names[name]
        if not page.buffer.names:
            self._taken -= page.buffer.size
        return page

    def _give_up_one(self, wanted: Container[bytes], now: float) -> bool:
        """Drop the oldest buffer whose pages can all be dropped. Return whether there was one."""
        for page in self._pages.values():
            if all(self._can_go(name, wanted, now) for name in page.buffer.names):
                self.give_up_names(list(page.buffer.names))
                return True
        return False

    def _can_go(self, name: bytes, wanted: Container[bytes], now: float) -> bool:
        """Whether a page can be dropped: it has landed and is not wanted, or its `patience` is exceeded."""
        page = self._pages[name]
        late = not page.here and page.patience is not None and now - page.since > page.patience
        return late or (page.here and name not in wanted)
