"""What stands between a start and its kernels: compilers, folders and other machines' libraries never stop it."""

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.device.process import cache_folder
from dsjax.errors import UserError
from dsjax.kernels import build
from dsjax.kernels.table import CHOICES, OPERATIONS, TABLE, Kernels, choose_kernels


def choose(choice="auto", platform="cpu", dtype=np.float32, **options):
    return choose_kernels(choice, platform, np.dtype(dtype), **({"devices": 1, "cache": None} | options))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)


def broken_compiler(monkeypatch, tmp_path, script):
    path = tmp_path / "bin" / "broken-c++"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_every_choice_but_auto_names_rows_of_the_table_and_every_operation_has_its_plain_form():
    assert set(CHOICES) == {"auto"} | {row.name for row in TABLE}
    for operation in OPERATIONS:
        assert next(row.name for row in TABLE if row.operation == operation) == "plain"


def test_the_form_that_caches_keys_of_each_head_stays_plain(kernels):
    assert kernels.name("decode attention", "A_CC_ME") == kernels.name("experts") == "native"
    assert kernels.name("decode attention", "CD") == kernels.name("other products") == "plain"


def test_plain_needs_and_says_nothing():
    assert choose("plain") == Kernels()


@pytest.mark.parametrize(
    ("platform", "dtype", "reason"), [("METAL", np.float32, "CPU platform"), ("cpu", np.float16, "--dtype is float16")]
)
def test_auto_is_plain_where_native_cannot_run_and_native_an_error_that_says_why(platform, dtype, reason):
    found = choose(platform=platform, dtype=dtype)
    assert found.native is None
    assert reason in found.note
    with pytest.raises(UserError, match=f"--kernels is native, but .*{reason}.*; use --kernels auto or plain"):
        choose("native", platform, dtype)


def test_without_a_compiler_the_note_says_what_brings_one(no_compiler, tmp_path):
    found = choose(cache=tmp_path / "kept")
    assert found.native is None
    assert "pip install 'dsjax[native]'" in found.note
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x.cc:1: error: no such header' >&2; exit 1", "no such header"),
        ("exit 9", "failed on the native kernels: no message"),
        # It says that all is well and leaves no library behind.
        ("exit 0", "do not work on this machine"),
    ],
)
def test_a_broken_compiler_costs_one_line(monkeypatch, tmp_path, script, reason):
    broken_compiler(monkeypatch, tmp_path, script)
    found = choose(cache=tmp_path / "kept")
    assert found.native is None
    assert reason in found.note
    assert "\n" not in found.note
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_one_line(monkeypatch, tmp_path):
    broken_compiler(monkeypatch, tmp_path, "exit 9")  # so that there is one; it is never called
    (tmp_path / "file").touch()
    found = choose(cache=tmp_path / "file" / "native")
    assert found.native is None
    assert "native kernels cannot be kept in" in found.note


def test_what_was_built_is_found_again_and_tried_once(kernels, monkeypatch):
    monkeypatch.setattr(build, "build", lambda path: pytest.fail("it was built before"))
    monkeypatch.setattr(build, "_try", lambda path: pytest.fail("it was tried before"))
    again = choose(cache=cache_folder() / "native")
    assert again.native.path == kernels.native.path


def test_a_library_in_a_folder_that_cannot_be_written_is_used(kernels, monkeypatch, tmp_path):
    shutil.copy(kernels.native.path, tmp_path)
    monkeypatch.setattr(build.Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    found = choose(cache=tmp_path)
    assert found.native.path == tmp_path / kernels.native.path.name


def test_a_library_that_hangs_costs_one_line(kernels, monkeypatch, tmp_path):
    shutil.copy(kernels.native.path, tmp_path)
    monkeypatch.setattr(build, "TRY_SECONDS", 0)
    found = choose(cache=tmp_path)
    assert found.native is None
    assert "did not finish a small case" in found.note


def test_another_machines_library_is_tried_and_left_alone(kernels, tmp_path):
    library = tmp_path / kernels.native.path.name
    library.write_bytes(b"\x7fELF of another machine")
    found = choose(cache=tmp_path)
    assert found.native is None
    assert "do not work on this machine" in found.note


def test_prebuilt_kernels_are_used_and_others_refused(kernels, tmp_path, no_compiler):
    with pytest.raises(UserError, match="holds no native kernels of this version"):
        choose("native", prebuilt=tmp_path)
    (tmp_path / build.prebuilt_name("a-first")).write_bytes(b"of another machine")
    shutil.copy(kernels.native.path, tmp_path / build.prebuilt_name("b-second"))
    assert choose("native", prebuilt=tmp_path).native.path == tmp_path / build.prebuilt_name("b-second")


def test_the_command_lists_the_table_and_reports_what_it_cannot_build(no_compiler, tmp_path):
    listed = CliRunner().invoke(app, ["kernels", "list"])
    assert all(row.operation in listed.output for row in TABLE)
    failed = CliRunner().invoke(app, ["kernels", "build", "--output", str(tmp_path / "made")])
    assert isinstance(failed.exception, UserError)
    assert "there is no C++ compiler" in str(failed.exception)
