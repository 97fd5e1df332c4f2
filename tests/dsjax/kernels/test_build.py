"""What stands between a start and its kernels: compilers, folders and other machines' libraries never stop it."""

import dataclasses
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from typer.testing import CliRunner
from waits import until

from dsjax.bench.modules.options import ModelOptions
from dsjax.cli.main import app
from dsjax.engine.device.process import cache_folder
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.kernels import build, native_calls
from dsjax.kernels.table import TABLE, choose_kernels


def choose(choice="auto", platform="cpu", dtype=np.float32, **options):
    return choose_kernels(choice, platform, np.dtype(dtype), **({"devices": 1, "cache": None} | options))


def why_plain(**options):
    """The one line that says why no native kernel is chosen."""
    chosen = choose(**options)
    assert chosen.native is None
    assert "\n" not in chosen.note
    return chosen.note


def test_what_computes_is_compiled_with_all_optimisation_and_linked_before_what_does_not(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(build, "run_together", lambda commands, *_: ran.extend(commands) or [(0, "")])
    monkeypatch.setattr(build, "run_command", lambda command, _: ran.append(command) or (0, ""))
    assert build.compile_library(["c++"], tmp_path / "kernels.so", "native") is None
    *compiles, link = ran
    light = [Path(command[command.index("-c") + 1]) for command in compiles if "-O1" in command]
    assert [path.name for path in light] == list(build.LIGHT)
    linked = [Path(name).stem for name in link if name.endswith(".o")]
    assert linked[-len(light) :] == [path.stem for path in light]
    assert all("-O3" in command for command in compiles)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)


def script(path, text):
    """The name of a program of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def broken_compiler(monkeypatch, tmp_path, text):
    monkeypatch.setenv("CXX", script(tmp_path / "broken-c++", text))


@pytest.mark.parametrize(("given", "arguments"), [("sh -c true", ["-c", "true"]), ("sh", []), ("sh 'a b'", ["a b"])])
def test_the_compiler_asked_for_may_have_arguments_and_a_path_with_spaces(monkeypatch, tmp_path, given, arguments):
    monkeypatch.setenv("CXX", given)
    assert build.compiler() == [shutil.which("sh"), *arguments]
    program = tmp_path / "my compilers" / "c++"
    program.parent.mkdir()
    program.symlink_to(shutil.which("sh"))
    monkeypatch.setenv("CXX", str(program))
    assert build.compiler() == [str(program)]


@pytest.mark.parametrize("given", ["", " ", "'", "no-such-compiler -O2"])
def test_what_names_no_compiler_leaves_the_choice(no_compiler, monkeypatch, given):
    monkeypatch.setenv("CXX", given)
    assert build.compiler() is None


@pytest.mark.parametrize("options", [EngineArgs, ModelOptions])
def test_every_choice_but_auto_names_rows_of_the_table(options):
    (field,) = (field for field in dataclasses.fields(options) if field.name == "kernels")
    assert set(field.metadata["choices"]) == {"auto"} | {row.name for row in TABLE}


@pytest.mark.parametrize(
    ("platform", "dtype", "reason"), [("METAL", np.float32, "CPU platform"), ("cpu", np.float16, "--dtype is float16")]
)
def test_auto_is_plain_where_native_cannot_run_and_native_an_error_that_says_why(platform, dtype, reason):
    assert reason in why_plain(platform=platform, dtype=dtype)
    with pytest.raises(UserError, match=f"--kernels is native, but .*{reason}.*; use --kernels auto or plain"):
        choose("native", platform, dtype)


def test_without_a_compiler_the_note_says_what_brings_one(no_compiler, tmp_path):
    assert "pip install 'dsjax[native]'" in why_plain(cache=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x.cc:1: error: no such header' >&2; exit 1", "no such header"),
        ("exit 9", "failed on the native kernels: no message"),
        ("printf 'error: \\377\\376' >&2; exit 1", "failed on the native kernels: error:"),  # this is no text
        # It says that all is well and leaves no library behind.
        ("exit 0", "do not work on this machine"),
    ],
)
def test_a_broken_compiler_costs_one_line(monkeypatch, tmp_path, script, reason):
    broken_compiler(monkeypatch, tmp_path, script)
    assert reason in why_plain(cache=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_one_line(monkeypatch, tmp_path):
    broken_compiler(monkeypatch, tmp_path, "exit 9")  # so that there is one; it is never called
    (tmp_path / "file").touch()
    assert "native kernels cannot be kept in" in why_plain(cache=tmp_path / "file" / "native")


def test_what_was_built_is_found_again_and_tried_once(kernels, monkeypatch):
    monkeypatch.setattr(build, "build", lambda path: pytest.fail("it was built before"))
    monkeypatch.setattr(build, "_try", lambda path: pytest.fail("it was tried before"))
    assert choose(cache=cache_folder() / "native").native.path == kernels.native.path


def copied(kernels, folder, name=None):
    """The kernels' library in a folder of its own, or under another name."""
    path = folder / "kept" / (name or kernels.native.path.name)
    path.parent.mkdir(exist_ok=True)
    return shutil.copy(kernels.native.path, path)


def test_a_library_that_hangs_costs_one_line(kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(build.sys, "executable", script(tmp_path / "hangs", "exec sleep 60"))
    monkeypatch.setattr(build, "TRY_SECONDS", 0.1)
    assert "did not finish a small case" in why_plain(cache=copied(kernels, tmp_path).parent)


def test_another_machines_library_is_tried_and_left_alone(kernels, tmp_path):
    (tmp_path / kernels.native.path.name).write_bytes(b"\x7fELF of another machine")
    assert "do not work on this machine" in why_plain(cache=tmp_path)


def os_error(number):
    return Mock(side_effect=OSError(number, os.strerror(number)))


def zeroed(patch, path):
    """Write a file of the same length, as a file system that was full, or lost its last writes, leaves one."""
    path.write_bytes(bytes(path.stat().st_size))


LIBC, FFI = OSError("library: version `GLIBC_2.99' not found"), RuntimeError("FFI API version\nmismatch")
AFTER_IT_WORKED = {
    "overwritten": zeroed,
    "cut": lambda patch, path: path.write_bytes(path.read_bytes()[:5000]),
    "of another libc": lambda patch, _: patch.setattr(native_calls.ctypes, "CDLL", Mock(side_effect=LIBC)),
    "without a kernel": lambda patch, _: patch.setattr(native_calls.ctypes, "CDLL", lambda name: object()),
    "refused by JAX": lambda patch, _: patch.setattr(jax.ffi, "register_ffi_target", Mock(side_effect=FFI)),
    "deleted meanwhile": lambda patch, _: patch.setattr(
        build, "_tried", lambda path: shutil.rmtree(path.parent) or True
    ),
    "unreadable": lambda patch, _: patch.setattr(build.Path, "resolve", os_error(errno.EIO)),
}


@pytest.mark.parametrize("case", AFTER_IT_WORKED)
def test_a_library_that_worked_once_and_does_not_load_now_costs_one_line(kernels, monkeypatch, tmp_path, case):
    path = copied(kernels, tmp_path)
    assert choose(cache=path.parent).native.path == path
    assert path.with_suffix(".tried").exists()
    with monkeypatch.context() as patch:
        patch.setattr(native_calls, "_libraries", dict)  # as in a new process
        AFTER_IT_WORKED[case](patch, path)
        assert "native kernels" in why_plain(cache=path.parent)


BEFORE_IT_IS_BUILT = {
    "no temporary folder": (tempfile, "gettempdir", os_error(errno.ENOENT)),
    "no process can be started": (build.subprocess, "Popen", os_error(errno.EAGAIN)),
    "no descriptor is left": (build.os, "memfd_create", os_error(errno.EMFILE)),
    "no sources": (build, "SOURCES", Path("missing")),
    "no headers of JAX": (jax.ffi, "include_dir", Mock(side_effect=AttributeError("gone"))),
    "no interpreter": (build.sys, "executable", None),
}


@pytest.mark.parametrize("case", BEFORE_IT_IS_BUILT)
def test_whatever_is_missing_where_kernels_are_built_costs_one_line(monkeypatch, tmp_path, case):
    broken_compiler(monkeypatch, tmp_path, "exit 0")
    with monkeypatch.context() as patch:
        patch.setattr(*BEFORE_IT_IS_BUILT[case])
        assert "native kernels" in why_plain(cache=tmp_path / "kept")


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    started = tmp_path / "started"
    text = f"[ $1 = --version ] && [ ! -e {started} ] && exit; sleep 600 & echo $! > {started}; wait"
    broken_compiler(monkeypatch, tmp_path, text)
    monkeypatch.setattr(build, "COMPILE_SECONDS", 4)  # in which the shell has begun what does not end
    assert "did not build the native kernels" in choose(cache=tmp_path / "kept").note
    status = Path("/proc", started.read_text().strip(), "status")
    until(lambda: not status.exists() or "State:\tZ" in status.read_text())  # a signal takes a moment
    monkeypatch.setattr(build, "VERSION_SECONDS", 0.2)
    assert "did not tell its version" in choose(cache=tmp_path / "kept").note


def test_a_lock_that_is_never_given_back_or_is_somebody_elses_keeps_nobody_waiting(monkeypatch, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0)
    monkeypatch.setattr(build, "TRY_SECONDS", 0)
    with build._alone(Path("library")):
        (path,) = tmp_path.iterdir()
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with build._alone(Path("library")):
            pass
    path.unlink()
    (tmp_path / "victim").write_text("whole")
    path.symlink_to(tmp_path / "victim")
    with build._alone(Path("library")):
        assert (tmp_path / "victim").read_text() == "whole"


def test_a_library_that_others_can_have_written_is_built_anew(kernels, monkeypatch, tmp_path):
    path = copied(kernels, tmp_path)
    path.chmod(0o775)
    monkeypatch.setattr(build, "build", lambda path: build.BuiltLibrary(None, f"built anew: {path}"))
    assert choose(cache=path.parent).note == f"built anew: {path}"
    path.chmod(0o755)
    path.parent.chmod(0o777)  # this user's own, and so it is mended
    assert choose(cache=path.parent).native.path == path
    assert path.parent.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("part", ["folder", "library"])
def test_another_users_library_is_not_loaded(kernels, give_away, monkeypatch, tmp_path, part):
    paths = [copied(kernels, tmp_path, name) for name in (None, build.prebuilt_name("native"))]
    folder = paths[0].parent
    monkeypatch.setattr(build, "build", lambda path: build.BuiltLibrary(None, "belongs to another user: built anew"))
    for path in [folder] if part == "folder" else paths:
        give_away(path)
    assert "belongs to another user" in why_plain(cache=folder)
    with pytest.raises(UserError, match=r"are not loaded: .* belongs to another user"):
        choose("native", prebuilt=folder)


def test_what_builds_have_left_that_were_killed_goes_with_the_next_one(monkeypatch, tmp_path):
    old, new = tmp_path / "building-old", tmp_path / "building-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - build.COMPILE_SECONDS - build.TRY_SECONDS - 60,) * 2)
    monkeypatch.setattr(build, "compile_library", lambda *_: "enough")
    assert build.build(tmp_path / "library.so").note == "enough"
    assert [left.name for left in tmp_path.glob("building-*")] == ["building-new"]


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (build, "FLAGS", (*build.FLAGS, "-g")),
        (build.platform, "libc_ver", lambda: ("glibc", "2.99")),
        (build.platform, "machine", lambda: "riscv64"),
        (build.jaxlib, "__version__", "0.99"),
        (build, "_compiler_version", lambda command: "another compiler"),
    ],
)
def test_the_name_of_a_kept_library_depends_on_what_the_library_depends_on(monkeypatch, tmp_path, module, name, value):
    broken_compiler(monkeypatch, tmp_path, "echo version 1")
    monkeypatch.setattr(build, "build", lambda path: build.BuiltLibrary(None, str(path)))
    before = choose(cache=tmp_path).note
    assert choose(cache=tmp_path).note == before
    monkeypatch.setattr(module, name, value)
    assert choose(cache=tmp_path).note != before


def test_the_headers_of_jax_are_part_of_the_version(monkeypatch, tmp_path):
    before, api = build.source_version(), Path("xla", "ffi", "api")
    shutil.copytree(jax.ffi.include_dir() / api, tmp_path / api)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert build.source_version() == before
    with (tmp_path / api / "c_api.h").open("a") as file:
        file.write("\n#define XLA_FFI_API_MINOR 99\n")
    assert build.source_version() != before


def test_what_was_built_is_used_when_the_compiler_has_gone(kernels, no_compiler, tmp_path):
    path = copied(kernels, tmp_path)
    assert choose(cache=path.parent).native.path == path


def test_prebuilt_kernels_are_used_and_others_refused(kernels, tmp_path, no_compiler):
    with pytest.raises(UserError, match="holds no native kernels of this version"):
        choose("native", prebuilt=tmp_path)
    path = copied(kernels, tmp_path, build.prebuilt_name("b-second"))
    (path.parent / build.prebuilt_name("a-first")).write_bytes(b"of another machine")
    assert choose("native", prebuilt=path.parent).native.path == path


def test_the_command_lists_the_table_and_reports_what_it_cannot_build(no_compiler, tmp_path):
    listed = CliRunner().invoke(app, ["kernels", "list"])
    assert all(row.operation in listed.output for row in TABLE)
    failed = CliRunner().invoke(app, ["kernels", "build", "--output", str(tmp_path / "made")])
    assert isinstance(failed.exception, UserError)
    assert "there is no C++ compiler" in str(failed.exception)
