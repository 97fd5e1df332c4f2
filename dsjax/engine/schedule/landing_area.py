"""`LandingArea`: pages of one DP rank that a source brings, and that are not in the cache yet. Plain Python."""

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsjax.engine.contract.commands import WINDOW_NUMBERS

MOST_LANDED = 128
"""Room of a rank for pages that have landed, or are about to."""


class PageLoad(NamedTuple):
    """A page that can be sent to the device now: its number in `FetchPages` (of a slot or a landing), and its tier for statistics."""

    number: int
    tier: str


@dataclass(eq=False, slots=True)
class LandingBuffer:
    """Memory that several pages land in together. It takes the room of `size` pages until the last of `names` has gone."""

    size: int
    names: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class LandingPage:
    """One page: the `PageSource` that brings it, under which number and since when, in which buffer, and whether it is here.

    patience: seconds after which a page that has not come may be given up for another one; None: its source says when.
    """

    number: int
    since: float
    source: Any
    tier: str
    patience: float | None
    buffer: LandingBuffer
    here: bool = False


class LandingArea:
    """Names and numbers of the pages that land. From here a page goes to the cache under its number, like one in a slot.

    A page that is not loaded goes when others need its room, with all in its buffer. requests: (number, name) for the next `ReadPages`.
    waits: (tier, seconds) that requests have waited for pages; the sources add them.
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
        """Whether there is no free room for another page."""
        return self._taken >= MOST_LANDED

    def get(self, name: bytes) -> LandingPage | None:
        """A page that has landed or is about to; None: there is none of this name."""
        return self._pages.get(name)

    def room_of(self, source: Any) -> int:
        """Pages that the buffers of one source have room for."""
        buffers = {id(page.buffer): page.buffer.size for page in self._pages.values() if page.source is source}
        return sum(buffers.values())

    def can_load(self, name: bytes) -> bool:
        """Whether a page has come."""
        page = self._pages.get(name)
        return page is not None and page.here

    def load(self, rank: int, name: bytes) -> PageLoad:
        """Take out a page that has come; it goes to the cache."""
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
        """The number under which a page will land, in a buffer or by itself. There is room for it. window: whether it is a window page."""
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
        """Make room for a buffer of so many pages; False where wanted pages take it."""
        while self._taken + count > max(MOST_LANDED, count):
            if not self._give_up_one(wanted, now):
                return False
        return True

    def landed(self, rank: int, number: int, ok: bool) -> None:
        """Enter that a page has come, or could not be had."""
        name = self._by_number.get(number)
        if name is None:
            return
        if ok:
            self._pages[name].here = True
            return
        page = self._remove(name)
        page.source.load_failed(rank, name, number)

    def keep_expected(self, numbers: set[int]) -> None:
        """Remove from `numbers` what was given up, and will not be reported."""
        numbers &= self._by_number.keys()

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drop what is brought under these numbers, come or not."""
        for number in numbers:
            name = self._by_number.get(number)
            if name is not None:
                self._remove(name)
                self._drops.append(number)

    def give_up_names(self, names: Iterable[bytes]) -> None:
        """`give_up` those of these pages that are here or about to come."""
        self.give_up([self._pages[name].number for name in names if name in self._pages])

    def clear(self) -> None:
        """`give_up` every page."""
        self.give_up(list(self._by_number))

    def drop(self, number: int) -> None:
        """Have the executor drop a number that is not expected any more: a process may have its part of the page."""
        self._drops.append(number)

    def take(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """`requests`, and the numbers that the executor may drop; each once."""
        requests, self.requests = self.requests, []
        drops, self._drops = self._drops, []
        return requests, drops

    def _remove(self, name: bytes) -> LandingPage:
        """Take a page out, and free the room of its buffer where it is the last one there."""
        page = self._pages.pop(name)
        del self._by_number[page.number]
        del page.buffer.names[name]
        if not page.buffer.names:
            self._taken -= page.buffer.size
        return page

    def _give_up_one(self, wanted: Container[bytes], now: float) -> bool:
        """Give up the buffer that was asked for longest ago, of which each page can go."""
        for page in self._pages.values():
            if all(self._can_go(name, wanted, now) for name in page.buffer.names):
                self.give_up_names(list(page.buffer.names))
                return True
        return False

    def _can_go(self, name: bytes, wanted: Container[bytes], now: float) -> bool:
        """Whether a page is here and not wanted, or is so late that its request may be gone."""
        page = self._pages[name]
        late = not page.here and page.patience is not None and now - page.since > page.patience
        return late or (page.here and name not in wanted)
