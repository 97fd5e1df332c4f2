"""Pages survive on the disk, what is no page is never read, and trouble with the disk is a report. Also tests `PageFiles`."""

import errno
import os
import re
import threading
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from waits import until

from dsjax.engine.tiers import disk_pages
from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.page_folder import PageFileError, PageFiles, PageFolder
from dsjax.errors import UserError

# What accelerators have in their caches, bfloat16, NumPy knows by `ml_dtypes` alone.
SHAPES = {"latent": ((2, 4, 6), np.dtype(ml_dtypes.bfloat16)), "filled": ((4,), np.dtype(bool))}
SPACE = {"fingerprint": "f", "page_size": 4}
OTHER = SPACE | {"fingerprint": "g"}


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page(number: int):
    """Values that tell which page they are of, not in the order of the memory."""
    bits = np.arange(48, dtype=np.uint16).reshape(2, 4, 6)[:, :, ::-1] + 0x4000 + 100 * number
    return {"latent": bits.view(ml_dtypes.bfloat16), "filled": np.array([True, False, True, number % 2 == 0])}


def same(read, number):
    return all((read[key] == page(number)[key]).all() for key in SHAPES)


def files(folder, *numbers, space=SPACE):
    """Write these pages to a folder; return its `PageFiles`."""
    own_files = PageFiles(folder if isinstance(folder, PageFolder) else PageFolder(folder), space, SHAPES)
    for number in numbers:
        own_files.write(name(number), page(number))
    return own_files


def file_of(folder, number) -> Path:
    (path,) = Path(folder).glob(f"*/*/{name(number).hex()}.page")
    return path


def test_a_page_is_read_as_it_was_written_by_another_object_too(tmp_path):
    files(tmp_path, 1)
    pages_read = files(tmp_path).read(name(1))
    assert same(pages_read, 1)
    assert {key: (array.shape, array.dtype) for key, array in pages_read.items()} == SHAPES
    for path in (file_of(tmp_path, 1).parent, file_of(tmp_path, 1).parents[1]):
        assert path.stat().st_mode & 0o777 == 0o700
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600


def test_pages_of_two_kinds_are_told_apart_by_their_files(tmp_path):
    kinds = PageFolder(tmp_path), SPACE, SHAPES | {"window": ((2, 3000), np.dtype(np.uint16))}, {"window"}
    window = {"window": np.arange(6000, dtype=np.uint16).reshape(2, 3000)}
    own_files = PageFiles(*kinds)
    assert own_files.write(name(1), page(1)) == own_files.page_bytes == 4096
    assert own_files.write(name(2), window) == 3 * 4096
    found = PageFiles(*kinds)
    assert same(found.read(name(1)), 1)
    np.testing.assert_equal(found.read(name(2)), window)
    assert found.list().names == {name(1): 4096, name(2): 3 * 4096}
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    with pytest.raises(PageFileError, match="another page"):
        found.read(name(1))


@pytest.mark.parametrize("at", [3, 9, 50, 80, 84, 85, 130, -1])
def test_a_changed_byte_anywhere_is_seen(tmp_path, at):
    files(tmp_path, 1)
    data = bytearray(file_of(tmp_path, 1).read_bytes())
    data[at] ^= 1
    file_of(tmp_path, 1).write_bytes(data)
    with pytest.raises(PageFileError):
        files(tmp_path).read(name(1))


def test_a_file_that_ends_early_or_is_of_another_page_is_not_read(tmp_path):
    own_files, path = files(tmp_path, 1, 2), file_of(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(file_of(tmp_path, 2).read_bytes())
    with pytest.raises(PageFileError, match="another page"):
        own_files.read(name(1))
    for length in (60, 128, len(whole) - 1, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(PageFileError, match="torn"):
            own_files.read(name(1))
    assert list(own_files.list().names) == [name(2)]
    assert not path.exists()


def test_pages_of_another_space_are_not_found_and_not_read(tmp_path):
    files(tmp_path, 1, space=OTHER)
    own_files = files(tmp_path)
    assert own_files.list().names == {}
    assert len(own_files.list().others) == 1
    content = file_of(tmp_path, 1).read_bytes()
    files(tmp_path, 1)
    assert same(own_files.read(name(1)), 1)
    (tmp_path / own_files.space / "00" / f"{name(1).hex()}.page").write_bytes(content)
    with pytest.raises(PageFileError):
        own_files.read(name(1))


def test_the_list_is_by_last_use_and_what_was_not_finished_goes(tmp_path):
    own_files = files(tmp_path, 1, 2, 3)
    for number in (1, 2, 3):
        os.utime(file_of(tmp_path, number), (number, number))
    half = file_of(tmp_path, 3).with_suffix(".writing")
    half.write_bytes(b"half")
    own_files.read(name(1))  # is a use
    assert list(own_files.list().names) == [name(2), name(3), name(1)]
    assert not half.exists()


def test_a_second_engine_is_refused_while_the_first_has_the_folder(tmp_path):
    first = PageFolder(tmp_path).lock()
    with pytest.raises(UserError, match=rf"in use by another engine \(process {os.getpid()}\)"):
        PageFolder(tmp_path).lock()
    first.close()
    PageFolder(tmp_path).lock().close()


def failing(number, *_, **__):
    raise OSError(number, os.strerror(number))


class Disk:
    """`DiskPages` on a folder, with waiting for its reports."""

    def __init__(self, folder, max_pages=100):
        own_files = files(PageFolder(folder).lock())
        self.pages = DiskPages(own_files, max_pages * own_files.page_bytes)
        self.listed = self.pages.reports().listed

    def write(self, *numbers):
        for number in numbers:
            self.pages.write(number, name(number), page(number))
        written = {}
        self.wait(lambda reports: written.update(reports.written) or written.keys() >= set(numbers))
        return {number: written[number] for number in numbers}

    def read(self, *numbers):
        for number in numbers:
            self.pages.read(0, number, name(number))
        read = []
        self.wait(lambda reports: read.extend(reports.read) or len(read) == len(numbers))
        return {number: self.pages.take(0, number) if ok else None for _, number, ok in read}

    def wait(self, done):
        until(lambda: done(self.pages.reports(0.05)))


@pytest.fixture
def disk(tmp_path):
    kept = Disk(tmp_path)
    yield kept
    kept.pages.close()


def test_what_one_run_wrote_the_next_one_finds_though_the_end_came_meanwhile(tmp_path, patient_disk):
    first = Disk(tmp_path)
    assert first.listed == {}
    assert first.write(1, 2, 3) == dict.fromkeys((1, 2, 3), True)
    for number in range(4, 24):
        first.pages.write(number, name(number), page(number))
    first.pages.close()
    second = Disk(tmp_path)
    assert sorted(second.listed) == [name(number) for number in range(1, 24)]
    assert all(same(read, number) for number, read in second.read(3, 21).items())
    second.pages.close()


def test_what_an_earlier_run_left_goes_first_as_far_as_the_bytes_demand(tmp_path, patient_disk):
    """Others' pages before its own, and what was used longest ago before what was used since."""
    files(tmp_path, 10, 11, 12, 13, space=OTHER)
    own_files = files(tmp_path, 0, 1, 2, 3)
    for number in range(4):
        os.utime(file_of(tmp_path, number), (number, number))
    disk = Disk(tmp_path, max_pages=5)
    assert list(disk.listed) == [name(0), name(1), name(2), name(3)]
    assert len(own_files.list().others) == 1
    disk.write(4)
    assert len(own_files.list().others) == 0
    disk.pages.close()
    disk = Disk(tmp_path, max_pages=2)
    assert sorted(disk.listed) == [name(3), name(4)]
    disk.pages.close()
    assert sorted(own_files.list().names) == [name(3), name(4)]


def test_a_damaged_page_is_reported_and_warned_of_once(tmp_path, disk, caplog):
    disk.write(1, 2, 3)
    for number in (1, 2):
        file_of(tmp_path, number).write_bytes(b"not a page")
    pages_read = disk.read(1, 2, 3, 4)
    assert [pages_read[number] is None for number in (1, 2, 3, 4)] == [True, True, False, True]
    assert len(re.findall("is torn", caplog.text)) == 1


def test_a_full_disk_is_reported_and_warned_of_once(tmp_path, disk, caplog, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", partial(failing, errno.ENOSPC))
        assert disk.write(1, 2) == {1: False, 2: False}
    assert caplog.text.count("No space left on device") == 1
    assert not list(tmp_path.glob("*/*/*"))
    assert disk.write(3) == {3: True}


def test_of_a_folder_that_cannot_be_listed_nothing_is_found_and_no_number_is_told(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(disk_pages.PageFiles, "list", partial(failing, errno.EIO))
    unlisted = Disk(tmp_path)
    assert unlisted.listed == {}
    assert "its pages cannot be listed (Input/output error)" in caplog.text
    assert "pages of this model" not in caplog.text
    assert unlisted.write(1) == {1: True}
    unlisted.pages.close()


def test_a_slow_disk_keeps_nobody_waiting(disk, monkeypatch):
    """Neither does writing, nor reading; what was given up is not reported when it comes at last."""
    go_on, real = threading.Event(), disk_pages.PageFiles.read
    disk.write(1)
    monkeypatch.setattr(disk_pages.PageFiles, "read", lambda files, name: go_on.wait(60) and real(files, name))
    disk.pages.read(0, 1, name(1))
    disk.pages.read(0, 2, name(1))
    assert disk.pages.reports().read == []
    disk.pages.forget(0, 1)
    go_on.set()
    read = []
    disk.wait(lambda reports: read.extend(reports.read) or read)
    assert read == [(0, 2, True)]
