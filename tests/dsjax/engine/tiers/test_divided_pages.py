"""Pages that several executors have parts of are whole on the disk, or not there, and each gets its own part back."""

import time

import numpy as np
import pytest
from test_disk_pages import SHAPES, SPACE, name, page, same

from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.divided_pages import DividedPages
from dsjax.engine.tiers.page_folder import PageFiles, PageFolder


def part_of(number, part):
    """One of two parts, a layer each, of a page whose values tell which page they are of; the last has the marks of filled slots too."""
    own = {"latent": page(number)["latent"][part : part + 1]}
    return own | {"filled": page(number)["filled"]} if part == 1 else own


class Divided:
    """Two executors' parts of one disk."""

    def __init__(self, folder):
        self.folder = folder
        self.pages = DividedPages(2, self._open)
        shapes = [{key: (array.shape, array.dtype) for key, array in part_of(0, part).items()} for part in (0, 1)]
        self.first, self.last = self.parts = [self.pages.part(one) for one in shapes]
        self.reports()  # the list of pages

    def _open(self, shapes, windows):
        assert shapes == SHAPES
        return DiskPages(PageFiles(PageFolder(self.folder).lock(), SPACE, shapes, windows), 1 << 20)

    def reports(self):
        return self.pages.page_reports()

    def write(self, *numbers):
        for number in numbers:
            for place, part in enumerate(self.parts):
                part.write(number, name(number), part_of(number, place))
        self.wait_for(*numbers)

    def wait_for(self, *numbers):
        written = {}
        while not written.keys() >= set(numbers):
            written |= self.reports().written
            time.sleep(0.001)
        assert all(written.values())

    def read(self, number, place):
        for part in self.parts:
            part.read(0, place, name(number))
        while not (read := self.reports().read):
            time.sleep(0.001)
        assert read == [(0, place, True)]

    def names(self):
        return sorted(PageFiles(PageFolder(self.folder), SPACE, SHAPES).list().names)

    def close(self):
        for part in self.parts:
            part.close()


@pytest.fixture
def disk(tmp_path):
    made = Divided(tmp_path)
    yield made
    made.close()


def test_a_page_of_parts_is_the_file_that_one_executor_writes_and_reads(disk, tmp_path):
    disk.write(1)
    whole = PageFiles(PageFolder(tmp_path), SPACE, SHAPES)
    assert same(whole.read(name(1)), 1)
    whole.write(name(2), page(2))
    for number in (1, 2):
        disk.read(number, 7)
        for place in (0, 0, 1):  # one takes its part twice
            taken = disk.parts[place].take(0, 7)
            expected = part_of(number, place)
            assert taken.keys() == expected.keys()
            assert all(np.array_equal(taken[key], expected[key]) for key in expected)
        with pytest.raises(KeyError):  # all have their parts: it is kept no longer
            disk.first.take(0, 7)


def test_a_page_without_one_of_its_parts_is_not_there_even_at_the_end(disk):
    disk.first.write(1, name(1), part_of(1, 0))
    disk.write(2)
    disk.last.write(3, name(3), part_of(3, 1))
    disk.close()
    assert disk.names() == [name(2)]


def test_deleting_comes_after_what_all_were_to_write_before(disk):
    disk.first.write(1, name(1), part_of(1, 0))
    disk.first.drop(False, [name(1)])
    disk.first.write(2, name(2), part_of(2, 0))
    disk.last.write(1, name(1), part_of(1, 1))
    disk.last.drop(False, [name(1)])
    disk.last.write(2, name(2), part_of(2, 1))
    disk.write(3)
    assert disk.names() == [name(2), name(3)]


def test_a_number_that_is_forgotten_and_used_again_brings_the_new_page_to_all(disk):
    disk.write(1, 2)
    disk.read(1, 5)
    disk.first.take(0, 5)  # an interrupt, and nobody takes the rest
    for part in disk.parts:
        part.forget(0, 5)
    disk.read(2, 5)
    first, last = (part.take(0, 5) for part in disk.parts)
    assert np.array_equal(np.concatenate([first["latent"], last["latent"]]), page(2)["latent"])
