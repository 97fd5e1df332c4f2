"""`DividedPages`: pages on a disk that several executors keep together, each of which has a run of the model's layers on its devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np

from dsjax.engine.contract.executor import Kind
from dsjax.engine.tiers.disk_pages import DiskPages, Shapes
from dsjax.engine.tiers.page_folder import Page
from dsjax.engine.tiers.page_tiers import PageReporter, PageReports


class DividedPages:
    """Puts the parts of pages together on their way to the disk, and takes pages apart on their way back.

    The disk has pages of the whole model, as of one executor that has all layers. A page is written when every executor has given its part,
    read once, and kept until each has taken its part. An array of a page is its parts one after the other along the axis of layers; one
    that a single executor has is as it is there. All executors carry out the same commands in order, and the first of them each before the
    others.

    count: of the executors. open_disk: given the arrays of a whole page, once the parts of all are known.

    reporters: of the executors, which look after their own parts when reports are asked for.
    """

    def __init__(self, count: int, open_disk: Callable[[Shapes], DiskPages]):
        self._count, self._open = count, open_disk
        self._shapes: list[Shapes] = []
        self._disk: DiskPages | None = None
        self.reporters: list[PageReporter] = []
        self._given: dict[int, dict[int, Page]] = {}  # by the writing's number, then by executor
        self._taken: dict[tuple[int, int], tuple[Page, set[int]]] = {}  # the page, and who has its part
        self._drops = [0] * count  # how many times each executor has come to delete pages
        self._closed: set[int] = set()

    def part(self, shapes: Shapes) -> SimpleNamespace:
        """Give the disk as the next executor sees it, with the methods of `DiskPages`. shapes: of the arrays of its part of a page."""
        number = len(self._shapes)
        self._shapes.append(shapes)
        if len(self._shapes) == self._count:
            self._disk = self._open(self._whole_shapes())
        methods = (self.write, self.drop, self.read, self.take, self.forget, self.close)
        # What comes of pages is said of whole ones.
        part = SimpleNamespace(reports=lambda seconds=0.0: PageReports([], []))
        vars(part).update({method.__name__: partial(method, number) for method in methods})
        return part

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Offer reports of the disk to the offload tiers of the scheduler."""
        return self if kind is PageReporter else None

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Report what came of whole pages since the last time; wait so long for the first of it."""
        for reporter in self.reporters:
            reporter.page_reports()
        return self._disk.reports(seconds)

    def write(self, part: int, number: int, name: bytes, page: Page) -> None:
        """Take one executor's part of a page, and write the page once its last part has come."""
        given = self._given.setdefault(number, {})
        given[part] = page
        if len(given) < self._count:
            return
        del self._given[number]
        parts = [given[each] for each in range(self._count)]
        whole = {array: np.concatenate([own[array] for own in parts if array in own]) for array in self._whole_shapes()}
        self._disk.write(number, name, whole)

    def drop(self, part: int, everything: bool, names: list[bytes]) -> None:
        """Delete pages once the last executor has come to it: by then all that was to be written before has been given."""
        before = min(self._drops)
        self._drops[part] += 1
        if min(self._drops) > before:
            self._disk.drop(everything, names)

    def read(self, part: int, rank: int, number: int, name: bytes) -> None:
        """Read a page when the first executor asks for it."""
        if part == 0:
            self._disk.read(rank, number, name)

    def take(self, part: int, rank: int, number: int) -> Page:
        """Give an executor its part of a page that was reported as read."""
        if (rank, number) not in self._taken:
            self._taken[rank, number] = self._disk.take(rank, number), set()
        page, takers = self._taken[rank, number]
        takers.add(part)
        if len(takers) == self._count:
            del self._taken[rank, number]
        own = {}
        for array, (shape, _) in self._shapes[part].items():
            first = sum(before[array][0][0] for before in self._shapes[:part] if array in before)
            own[array] = page[array][first : first + shape[0]]
        return own

    def forget(self, part: int, rank: int, number: int) -> None:
        """Keep a page no longer when the first executor wants it no more."""
        if part == 0:
            self._taken.pop((rank, number), None)
            self._disk.forget(rank, number)

    def close(self, part: int) -> None:
        """End when all executors have given what they had to give."""
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
