"""A file's lock is one process's at a time, and given back by closing it or by the process's end."""

import os
import subprocess
import sys

import pytest

from dsjax.file_lock import try_lock


def test_one_at_a_time_has_the_lock(tmp_path):
    descriptor = try_lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        try_lock(tmp_path / "lock")
    os.close(try_lock(tmp_path / "another"))
    os.close(descriptor)
    os.close(try_lock(tmp_path / "lock"))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_process_that_is_killed_gives_it_back(tmp_path):
    program = "import sys, time; from pathlib import Path; from dsjax.file_lock import try_lock\n"
    program += "try_lock(Path(sys.argv[1])); print('has it', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
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
