"""`DividedPages`: one disk cache shared by several executors, each with some of the model's layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.executor import Kind
from dsjax.engine.tiers.disk_pages import DiskPages, Shapes
from dsjax.engine.tiers.page_folder import Page
from dsjax.engine.tiers.page_tiers import PageReporter, PageReports


class _ReadPage(NamedTuple):
    """A page, and the executors that have taken their parts."""

    page: Page
    takers: set[int]


class DividedPages:
    """Joins the parts of pages when writing to disk, and splits pages when reading.

    The disk has pages of the whole model, as if one executor had all layers: parts of an array are concatenated along the layer axis. A
    page is written when all executors have given their parts. It is read once, and kept until all have taken their parts. All executors
    execute the same commands in the same order, and executor 0 is the first to execute each of them.

    Args:
        count: number of executors.
        open_disk: opens the disk for the arrays of whole pages and the names of those on window pages, once the parts of all executors
            are known.

    Attributes:
        reporters: the executors' page reporters. They handle their own parts when reports are requested.
    """

    def __init__(self, count: int, open_disk: Callable[[Shapes, Collection[str]], DiskPages]):
        self._count, self._open = count, open_disk
        self._shapes: list[Shapes] = []
        self._windows: set[str] = set()
        self._disk: DiskPages | None = None
        self.reporters: list[PageReporter] = []
        self._to_write: dict[int, dict[int, Page]] = {}  # by write number, then by executor
        self._read: dict[tuple[int, int], _ReadPage] = {}  # by rank and read number
        self._drops = [0] * count  # number of `drop` calls, by executor
        self._closed: set[int] = set()

    def part(self, shapes: Shapes, windows: Collection[str] = ()) -> SimpleNamespace:
        """Return the next executor's view of the disk, with the methods of `DiskPages`.

        shapes: of its part of a page. windows: names of the arrays on window pages.
        """
        number = len(self._shapes)
        self._shapes.append(shapes)
        self._windows |= {*windows}
        if len(self._shapes) == self._count:
            self._disk = self._open(self._whole_shapes(), self._windows)
        methods = (self.write, self.drop, self.read, self.take, self.forget, self.close)
        # Only whole pages are reported: see `page_reports`.
        part = SimpleNamespace(reports=lambda seconds=0.0: PageReports(read=[], written=[]))
        vars(part).update({method.__name__: partial(method, number) for method in methods})
        return part

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Offer the disk's reports to the scheduler's offload tiers."""
        return self if kind is PageReporter else None

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Return reports of whole pages since the last call. Wait up to `seconds` for the first report."""
        for reporter in self.reporters:
            reporter.page_reports()
        return self._disk.reports(seconds)

    def write(self, part: int, number: int, name: bytes, page: Page) -> None:
        """Add one executor's part of a page, and write the page once all parts are present."""
        by_executor = self._to_write.setdefault(number, {})
        by_executor[part] = page
        if len(by_executor) < self._count:
            return
        del self._to_write[number]
        parts = [by_executor[executor] for executor in range(self._count)]
        arrays = {array for own in parts for array in own}
        joined = {array: np.concatenate([own[array] for own in parts if array in own]) for array in arrays}
        self._disk.write(number, name, joined)

    def drop(self, part: int, everything: bool, names: list[bytes]) -> None:
        """Delete pages when the last executor asks for it, because all earlier writes then have all their parts."""
        before = min(self._drops)
        self._drops[part] += 1
        if min(self._drops) > before:
            self._disk.drop(everything, names)

    def read(self, part: int, rank: int, number: int, name: bytes) -> None:
        """Read a page when the first executor asks for it."""
        if part == 0:
            self._disk.read(rank, number, name)

    def take(self, part: int, rank: int, number: int) -> Page:
        """Return an executor's part of a page that was reported as read."""
        if (rank, number) not in self._read:
            self._read[rank, number] = _ReadPage(self._disk.take(rank, number), set())
        page, takers = self._read[rank, number]
        takers.add(part)
        if len(takers) == self._count:
            del self._read[rank, number]
        arrays = {}
        for array in self._shapes[part].keys() & page.keys():
            shape, _ = self._shapes[part][array]
            first = sum(before[array][0][0] for before in self._shapes[:part] if array in before)
            arrays[array] = page[array][first : first + shape[0]]
        return arrays

    def forget(self, part: int, rank: int, number: int) -> None:
        """Drop a page that was read, or is being read, when the first executor asks for it."""
        if part == 0:
            self._read.pop((rank, number), None)
            self._disk.forget(rank, number)

    def close(self, part: int) -> None:
        """Close the disk once all executors are closed."""
        self._closed.add(part)
        if len(self._closed) == self._count and self._disk is not None:
            self._disk.close()

    def _whole_shapes(self) -> Shapes:
        whole = {}
        for shapes in self._shapes:
            for array, (shape, dtype) in shapes.items():
                before = whole[array][0][0] if array in whole else 0
                whole[array] = ((before + shape[0], *shape[1:]), dtype)
        return whole
