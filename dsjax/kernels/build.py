"""Building the native kernels: which compiler, where the library is kept, and whether it works on this machine.

Nothing here ever stops a start: what cannot be built or used is a ``BuiltLibrary`` without a path, and a line that says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

SOURCES = Path(__file__).parent / "native"
BINDINGS = SOURCES / "bindings.cc"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-w")
COMPILE_SECONDS = 600
"""After which a compiler is taken to hang. ``zig``, which builds its own C++ library first, took 55 s on two cores."""


TRY_SECONDS = 120


@dataclass(frozen=True)
class BuiltLibrary:
    """A library that works here, or None; and a line for people."""

    path: Path | None
    note: str = ""


def compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX``, clang, GCC, whatever is called ``c++``, or zig from the package ``ziglang``."""
    for name in (os.environ.get("CXX"), "clang++", "g++", "c++"):
        if name and (path := shutil.which(name)):
            return [path]
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


def find_or_build(folder: Path | None) -> BuiltLibrary:
    """This machine's library from ``folder``; built there first if it is missing. None: nowhere to keep it."""
    if folder is None:
        return BuiltLibrary(None, "there is no folder to keep native kernels in")
    path = folder / f"{_key('native')}.so"
    try:
        if path.is_file():
            return BuiltLibrary(path) if _tried(path) else _try(path)
        with _alone(
            path
        ):  # several processes of one host start together: one builds, and the others find what it built
            if path.is_file():
                return BuiltLibrary(path) if _tried(path) else _try(path)
            return build(path)
    except OSError as error:
        return BuiltLibrary(None, f"native kernels cannot be kept in {folder} ({error.strerror or error})")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a library that is to be built, as no other process of this host does; without effect where the system has none."""
    owner, name = getattr(os, "getuid", int)(), hashlib.sha256(str(path).encode()).hexdigest()[:16]
    # Not beside the library: where nothing can be built, nothing is left there either.
    with Path(tempfile.gettempdir(), f"dsjax-{owner}-{name}.lock").open("w") as file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or the process ends
        yield


def find_prebuilt(folder: Path) -> BuiltLibrary:
    """The first library in a folder that ``dsjax kernels build`` filled, of this version, that works on this machine."""
    paths = sorted(folder.glob(f"{source_version()}-*.so"))
    if not paths:
        return BuiltLibrary(
            None,
            f"{folder} holds no native kernels of this version; make them with dsjax kernels build --output {folder}",
        )
    tried = [_try(path, remember=False) for path in paths]
    return next((library for library in tried if library.path), tried[0])


def build(path: Path, march: str = "native") -> BuiltLibrary:
    """Compile the kernels for the processor ``march`` into ``path``, and try them if that is this machine's.

    Raises:
        OSError: the folder cannot be written.
    """
    command = compiler()
    if command is None:
        return BuiltLibrary(
            None,
            "there is no C++ compiler for the native kernels (several times faster); pip install 'dsjax[native]' brings one",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="building-", suffix=".so", delete=False) as file:
        unfinished = Path(file.name)
    print(f"building native kernels with {' '.join(command)} -march={march} into {path.parent}", file=sys.stderr)
    started = time.monotonic()
    try:
        reason = compile_library(command, unfinished, march)
        if reason is None and march == "native" and not (tested := _try(unfinished, remember=False)).path:
            reason = tested.note
        if reason is not None:
            return BuiltLibrary(None, reason)
        unfinished.replace(path)  # at once: another process that builds the same finds a whole library, its own or ours
    finally:
        unfinished.unlink(missing_ok=True)
    if march == "native":
        _remember(path)
    return BuiltLibrary(path, f"native kernels were built in {time.monotonic() - started:.0f} s")


def compile_library(command: list[str], output: Path, march: str) -> str | None:
    """Run the compiler; why it failed, or None."""
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    target = f"-mcpu={march}" if platform.machine() in ("aarch64", "arm64") else f"-march={march}"
    arguments = [
        *FLAGS,
        target,
        *wide,
        "-fPIC",
        "-shared",
        f"-I{jax.ffi.include_dir()}",
        str(BINDINGS),
        "-o",
        str(output),
    ]
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler {' '.join(command)} did not build the native kernels ({error})"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
    return f"the compiler {' '.join(command)} failed on the native kernels: {lines[0][:300]}"


def prebuilt_name(march: str) -> str:
    """File name of a library for the processor ``march``."""
    return f"{source_version()}-{platform.machine()}-{march}.so"


def _try(path: Path, remember: bool = True) -> BuiltLibrary:
    """Whether a library loads and computes rightly here. In a process of its own: a wrong processor's ends by a signal."""
    program = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).dsjax_self_test())"
    command = [sys.executable, "-S", "-E", "-c", program, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_SECONDS)
    except subprocess.TimeoutExpired:
        return BuiltLibrary(None, f"the native kernels in {path} did not finish a small case in {TRY_SECONDS} s")
    if done.returncode == 0:
        if remember:
            _remember(path)
        return BuiltLibrary(path)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return BuiltLibrary(None, f"the native kernels in {path} do not work on this machine ({last[:200]})")


def _remember(path: Path) -> None:
    # In a folder that only holds what others made, a library is tried at each start.
    with contextlib.suppress(OSError):
        path.with_suffix(".tried").write_text(f"{path.stat().st_size}\n")


def _tried(path: Path) -> bool:
    mark = path.with_suffix(".tried")
    return mark.is_file() and mark.read_text() == f"{path.stat().st_size}\n"


def source_version() -> str:
    """Hash sources, flags and jaxlib, whose headers are compiled in: 12 hexadecimal digits."""
    digest = hashlib.sha256(" ".join((*FLAGS, jaxlib.__version__)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]


def _key(march: str) -> str:
    """The version, and this machine: a home directory may be shared by several kinds of them."""
    try:
        cpu = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    machine = hashlib.sha256(f"{platform.machine()} {cpu} {march}".encode()).hexdigest()[:8]
    return f"{source_version()}-{machine}"
