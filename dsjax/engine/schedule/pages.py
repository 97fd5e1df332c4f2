"""`PagePool`: tracks the free, held and cached pages of one DP rank's KV cache, and finds cached pages by hash."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from hashlib import sha256

from dsjax.engine.contract.commands import NAME_BYTES, int32s
from dsjax.engine.schedule.page_events import PageEvents
from dsjax.engine.schedule.request import Request
from dsjax.model.cache_groups import HELD_WINDOWS

_NO_SALT = bytes(NAME_BYTES)


class PagePool:
    """The pages 1 … num_pages − 1 of a rank. Page 0 is never allocated, because padded page-table entries point at it.

    Several requests can hold a page. A sealed page can be found by its hash; without a holder it stays cached until it is evicted.
    Allocation takes empty pages first, the most recently freed one first, so that a lightly loaded rank uses few pages; then cached pages
    in LRU order.

    Window pages have separate names, and separate numbers from `num_pages` on. The first window page is never allocated either. Window
    pages marked by `keep` are evicted last, in LRU order, and are offered to `on_evict`; other window pages are not.

    Attributes:
        num_windows: number of window pages, including the one that is never allocated; 0 in a model without window pages.
        on_evict: called as `on_evict(page, name)` when a cached page is evicted. Its values stay valid until the next commands are
            executed.
        events: receives events of the pages of `rank`; None: there are no subscribers.
    """

    def __init__(
        self, num_pages: int, page_size: int, events: PageEvents | None = None, rank: int = 0, *, num_windows: int = 0
    ):
        self.page_size, self.num_pages, self.events, self.rank = page_size, num_pages, events, rank
        self.num_windows = num_windows
        self.on_evict: Callable[[int, bytes], None] | None = None
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * (num_pages + num_windows)
        self._hash_of: list[bytes | None] = [None] * (num_pages + num_windows)
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without a holder, least recently used first
        self._free_windows = list(range(num_pages + num_windows - 1, num_pages, -1))
        self._idle_windows: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._by_kind = (self._free, self._idle), (self._free_windows, self._idle_windows)

    @property
    def num_usable(self) -> int:
        """Number of pages that can be allocated."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of pages without a holder, cached pages included."""
        return len(self._free) + len(self._idle)

    @property
    def num_free_windows(self) -> int:
        """Number of window pages without a holder, cached pages included."""
        return len(self._free_windows) + len(self._idle_windows)

    @property
    def num_used(self) -> int:
        """Number of pages that requests hold; a shared page counts once."""
        return self.num_usable - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of cached pages without a holder."""
        return len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def __contains__(self, name: bytes) -> bool:
        return name in self._page_of

    def is_window(self, page: int) -> bool:
        """Whether a page is a window page."""
        return page >= self.num_pages

    def can_hold(self, cached: Sequence[int], count: int, windows: int = 0) -> bool:
        """Whether there is room to hold the `cached` pages and allocate `count` other pages and `windows` window pages."""
        idle = [page for page in cached if not self._holders[page]]
        idle_windows = sum(map(self.is_window, idle))
        return self.num_free >= count + len(idle) - idle_windows and self.num_free_windows >= windows + idle_windows

    def allocate(self, count: int, *, windows: bool = False, store: bool = True) -> list[int]:
        """Allocate free pages, or window pages. store: whether to offer evicted pages to `on_evict`."""
        free, idle = self._by_kind[windows]
        if len(free) + len(idle) < count:
            kind, usable = ("window pages", self.num_windows - 1) if windows else ("pages", self.num_usable)
            raise ValueError(f"asked for {count} {kind}, {len(free) + len(idle)} of {usable} are free")
        pages = []
        for _ in range(count):
            if free:
                page = free.pop()
            else:
                page, _ = idle.popitem(last=False)
                if store and self.on_evict is not None and (not windows or page in self._kept):
                    self.on_evict(page, self._hash_of[page])
                self._unname(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def idle_names(self) -> Iterator[tuple[int, bytes]]:
        """Yield (page, name) of the cached pages without a holder, most recently used first; kept window pages come first."""
        for page in (*(page for page in reversed(self._idle_windows) if page in self._kept), *reversed(self._idle)):
            yield page, self._hash_of[page]

    def names_of(self, pages: Iterable[int]) -> list[bytes]:
        """Return the names of the findable pages among `pages`."""
        return [self._hash_of[page] for page in pages if self._hash_of[page] is not None]

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that `find` returned. They may have other holders."""
        for page in pages:
            if not self._holders[page]:
                del self._by_kind[self.is_window(page)][1][page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release pages, last page first, so that a shared prefix is evicted last. Raises a `ValueError` if a page has no holder."""
        for page in reversed(pages):
            if not self._holders[page]:
                raise ValueError(f"page {page} is given back but was not allocated")
            self._holders[page] -= 1
            if not self._holders[page]:
                free, idle = self._by_kind[self.is_window(page)]
                if self._hash_of[page] is None:
                    free.append(page)
                else:
                    idle[page] = None
                    if self.is_window(page) and page not in self._kept:
                        idle.move_to_end(page, last=False)

    def keep(self, name: bytes) -> None:
        """Mark a window page as kept and most recently used, if it can be found."""
        page = self._page_of.get(name)
        if page is not None:
            self._kept.add(page)
            if page in self._idle_windows:
                self._idle_windows.move_to_end(page)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix of `hashes`."""
        pages = []
        for name in hashes:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def count(self, hashes: Iterable[bytes], promised: Container[bytes] = (), elsewhere: Container[bytes] = ()) -> int:
        """Return the length of the longest prefix of `hashes` that is cached here, promised, or available elsewhere."""
        known, length = self._page_of, 0
        for name in hashes:
            if name not in known and name not in promised and name not in elsewhere:
                break
            length += 1
        return length

    def usable(
        self, names: Sequence[bytes], cached: int, loads: Container[bytes] = (), promised: Container[bytes] = ()
    ) -> int:
        """Return how many of the first `cached` pages a request can reuse: all; with window pages, the pages up to the last usable border.

        A border is the end of a page. To continue there, a request needs all pages before it and the last page's window page: each layer's
        window depends on the layer below, so recomputing a window of tokens is not exact.

        loads: pages that can be loaded. promised: pages that requests are about to compute, each with its window page.
        """
        if not self.num_windows:
            return cached
        for border in range(cached, 0, -1):
            name = names[border - 1]
            if name in promised or (window := window_name(name)) in self or window in loads:
                return border
        return 0

    def seal(self, page: int, name: bytes) -> bool:
        """Make a full, computed page findable, unless another page has this hash. Return whether it can be found."""
        if self._hash_of[page] is not None or self._page_of.setdefault(name, page) != page:
            return False
        self._hash_of[page] = name
        return True

    def seal_of(self, request: Request, first: int, pages: Sequence[int]) -> None:
        """`seal` pages of a request, starting at page index `first`. A window page after them belongs to their border and is kept."""
        names = request.page_hashes
        if pages and self.is_window(pages[-1]):
            name = window_name(names[first + len(pages) - 2])
            self.seal(pages[-1], name)
            self.keep(name)
            pages = pages[:-1]
        new = [place for place, page in enumerate(pages, start=first) if self.seal(page, names[place])]
        if self.events is not None and new:
            self.events.computed(self.rank, request, new)

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable. Holders keep them."""
        for page in [page for page in pages if self._hash_of[page] is not None]:
            self._lose(page)

    def flush(self) -> None:
        """Forget all pages, with a single event."""
        events, self.events = self.events, None
        self.forget_all()
        self.events = events
        if events is not None:
            events.cleared(self.rank)

    def forget_all(self) -> None:
        """Forget all pages, with an event for each."""
        for page in list(self._page_of.values()):
            self._lose(page)

    def _lose(self, page: int) -> None:
        self._unname(page)
        if not self._holders[page]:
            free, idle = self._by_kind[self.is_window(page)]
            del idle[page]
            free.append(page)

    def _unname(self, page: int) -> None:
        if self.events is not None:
            self.events.removed(self.rank, "device", (self._hash_of[page],))
        del self._page_of[self._hash_of[page]]
        self._hash_of[page] = None
        self._kept.discard(page)


def extend_hashes(request: Request, page_size: int) -> list[bytes]:
    """Extend `request.page_hashes` to all full pages of its tokens, and return it.

    A page's hash is the SHA-256 of the previous page's hash (of the salt for the first page) and its token ids (int32, little-endian). So
    equal hashes mean equal tokens from the first one on, and equal salts, in every process.
    """
    hashes, tokens = request.page_hashes, request.token_ids
    if len(hashes) < len(tokens) // page_size:
        parent = hashes[-1] if hashes else _root(request.options.cache_salt)
        for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
            parent = sha256(parent + int32s(tokens[start : start + page_size])).digest()
            hashes.append(parent)
    return hashes


def window_name(name: bytes) -> bytes:
    """Return the name of the window page that has the same tokens as the page `name`."""
    return sha256(name + b"window").digest()


def window_columns(tokens: int, page_size: int) -> int:
    """Return the maximum number of pages that `tokens` tokens and the `page_size - 1` tokens before them can touch."""
    return (tokens + 2 * page_size - 3) // page_size + 1


def held_windows(rows: int, tokens: int, page_size: int, num_drafts: int) -> int:
    """Return the maximum number of window pages that requests hold at a time, plus the one that is never allocated.

    rows: running requests, each with drafts of two steps and the page that it may end at. tokens: prompt tokens in all steps in flight.
    """
    return 1 + rows * (HELD_WINDOWS + 3 * num_drafts // page_size) + -(-tokens // page_size)


def _root(salt: str | None) -> bytes:
    # JSON can hold half a surrogate pair, which strict UTF-8 cannot.
    return _NO_SALT if salt is None else sha256(salt.encode("utf-8", "surrogatepass")).digest()
