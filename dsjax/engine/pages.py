"""`PagePool`: which pages of one rank's latent cache are free."""

from collections.abc import Iterable


class PagePool:
    """The pages 1 … num_pages − 1 of a rank. Page 0 is never given out: padded page-table entries point at it.

    The page freed last is given out first, so that a lightly loaded rank keeps to few pages.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"found {num_pages} pages a rank, expected at least 2: page 0 is reserved")
        if page_size < 1:
            raise ValueError(f"found a page size of {page_size} tokens, expected at least 1")
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray([0] + [1] * (num_pages - 1))

    @property
    def num_usable(self) -> int:
        """Pages that can be allocated at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.num_usable - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def can_allocate(self, count: int) -> bool:
        """Whether so many pages are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take pages. The caller has asked `can_allocate` before."""
        if count > len(self._free):
            raise ValueError(f"asked for {count} pages, {len(self._free)} of {self.num_usable} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Giving back a free page is a fault of the caller and raises."""
        for page in pages:
            if page == 0 or self._is_free[page]:
                raise ValueError(f"page {page} is given back but was not allocated")
            self._is_free[page] = 1
            self._free.append(page)
