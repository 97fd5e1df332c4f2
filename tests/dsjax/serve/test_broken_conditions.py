"""Start-up under each of the broken conditions: a degraded start that says so in a line, or a refusal before weights are read.

Beside this file: `test_page_folder.py` (the disk cache) and `test_build.py` (native kernels).
"""

import asyncio
import errno
import os
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from worded_checkpoint import write_worded_checkpoint

from dsjax import descriptors
from dsjax.engine.device import process
from dsjax.errors import UserError
from dsjax.messaging.cluster_key import local_key
from dsjax.serve.front_ends import engine_server, processes
from dsjax.serve.front_ends.processes import FrontEnds
from dsjax.serve.serving import Phase


def raising(number):
    return Mock(side_effect=OSError(number, os.strerror(number)))


def enabled() -> tuple[Path | None, str]:
    """Enable the cache, compile something, and give what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder = process.enable_compile_cache()
        again = process.enable_compile_cache()  # as compiling ahead does
        assert again == folder
        jax.jit(lambda x: x * 3 + len(str(folder)))(1.0)
    return folder, "\n".join({str(each.message) for each in said})


def test_without_a_home_programs_are_not_kept_and_kernels_are_not_built(cache_settings, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    jax.config.update("jax_compilation_cache_dir", None)
    assert process.cache_folder() is None
    said = "there is no home folder; set HOME, XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR"
    assert enabled() == (None, f"compiled programs will not be kept: {said}")


@pytest.mark.parametrize(
    ("case", "given"), [("a file in the way", True), ("a file in the way", False), ("read-only", True), ("full", False)]
)
def test_an_unwritable_cache_costs_one_line(cache_settings, monkeypatch, tmp_path, case, given):
    above = tmp_path / "above"
    if case == "a file in the way":
        above.touch()
    else:
        number = errno.EROFS if case == "read-only" else errno.ENOSPC
        monkeypatch.setattr(process.tempfile, "TemporaryFile", raising(number))
    folder = above / "dsjax" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    jax.config.update("jax_compilation_cache_dir", str(folder) if given else None)
    kept_in, said = enabled()
    assert kept_in is None
    assert said.startswith(f"compiled programs will not be kept: cannot write {folder} (")
    assert "\n" not in said


def test_a_cache_that_can_only_be_read_is_read(cache_settings, monkeypatch, tmp_path):
    (tmp_path / "program").touch()
    monkeypatch.setattr(process.tempfile, "TemporaryFile", raising(errno.EROFS))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    folder, said = enabled()
    assert folder == tmp_path
    assert said.startswith(f"compiled programs are read from {tmp_path}, and new ones are not kept")
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def test_a_cache_that_others_can_write_is_warned_of(cache_settings, tmp_path):
    tmp_path.chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert "run in this process, and others can write" in enabled()[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", r"/missing: No such file.*set TMPDIR to a writable folder"), ("long" * 30, "too long for a socket")],
)
def test_a_missing_temporary_folder_or_one_with_a_long_path_is_refused(monkeypatch, tmp_path, name, message):
    """Before weights are read. No other folder for temporary files can be written."""
    folder, make = tmp_path / name, tempfile.mkdtemp
    if name != "missing":
        folder.mkdir()

    def make_there_alone(prefix, dir):
        return make(prefix=prefix, dir=dir) if Path(dir) == folder else raising(errno.EROFS)()

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(engine_server.tempfile, "mkdtemp", make_there_alone)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(UserError, match=message):
        engine_server.check_private_listener()
    assert name == "missing" or list(folder.iterdir()) == []


def test_without_any_folder_to_write_to_a_cluster_key_is_asked_for(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", raising(errno.ENOENT))
    with pytest.raises(UserError, match=r"there is no HOME, and no folder for temporary files\); give one with"):
        local_key({})


def test_another_folder_for_temporary_files_is_taken_where_the_first_has_a_long_path(monkeypatch, tmp_path):
    long, short = tmp_path / ("long" * 30), Path("/tmp")
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with engine_server.private_listener() as listener:
        folder = Path(listener.getsockname()).parent
        assert folder.parent == short
        assert folder.stat().st_mode & 0o777 == 0o700
    engine_server.shutil.rmtree(folder)
    engine_server.check_private_listener()


@pytest.mark.parametrize(("limits", "front_ends", "after", "refused", "said"), [
    ((1024, 1 << 20), 0, 65536, False, None),
    ((256, -1), 0, 65536, False, None),
    ((-1, -1), 2, -1, False, None),
    ((64, 64), 2, 64, False, "about 16 clients can be connected"),
    ((31, 31), 0, 31, True, "may have 31 files and connections open at a time (ulimit -Hn), and a server needs 32"),
    ((64, 64), 8, 64, True, "and a server and 8 front ends needs 96; raise the limit, or give a smaller --api-server-count"),
])  # fmt: skip
def test_few_descriptors_are_raised_warned_of_or_refused(monkeypatch, caplog, limits, front_ends, after, refused, said):
    now = [limits]
    calls = {"getrlimit": lambda _: now[-1], "setrlimit": lambda _, limits: now.append(limits)}
    monkeypatch.setitem(sys.modules, "resource", SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1, **calls))
    with pytest.raises(UserError, match=re.escape(said)) if refused else nullcontext():
        descriptors.check_descriptors(front_ends)
    warned = [record.getMessage() for record in caplog.records if record.name == descriptors.__name__]
    assert len(warned) == (bool(said) and not refused)
    assert all(said in one for one in warned)
    assert now[-1][0] == after


def test_a_front_end_that_cannot_be_started_again_is_tried_until_it_can(monkeypatch):
    tried, failures = [], []
    engine = SimpleNamespace(front_ends=None, on_death=lambda: None, fail=failures.append)
    with engine_server.socket.socket() as listener:
        front_ends = FrontEnds(engine, [listener], lambda index, address: None)
        front_ends._phase = Phase.READY

        def start(*_, **__):
            tried.append(1)
            front_ends._ending = len(tried) == 9
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(processes.subprocess, "Popen", start)
        monkeypatch.setattr(processes, "_RESTART_SECONDS", 0)
        asyncio.run(asyncio.wait_for(front_ends._keep_running(0), 60))
    assert len(tried) == 9
    assert failures == []


@pytest.mark.slow
def test_a_model_is_loaded_where_nothing_can_be_kept(tmp_path):
    """One real process: no home, a cache in a folder that is a file, temporary files nowhere but in the working folder, few descriptors."""
    (tmp_path / "file").touch()
    environment = {name: os.environ[name] for name in os.environ.keys() - {"HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"}}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "file" / "compiled"),
        "TMPDIR": str(tmp_path / "missing"),
        "PYTHONPATH": str(Path.cwd()),
    }
    model = write_worded_checkpoint(tmp_path)
    sizes = "--max-tokens 2 --max-model-len 32 --max-num-seqs 1"
    command = f"ulimit -n 64; exec $0 -m dsjax generate --model $1 --mesh dp=1 --prompt hi {sizes}"
    words, how = ["bash", "-c", command, sys.executable, str(model)], {"env": environment, "cwd": tmp_path}
    ended = subprocess.run(words, **how, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("hi")
    assert "compiled programs will not be kept: cannot write" in ended.stderr
    assert "Traceback" not in ended.stderr
