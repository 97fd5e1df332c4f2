"""Environment of every test: 32 emulated CPU devices, set before anything imports JAX; and how many processes share the tests."""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import httpx._config as _http_config
import httpx._transports.default as _http
import hypothesis
import pytest
from cpu_seconds import CpuSeconds
from jaxtyping import install_import_hook
from quick_compilation import QUICK_COMPILATION, SERVING_FLAG
from shapes import CHECKED, SHAPES_FLAG

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them and their processes ignore the Ctrl-C that some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine, which others may use as well.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# The number of emulated devices, and a stuck collective that aborts in three minutes instead of hanging the suite.
_XLA_FLAGS = (
    *QUICK_COMPILATION,
    "--xla_force_host_platform_device_count=32",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=180",
)

COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "d" / "compiled"
"""Compiled programs, for all processes of this run and of later ones; `pytest --cache-clear` empties it. Half of a program's cost is
saved where another test, process or run has compiled the same."""

OLD_SECONDS = 7 * 24 * 3600
"""Programs that were kept so long ago are most likely nobody's any more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --serving-compilation` and `pytest --check-shapes`."""
    parser.addoption(SERVING_FLAG, action="store_true", help="compile as `dsjax serve` does, instead of quickly")
    parser.addoption(SHAPES_FLAG, action="store_true", help="hold arrays to the shapes and dtypes in signatures")


def _wants_gpu(arguments: Sequence[str]) -> bool:
    """Whether the run is `pytest -m gpu`: then JAX chooses the platform, and XLA's own settings hold."""
    return ("-m", "gpu") in itertools.pairwise(arguments) or "-mgpu" in arguments


def _set_environment() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set its environment")
    # A container may tell Python to keep no bytecode: every process that a test starts would then compile the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if _wants_gpu(sys.argv):
        return
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS)).strip()
    os.environ.setdefault("PJRT_NPROC", "64")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Where in which file an operation was written takes a tenth of tracing and lowering, and no test asks.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


_set_environment()
_COMPILED_BEFORE = os.environ.get("JAX_COMPILATION_CACHE_DIR")

# httpx reads the certificates of all authorities for every client, which `httpx.get` makes anew each time: 50 ms, thousands of times. No
# client here changes its context, and hardly one uses it.
_http.create_ssl_context = functools.cache(_http.create_ssl_context)
# Where a test says nothing else, httpx would give a server five seconds for each answer, which on a busy machine may take longer.
for _part in ("connect", "read", "write", "pool"):
    setattr(_http_config.DEFAULT_TIMEOUT_CONFIG, _part, 120.0)

# JAX's traces are large graphs that live as long as their programs; Python would look through them every 700 new objects. What there is
# when all files have been read stays: it is looked through neither meanwhile nor later (`pytest_collection_finish`).
gc.disable()
gc.set_threshold(20_000, 20, 50)

SECONDS = Path(__file__).with_name("seconds.json")
"""CPU seconds of the test files in a run of the whole suite; `tools/test_times.py` writes it."""

MOST_PROCESSES = 8
PROCESS_BYTES = 4 * 2**30
"""Each process has 32 devices and programs of its own."""


def most_processes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """One more than there are cores, since many tests wait for a server or a process, as far as the memory goes.

    Cores and memory are the container's where it has less than the machine.
    """

    def limit(name: str) -> list[float]:
        try:
            return [float(part) for part in (cgroup / name).read_text().split()]
        except (OSError, ValueError):  # no such file, or no limit: "max"
            return []

    from sharding.cores import available_cores

    cores = available_cores(cgroup=cgroup)
    memory = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limit("memory.max")])
    return max(1, min(math.ceil(cores) + 1, int(memory // PROCESS_BYTES), MOST_PROCESSES))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Processes of a run; `-n` on the command line wins.

    pytest's own process alone for a single file, which one process would run anyhow, and where there is one GPU to share.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if _wants_gpu(config.invocation_params.args):
        return 0
    named = [Path(argument.partition("::")[0]) for argument in config.args]
    files = {file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
    return 0 if len(files) < 2 else min(most_processes(), len(files))


def pytest_configure(config: pytest.Config) -> None:
    """Count CPU seconds; check shapes, if asked; throw old programs away, in the process that starts the others."""
    if config.getoption(SHAPES_FLAG):
        install_import_hook(CHECKED, "shapes.check_arrays")
    config.pluginmanager.register(CpuSeconds(config), "cpu-seconds")
    if not hasattr(config, "workerinput"):
        drop_old_programs(COMPILED)


def drop_old_programs(folder: Path) -> None:
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run has just done so
            if path.is_file() and time.time() - path.stat().st_mtime > OLD_SECONDS:
                path.unlink()


def longest_first(items: Sequence[pytest.Item], seconds: Mapping[str, float], root: Path) -> list[pytest.Item]:
    """Tests by file, in the order of what the files took; files with slow tests of which that is not known come first.

    Begun last, a long file would be waited for while the other processes idle. seconds: of files, by their paths from `root`.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    unknown = {path: math.inf if path in slow else 0.0 for path in {item.path for item in items}}
    known = {path: seconds.get(path.relative_to(root).as_posix(), otherwise) for path, otherwise in unknown.items()}
    return sorted(items, key=lambda item: -known[item.path])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = longest_first(items, json.loads(SECONDS.read_text()), SECONDS.parents[1])


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but for the modules and tests that have been read.

    Raises:
        RuntimeError: one of these has changed where compiled programs are kept: what tests start would compile, and build kernels, anew.
    """
    if (found := os.environ.get("JAX_COMPILATION_CACHE_DIR")) != _COMPILED_BEFORE:
        raise RuntimeError(f"a test, or what it imports, has set JAX_COMPILATION_CACHE_DIR to {found}")
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def kernels():
    """The native kernels of this machine, with two threads a call; every test that needs them is skipped where they cannot be built."""
    import numpy as np

    from dsjax.engine.device.process import cache_folder
    from dsjax.kernels.table import choose_kernels

    found = choose_kernels("auto", "cpu", np.dtype(np.float32), devices=1, cache=cache_folder() / "native")
    if found.native is None:
        pytest.skip(found.note)
    return found


@pytest.fixture
def cache_settings():
    """JAX's settings of its cache, which a test may change."""
    import jax

    from dsjax.engine.device import process

    settings = ("min_compile_time_secs", "enable_xla_caches")
    names = ("compilation_cache_dir", "enable_compilation_cache", *(f"persistent_cache_{one}" for one in settings))
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    process.compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def no_programs_on_disk():
    """Engines of this file neither find programs of other engines on disk nor leave any: it counts what is compiled."""
    from dsjax.engine.program_cache.folder import ProgramFolder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramFolder, "inside", lambda cache: None)
        yield


_ROOMS = ("fp4", "kernels", "model", "engine.device", "engine.pipeline", "engine.afd")
_TRACED = ("sharding", *(f"dsjax.{room}" for room in _ROOMS))
"""Packages whose functions a program's trace calls."""


def _is_traced(target: object) -> bool:
    """Whether a program's trace may depend on what is changed there: a module, a class, a function or an object, or its dotted name."""
    if not isinstance(target, str):
        named = target if hasattr(target, "__name__") else type(target)
        target = f"{getattr(named, '__module__', '')}." if not isinstance(named, ModuleType) else named.__name__
    return any(target == package or target.startswith(f"{package}.") for package in _TRACED)


class _Patch(pytest.MonkeyPatch):
    """`monkeypatch` that turns the folder of compiled programs off once a test has changed code that is traced.

    A program's name on disk is made from the files of the source, which a changed attribute does not change.
    """

    def setattr(self, target, *arguments, **options):
        if _is_traced(target):
            from dsjax.engine.program_cache.folder import ProgramFolder

            super().setattr(ProgramFolder, "inside", lambda cache: None)
            # An engine of the whole file has its folder already.
            super().setattr(ProgramFolder, "read", lambda folder, name: None)
            super().setattr(ProgramFolder, "write", lambda folder, name, data: None)
        super().setattr(target, *arguments, **options)


@pytest.fixture
def monkeypatch():
    """Replace pytest's `monkeypatch`: a test that changes traced code neither reads nor keeps compiled programs."""
    patch = _Patch()
    yield patch
    patch.undo()
