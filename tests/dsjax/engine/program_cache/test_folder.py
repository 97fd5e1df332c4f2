"""Programs on disk: read whole, and only where nobody else can have written them; those not used for longest make room."""

import gc
import logging
import os

import pytest

from dsjax.engine.program_cache.folder import ProgramFolder

NAME, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path):
    return ProgramFolder.inside(tmp_path)


def files(folder: ProgramFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_what_was_written_is_read_by_whoever_opens_the_folder(folder, tmp_path):
    assert folder.read(NAME) is None
    folder.write(NAME, b"program")
    again = ProgramFolder.inside(tmp_path)
    assert (again.read(NAME), again.read(OTHER)) == (b"program", None)
    assert (folder.num_read, folder.num_written, again.num_read, again.num_written) == (0, 1, 1, 0)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert files(folder) == [f"{NAME}.program"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
        lambda path: path.write_bytes(b"another kind of 1\n" + path.read_bytes()[18:]),
        lambda path: path.write_bytes(path.with_name(f"{OTHER}.program").read_bytes()),
        lambda path: path.chmod(0o666),
    ],
    ids=["cut", "cut in its head", "a bit", "another format", "another one's", "others can write to it"],
)
def test_what_is_not_whole_or_not_its_owners_alone_is_not_read(folder, harm):
    for name in (NAME, OTHER):
        folder.write(name, name.encode())
    harm(folder.path / f"{NAME}.program")
    assert folder.read(NAME) is None


def test_a_store_that_is_no_folder_or_that_others_can_write_to_keeps_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    for cache in (None, tmp_path / "gs:/bucket", tmp_path / "file"):
        assert ProgramFolder.inside(cache) is None
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(0o777)
    assert ProgramFolder.inside(tmp_path) is None
    assert "others can write to" in caplog.text


def test_where_nothing_can_be_written_that_is_said_once(folder, caplog):
    folder.path.rmdir()
    with caplog.at_level(logging.WARNING):
        folder.write(NAME, b"program")
        folder.write(OTHER, b"program")
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_what_was_not_used_for_longest_makes_room_and_foreign_files_stay(tmp_path):
    before = ProgramFolder.inside(tmp_path)
    names = [f"{number:064x}" for number in range(4)]
    for age, name in enumerate(names):
        before.write(name, bytes(1000))
        used = 1_000_000_000 - 100 * age
        os.utime(before.path / f"{name}.program", (used, used))
    assert before.read(names[3]), "it is used now"
    (before.path / "notes.txt").write_bytes(bytes(5000))
    (before.path / "writing-left").touch()
    os.utime(before.path / "writing-left", (1, 1))
    (before.path / "writing-now").touch()
    full = ProgramFolder(before.path, most_bytes=3500)
    full.write(NAME, bytes(1000))
    kept = sorted(f"{name}.program" for name in (names[0], names[3], NAME))
    assert files(full) == sorted([*kept, "notes.txt", "writing-now"])


def test_one_at_a_time_has_the_turn_to_make_a_program(folder, tmp_path):
    another = ProgramFolder.inside(tmp_path)
    with folder.compile_lock(NAME):
        assert another.compile_lock(NAME) is folder.compile_lock(NAME) is None
        another.compile_lock(OTHER).close()
    with another.compile_lock(NAME) as turn:
        turn.close()
        turn.close()
    assert files(folder) == []
    lost = folder.compile_lock(NAME)
    assert another.compile_lock(NAME) is None
    del lost
    gc.collect()
    assert another.compile_lock(NAME) is not None


def test_where_no_turn_can_be_had_everybody_has_one(folder):
    folder.path.rmdir()
    with folder.compile_lock(NAME) as first, folder.compile_lock(NAME) as second:
        assert first is not None
        assert second is not None
