"""Only what this user or root has written is believed; files are whole; a file's lock is one process's at a time.

What pages, programs and keys make of it: `test_page_folder.py`, `test_folder.py`, `test_cluster_key.py`.
"""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from dsjax.owned_folder import DistrustedError, OwnedFolder, open_file, try_lock, write_whole


def test_one_at_a_time_has_the_lock(tmp_path):
    descriptor = try_lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        try_lock(tmp_path / "lock")
    os.close(try_lock(tmp_path / "another"))
    os.close(descriptor)
    os.close(try_lock(tmp_path / "lock"))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_killed_gives_it_back(tmp_path):
    program = "import sys, time; from pathlib import Path; from dsjax.owned_folder import try_lock\n"
    program += "try_lock(Path(sys.argv[1])); print('has it', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has it\n"
        with pytest.raises(BlockingIOError):
            try_lock(tmp_path / "lock")
        process.kill()
    os.close(try_lock(tmp_path / "lock"))


def test_a_link_is_not_followed_and_a_folder_that_is_missing_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="link"):
        try_lock(tmp_path / "link")
    assert not (tmp_path / "file").exists()
    with pytest.raises(FileNotFoundError):
        try_lock(tmp_path / "missing" / "lock")


def test_another_users_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        try_lock(tmp_path / "lock")


def content(folder: OwnedFolder, name: str, *below: str, **options) -> bytes:
    with folder.opened(*below) as descriptor, os.fdopen(open_file(name, descriptor, **options), "rb") as file:
        return file.read()


def test_a_file_is_there_whole_or_not_at_all_and_once_keeps_the_first(tmp_path):
    folder = OwnedFolder(tmp_path / "made" / "here")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    with folder.opened() as descriptor:
        for text in (b"first", b"second"):
            write_whole(descriptor, "replaced", "unfinished", [text])
            write_whole(descriptor, "kept", "unfinished", [text], once=True)
        with pytest.raises(RuntimeError):
            write_whole(descriptor, "replaced", "unfinished", map(Mock(side_effect=RuntimeError), "a"))
    assert (content(folder, "replaced"), content(folder, "kept")) == (b"second", b"first")
    assert sorted(os.listdir(folder.path)) == ["kept", "replaced"]
    assert (folder.path / "kept").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("mode", "private"), [(0o770, False), (0o702, False), (0o750, True), (0o704, True)])
def test_what_others_can_write_is_refused_and_what_they_can_read_where_it_is_private(tmp_path, mode, private):
    folder = OwnedFolder(tmp_path, private=private)
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode & 0o666)
    with pytest.raises(DistrustedError, match="others can"):
        content(folder, "file", private=private)
    tmp_path.chmod(mode)
    with pytest.raises(DistrustedError, match=f"mode {mode:04o}"):
        OwnedFolder(tmp_path, private=private)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_read_through_a_link_or_from_a_pipe_nor_written_through_a_link(tmp_path, kind):
    folder, victim = OwnedFolder(tmp_path / "folder"), tmp_path / "victim"
    victim.write_bytes(b"whole")
    path = folder.path / "file"
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match=r"symbolic links|it is no regular file"):  # and a pipe keeps nobody waiting
        content(folder, "file")
    (folder.path / "unfinished").symlink_to(victim)
    with folder.opened() as descriptor:
        write_whole(descriptor, "file", "unfinished", [b"new"])
    assert (content(folder, "file"), path.is_symlink(), victim.read_bytes()) == (b"new", False, b"whole")


def test_a_private_folder_is_no_link_and_not_made_with_its_parents(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    OwnedFolder(tmp_path / "link").close()
    for path in (tmp_path / "link", tmp_path / "missing" / "folder"):
        with pytest.raises(OSError):  # noqa: PT011 ELOOP or ENOTDIR, ENOENT
            OwnedFolder(path, private=True)


def test_another_folder_in_its_place_changes_nothing(tmp_path):
    folder = OwnedFolder(tmp_path / "folder")
    with folder.opened("below", make=True) as descriptor:
        write_whole(descriptor, "file", "unfinished", [b"ours"])
    folder.path.rename(tmp_path / "moved")
    (folder.path / "below").mkdir(parents=True)
    (folder.path / "below" / "file").write_bytes(b"theirs")
    assert content(folder, "file", "below") == b"ours"
    folder.close()
    with pytest.raises(OSError, match="closed"), folder.opened():
        pass
