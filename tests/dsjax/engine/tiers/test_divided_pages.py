"""Pages that several executors have parts of are whole on the disk, or not there, and each gets its own part back."""

import numpy as np
import pytest
from test_disk_pages import SHAPES, SPACE, files, name, page, same
from waits import until

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
        self.first, self.last = self.parts = [self.pages.join(one) for one in shapes]
        self.pages.page_reports()  # the list of pages

    def _open(self, shapes, windows):
        assert shapes == SHAPES
        return DiskPages(PageFiles(PageFolder(self.folder).lock(), SPACE, shapes, windows), 1 << 20)

    def write(self, *numbers):
        for number in numbers:
            for place, part in enumerate(self.parts):
                part.write(number, name(number), part_of(number, place))
        written = {}
        until(lambda: written.update(self.pages.page_reports().written) or written.keys() >= set(numbers))
        assert all(written.values())

    def read(self, number, place):
        for part in self.parts:
            part.read(0, place, name(number))
        read = []
        until(lambda: read.extend(self.pages.page_reports().read) or read)
        assert read == [(0, place, True)]

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
    assert same(files(tmp_path).read(name(1)), 1)
    files(tmp_path, 2)
    for number in (1, 2):
        disk.read(number, 7)
        for place in (0, 0, 1):  # one takes its part twice
            np.testing.assert_equal(disk.parts[place].take(0, 7), part_of(number, place))
        with pytest.raises(KeyError):  # all have their parts: it is kept no longer
            disk.first.take(0, 7)


def test_a_page_without_one_of_its_parts_is_not_there_even_at_the_end(disk):
    disk.first.write(1, name(1), part_of(1, 0))
    disk.write(2)
    disk.last.write(3, name(3), part_of(3, 1))
    disk.close()
    assert sorted(files(disk.folder).list().names) == [name(2)]


def test_deleting_comes_after_what_all_were_to_write_before(disk):
    for place, part in enumerate(disk.parts):
        part.write(1, name(1), part_of(1, place))
        part.drop(False, [name(1)])
        part.write(2, name(2), part_of(2, place))
    disk.write(3)
    assert sorted(files(disk.folder).list().names) == [name(2), name(3)]


def test_a_number_that_is_forgotten_and_used_again_brings_the_new_page_to_all(disk):
    disk.write(1, 2)
    disk.read(1, 5)
    disk.first.take(0, 5)  # an interrupt, and nobody takes the rest
    for part in disk.parts:
        part.forget(0, 5)
    disk.read(2, 5)
    first, last = (part.take(0, 5) for part in disk.parts)
    assert np.array_equal(np.concatenate([first["latent"], last["latent"]]), page(2)["latent"])
