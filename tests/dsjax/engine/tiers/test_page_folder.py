"""Only files of our own form in a folder of our own are ever written, counted or deleted, and only this user's are believed."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from test_disk_pages import OTHER, failing, files, name, page, same

from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.page_folder import MARK, PageFiles, PageFolder
from dsjax.errors import UserError

FIRST, SECOND = name(0), name(1)


def content(folder: Path) -> dict[str, bytes | str | None]:
    """All that lies below a folder, by its path: a file's bytes, a link's target, None for a folder."""

    def held(path):
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): held(path) for path in folder.rglob("*")}


def fill(folder: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def path_of(own_files: PageFiles, page_name: bytes) -> Path:
    return own_files.folder.path / own_files.space / page_name.hex()[:2] / f"{page_name.hex()}.page"


@pytest.mark.parametrize(
    "foreign",
    [
        {"report.writing": "a chapter", "web/index.page": "a page"},
        {"lock": "4711\n"},
        {"lock": "4711\n", f"{'0' * 16}/00/{'0' * 64}.page": "of our form, without the mark"},
        {"lock": "held by somebody else", "notes": ""},
        {f"{MARK}/folder": "no mark"},
    ],
)
def test_a_folder_that_holds_somebody_elses_files_is_refused_and_left_as_it_is(tmp_path, foreign):
    fill(tmp_path, foreign)
    before = content(tmp_path)
    with pytest.raises(UserError, match=r"holds files that are not dsjax's \(.*give a folder that is empty"):
        PageFolder(tmp_path).lock()
    assert content(tmp_path) == before


def test_an_empty_folder_becomes_ours_and_stays_it(tmp_path):
    (tmp_path / "lost+found").mkdir()  # of a disk that was just formatted
    PageFolder(tmp_path).lock().close()
    (tmp_path / "notes").write_text("put there later")
    PageFolder(tmp_path).lock().close()
    assert (tmp_path / MARK).read_text().startswith("This folder holds pages of dsjax's --disk-cache")
    assert PageFolder(tmp_path / "made" / "with parents").lock().path.stat().st_mode & 0o777 == 0o700


def test_what_is_not_of_our_form_is_neither_counted_nor_deleted(tmp_path):
    folder, elsewhere = tmp_path / "pages", tmp_path / "elsewhere"
    own_files, other = files(folder, 0), files(folder, 0, 1, space=OTHER)
    fill(elsewhere, {f"ab/{'ab' * 32}.page": "linked to", f"{'cd' * 32}.page": "linked to"})
    foreign = {
        "draft.writing": "of an editor",
        "site/home.page": "of a website",
        f"{'1' * 15}/00/{'0' * 64}.page": "in a folder whose name has another form",
        f"{own_files.space}/home.page": "a name of another form",
        f"{own_files.space}/zz/{'0' * 64}.page": "in no folder of digits",
        f"{own_files.space}/00/{'11' * 32}.page": "in another folder than its name says",
        f"{own_files.space}/00/{'0' * 63}.writing": "too short a name",
        f"{other.space}/00/old/{'0' * 64}.page": "a folder deeper",
    }
    fill(folder, foreign)
    (folder / ("2" * 16)).symlink_to(elsewhere)
    (folder / own_files.space / "ab").symlink_to(elsewhere / "ab")
    (folder / other.space / "cd").symlink_to(elsewhere)
    (folder / own_files.space / "00" / f"{'00' * 31}ff.page").symlink_to(elsewhere / "ab" / f"{'ab' * 32}.page")
    before = content(folder) | content(elsewhere)
    listing = own_files.list()
    assert list(listing.names) == [FIRST]
    others = [str(path_of(other, one).relative_to(folder)) for one in (FIRST, SECOND)]
    assert [path for _, path, _ in listing.others] == others
    disk = DiskPages(files(PageFolder(folder).lock()), own_files.page_bytes)  # room for one page: the others' go
    disk.drop(True, [])
    disk.close()
    after = content(folder) | content(elsewhere)
    del after["lock"]
    for ours in (*others, str(path_of(own_files, FIRST).relative_to(folder))):
        del before[ours]
    assert after == before


def test_a_folder_of_another_user_or_that_others_can_write_is_refused(tmp_path, give_away):
    PageFolder(tmp_path / "pages").lock().close()
    for mode in (0o770, 0o702, 0o1777):
        (tmp_path / "pages").chmod(mode)
        with pytest.raises(UserError, match=rf"others can write to it \(mode {mode:04o}\); chmod go-w"):
            PageFolder(tmp_path / "pages").lock()
    (tmp_path / "pages").chmod(0o755)
    PageFolder(tmp_path / "pages").lock().close()
    give_away(tmp_path / "pages")
    with pytest.raises(UserError, match=r"belongs to another user .*give one that this user, and nobody else"):
        PageFolder(tmp_path / "pages").lock()


def test_a_page_of_another_user_or_in_a_folder_that_others_can_write_is_not_believed(tmp_path, give_away):
    own_files = files(tmp_path, 0)
    path = path_of(own_files, FIRST)
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        own_files.read(FIRST)
    path.parent.chmod(0o700)
    assert same(own_files.read(FIRST), 0)
    give_away(path)
    with pytest.raises(PermissionError):
        own_files.read(FIRST)
    assert own_files.list().names == {}


def test_a_folder_that_is_deleted_while_serving_is_not_made_again_and_a_space_is(tmp_path):
    """Where a disk was unmounted, pages must not fill the disk below its folder."""
    own_files = files(tmp_path / "pages", 0)
    shutil.rmtree(tmp_path / "pages" / own_files.space)
    with pytest.raises(FileNotFoundError):
        own_files.read(FIRST)
    own_files.write(FIRST, page(0))
    assert list(own_files.list().names) == [FIRST]
    shutil.rmtree(tmp_path / "pages")
    with pytest.raises(FileNotFoundError):
        own_files.write(SECOND, page(1))
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_when_the_weights_are_loaded_still_gives_its_pages(tmp_path, monkeypatch, number):
    files(tmp_path, 0)
    folder = PageFolder(tmp_path).lock()
    (tmp_path / ("1" * 16)).mkdir()
    for call in ("mkdir", "rename", "unlink", "utime"):
        monkeypatch.setattr(os, call, partial(failing, number))
    disk = DiskPages(files(folder), 1 << 20)
    assert disk.reports().listed == {FIRST: 1}
    disk.write(1, SECOND, page(1))
    assert disk.reports(20).written == [(1, False)]
    disk.read(0, 1, FIRST)
    assert disk.reports(20).read == [(0, 1, True)]
    disk.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_at_the_start_is_refused_before_weights_are_read(tmp_path, monkeypatch, number):
    PageFolder(tmp_path).lock().close()
    (tmp_path / "lock").unlink()
    real = os.open

    def fail_to_create(path, flags, *some, **named):
        return failing(number) if flags & os.O_CREAT else real(path, flags, *some, **named)

    monkeypatch.setattr(os, "open", fail_to_create)
    with pytest.raises(UserError, match=f"{os.strerror(number)}; give one that this user, and nobody else, can write"):
        PageFolder(tmp_path).lock()


def test_a_full_disk_that_has_its_lock_takes_it_without_the_number_and_a_file_system_without_locks_is_named(
    tmp_path, monkeypatch
):
    PageFolder(tmp_path).lock().close()
    monkeypatch.setattr(os, "write", partial(failing, errno.ENOSPC))
    PageFolder(tmp_path).lock().close()
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", partial(failing, errno.ENOLCK))
    with pytest.raises(UserError, match="No locks available"):
        PageFolder(tmp_path).lock()
