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


class _TakenPage(NamedTuple):
    """A whole page from the disk, and the executors that have taken their parts of it."""

    page: Page
    executors: set[int]


class DividedPages:
    """Joins the parts of pages when writing to disk, and splits pages when reading.

    The disk has pages of the whole model, as if one executor had all layers: an array's parts are concatenated along its first axis, the
    layers. A page is written when all executors have given their parts. It is read once, and kept until all have taken their parts. All
    executors execute the same commands in the same order, and executor 0 is the first to execute each of them.

    Args:
        count: number of executors.
        open_disk: opens the disk, once all executors have joined, for the arrays of whole pages and the names of those on window pages.

    Attributes:
        reporters: the executors' page reporters. They handle their own parts when reports are requested.
    """

    def __init__(self, count: int, open_disk: Callable[[Shapes, Collection[str]], DiskPages]):
        self._count, self._open_disk = count, open_disk
        self._shapes: list[Shapes] = []  # of parts, by executor
        self._windows: set[str] = set()
        self._disk: DiskPages | None = None
        self.reporters: list[PageReporter] = []
        self._to_write: dict[int, dict[int, Page]] = {}  # by write number, then by executor
        self._taken: dict[tuple[int, int], _TakenPage] = {}  # by rank and read number
        self._drops = [0] * count  # number of `drop` calls, by executor
        self._closed: set[int] = set()

    def join(self, shapes: Shapes, windows: Collection[str] = ()) -> SimpleNamespace:
        """Add the next executor, and return its view of the disk, with the methods of `DiskPages`.

        shapes: of its part of a page. windows: names of the arrays on window pages.
        """
        executor = len(self._shapes)
        self._shapes.append(shapes)
        self._windows |= {*windows}
        if len(self._shapes) == self._count:
            self._disk = self._open_disk(self._whole_shapes(), self._windows)
        methods = (self.write, self.drop, self.read, self.take, self.forget, self.close)
        # Only whole pages are reported: see `page_reports`.
        view = SimpleNamespace(reports=lambda seconds=0.0: PageReports(read=[], written=[]))
        vars(view).update({method.__name__: partial(method, executor) for method in methods})
        return view

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Offer the disk's reports to the scheduler's offload tiers."""
        return self if kind is PageReporter else None

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Return reports of whole pages since the last call. Wait up to `seconds` for the first report."""
        for reporter in self.reporters:
            reporter.page_reports()
        return self._disk.reports(seconds)

    def write(self, executor: int, number: int, name: bytes, part: Page) -> None:
        """Add one executor's part of a page, and write the page once all parts are present."""
        by_executor = self._to_write.setdefault(number, {})
        by_executor[executor] = part
        if len(by_executor) < self._count:
            return
        del self._to_write[number]
        parts = [part for _, part in sorted(by_executor.items())]
        arrays = {array for part in parts for array in part}
        joined = {array: np.concatenate([part[array] for part in parts if array in part]) for array in arrays}
        self._disk.write(number, name, joined)

    def drop(self, executor: int, everything: bool, names: list[bytes]) -> None:
        """Delete pages when the last executor asks for it, because all earlier writes then have all their parts."""
        done_by_all = min(self._drops)
        self._drops[executor] += 1
        if min(self._drops) > done_by_all:
            self._disk.drop(everything, names)

    def read(self, executor: int, rank: int, number: int, name: bytes) -> None:
        """Read a page when the first executor asks for it."""
        if executor == 0:
            self._disk.read(rank, number, name)

    def take(self, executor: int, rank: int, number: int) -> Page:
        """Return an executor's part of a page that was reported as read."""
        if (rank, number) not in self._taken:
            self._taken[rank, number] = _TakenPage(self._disk.take(rank, number), set())
        page, executors = self._taken[rank, number]
        executors.add(executor)
        if len(executors) == self._count:
            del self._taken[rank, number]
        part = {}
        for array in self._shapes[executor].keys() & page.keys():
            first = sum(_layers(shapes, array) for shapes in self._shapes[:executor])
            part[array] = page[array][first : first + _layers(self._shapes[executor], array)]
        return part

    def forget(self, executor: int, rank: int, number: int) -> None:
        """Drop a page that was read, or is being read, when the first executor asks for it."""
        if executor == 0:
            self._taken.pop((rank, number), None)
            self._disk.forget(rank, number)

    def close(self, executor: int) -> None:
        """Close the disk once all executors are closed."""
        self._closed.add(executor)
        if len(self._closed) == self._count and self._disk is not None:
            self._disk.close()

    def _whole_shapes(self) -> Shapes:
        whole = {}
        for shapes in self._shapes:
            for array, (shape, dtype) in shapes.items():
                whole[array] = ((_layers(whole, array) + shape[0], *shape[1:]), dtype)
        return whole


def _layers(shapes: Shapes, array: str) -> int:
    return shapes[array][0][0] if array in shapes else 0
