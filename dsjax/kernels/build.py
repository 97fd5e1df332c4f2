"""Build the native kernels: choose a compiler, cache the library and test it on this machine.

A failure here never prevents a start: it gives a ``BuiltLibrary`` without a path and a note with the reason. A library is code that this
process runs, so a library that another user could have written is never loaded (``dsjax/owned_folder.py``).
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

from dsjax.kernels.run_commands import run_command, run_together
from dsjax.owned_folder import WRITABLE_BY_OTHERS, is_trusted, try_lock, why_distrusted
from sharding.cores import most_threads

SOURCES = Path(__file__).parent / "native"
HARNESS = "harness.cc"
"""Standalone program around the kernels, for tests; not part of the library."""
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-w")
"""-O2 takes a ninth less build time, but then GCC neither specialises the matmul tiles for each call's arguments nor unrolls the loops of
index scores: decodes took 6 % longer, and sparse decodes at long contexts a third longer.
"""
LIGHT, LIGHT_FLAGS = ("bindings.cc",), ("-O1",)
"""Units that compute nothing, and their additional flags. They are linked last, because the linker takes a function that several units
define from the first of them.
"""
_UNFINISHED = "building-"
COMPILE_SECONDS = 600
"""Timeout of a compiler. ``zig``, which first builds its own C++ library, took 55 s on two cores."""
TRY_SECONDS = 120
VERSION_SECONDS = 20
"""Timeout of a compiler's ``--version``."""


@dataclass(frozen=True)
class BuiltLibrary:
    """Path of a library that works here, or None; and a human-readable note."""

    path: Path | None
    note: str = ""


def compiler() -> list[str] | None:
    """Return the C++ compiler's command: ``$CXX`` with arguments (``ccache g++``), clang, GCC, ``c++``, or zig from ``ziglang``."""
    for command in (_words(os.environ.get("CXX", "")), ["clang++"], ["g++"], ["c++"]):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


def _words(command: str) -> list[str]:
    """Split a command like a shell. Keep it whole if it is a program itself; return nothing if it cannot be parsed."""
    try:
        return [command] if shutil.which(command) else shlex.split(command)
    except ValueError:
        return []


def find_or_build(folder: Path | None) -> BuiltLibrary:
    """Return this machine's library from ``folder``, and build it there if it is missing. None: there is no cache folder."""
    if folder is None:
        return BuiltLibrary(None, "there is no folder to keep native kernels in; set HOME or JAX_COMPILATION_CACHE_DIR")
    try:
        return _find_or_build(folder)
    except OSError as error:
        return BuiltLibrary(None, f"native kernels cannot be kept in {folder} ({error.strerror or error})")
    except Exception as error:  # any error: the kernels' plain JAX forms compute the same
        return BuiltLibrary(None, f"native kernels cannot be built or used ({_in_a_line(error)})")


def kept_libraries(folder: Path) -> list[Path]:
    """List the libraries of this version and machine in a folder, built by any compiler."""
    return sorted(folder.glob(f"{source_version()}-{machine()}-*.so"))


def _find_or_build(folder: Path) -> BuiltLibrary:
    command = compiler()
    version = _compiler_version(command) if command else ""
    if folder.is_dir() and (reason := _make_ours(folder)):
        return BuiltLibrary(None, f"native kernels are not loaded: {reason}")
    if command is None or version is None:  # accept a library of any compiler
        silent = f"the compiler {' '.join(command or ())} did not tell its version in {VERSION_SECONDS} s"
        tried = [*map(_use, kept_libraries(folder)), BuiltLibrary(None, silent if command else _NO_COMPILER)]
        return next((library for library in tried if library.path), tried[0])
    path = folder / f"{source_version()}-{machine()}-{_digest(version)}.so"
    if not _is_ours(path):
        with _alone(path):  # processes of one host start together: one builds, the others find its library
            if not _is_ours(path):
                return build(path)
    library = _use(path)
    return library if library.path else BuiltLibrary(None, f"{library.note}; delete the file to have it built anew")


_NO_COMPILER = (
    "there is no C++ compiler for the native kernels (several times faster); pip install 'dsjax[native]' brings one"
)


def _make_ours(folder: Path) -> str | None:
    """Remove other users' write permission from this user's folder. Return why the folder is not trusted, if so."""
    status = folder.stat()
    if is_trusted(status) and status.st_mode & WRITABLE_BY_OTHERS and status.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
    return why_distrusted(folder)


def _is_ours(path: Path) -> bool:
    """Whether the library exists and no other user can have written it. Otherwise it is rebuilt in place."""
    try:
        return path.is_file() and why_distrusted(path) is None
    except OSError:
        return False


def _use(path: Path) -> BuiltLibrary:
    try:
        if reason := why_distrusted(path.resolve()) or why_distrusted(path.resolve().parent):
            return BuiltLibrary(None, f"native kernels are not loaded: {reason}")
    except OSError as error:
        return BuiltLibrary(None, f"the native kernels in {path} cannot be read ({error.strerror or error})")
    return BuiltLibrary(path) if _tried(path) else _try(path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the host-wide lock for building a library.

    Continue without it if locking is impossible or the lock is held for longer than a build can take. Then two processes may build the
    same library, and each replaces the other's by an equal one.
    """
    # Not beside the library, so that a folder where nothing can be built stays untouched.
    user = os.getuid() if hasattr(os, "getuid") else None
    name = f"dsjax-{user}-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.lock"
    descriptor, deadline = None, time.monotonic() + COMPILE_SECONDS + TRY_SECONDS
    while descriptor is None and user is not None:
        try:
            descriptor = try_lock(Path(tempfile.gettempdir(), name))
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        except OSError:
            break
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def find_prebuilt(folder: Path) -> BuiltLibrary:
    """Return the first library of this version that works on this machine, from a folder filled by ``dsjax kernels build``."""
    try:
        paths = sorted(folder.glob(f"{source_version()}-*.so"))
    except OSError as error:
        return BuiltLibrary(None, f"{folder} cannot be read ({error.strerror or error})")
    if not paths:
        return BuiltLibrary(
            None,
            f"{folder} holds no native kernels of this version; make them with dsjax kernels build --output {folder}",
        )
    tried = [_use(path) for path in paths]
    return next((library for library in tried if library.path), tried[0])


def build(path: Path, march: str = "native") -> BuiltLibrary:
    """Compile the kernels for the processor ``march`` into ``path``, and test them if ``march`` is ``native``.

    Raises:
        OSError: the folder cannot be written.
    """
    command = compiler()
    if command is None:
        return BuiltLibrary(None, _NO_COMPILER)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    print(f"building native kernels with {' '.join(command)} -march={march} into {path.parent}", file=sys.stderr)
    started = time.monotonic()
    _clear_unfinished(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED, ignore_cleanup_errors=True) as folder:
        unfinished = Path(folder, path.name)
        reason = compile_library(command, unfinished, march)
        if reason is None and march == "native" and not (tested := _try(unfinished, remember=False)).path:
            reason = tested.note
        if reason is not None:
            return BuiltLibrary(None, reason)
        unfinished.chmod(0o755)  # readable by others, writable by this user only
        unfinished.replace(path)  # atomic: a concurrent build always finds a complete library
    if march == "native":
        _remember(path)
    return BuiltLibrary(path, f"native kernels were built in {time.monotonic() - started:.0f} s")


def _clear_unfinished(folder: Path) -> None:
    """Remove build folders left by killed processes, recognised by an age that no build reaches."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            status = left.stat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > COMPILE_SECONDS + TRY_SECONDS:
                shutil.rmtree(left)


def compile_library(command: list[str], output: Path, march: str) -> str | None:
    """Compile the units next to ``output`` and link them. Return why that failed, or None."""
    flags = [*_flags(march), f"-I{jax.ffi.include_dir()}"]
    all_units = (unit for unit in SOURCES.glob("*.cc") if unit.name != HARNESS)
    # Attention, which takes longest to compile, also sorts first by name.
    units = sorted(all_units, key=lambda unit: (unit.name in LIGHT, unit.name))
    objects = [str(output.with_name(f"{unit.stem}.o")) for unit in units]
    compiles = [
        [*command, *flags, *(LIGHT_FLAGS if unit.name in LIGHT else ()), "-c", str(unit), "-o", made]
        for unit, made in zip(units, objects, strict=True)
    ]
    link = [*command, *flags, "-shared", *objects, "-o", str(output)]
    try:
        ended = run_together(compiles, COMPILE_SECONDS, most_threads())
        if all(code == 0 for code, _ in ended):
            ended = [run_command(link, COMPILE_SECONDS)]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler {' '.join(command)} did not build the native kernels ({_in_a_line(error)})"
    said = next((said for code, said in ended if code != 0), None)
    if said is None:
        return None
    lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["no message"]
    return f"the compiler {' '.join(command)} failed on the native kernels: {lines[0][:300]}"


def _flags(march: str) -> list[str]:
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    target = f"-mcpu={march}" if platform.machine() in ("aarch64", "arm64") else f"-march={march}"
    return [*FLAGS, target, *wide, "-fPIC"]


def _in_a_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:300]


def prebuilt_name(march: str) -> str:
    """Return the file name of a library for the processor ``march``."""
    return f"{source_version()}-{platform.machine()}-{march}.so"


def _try(path: Path, remember: bool = True) -> BuiltLibrary:
    """Test that a library loads and computes correctly, in a subprocess, because code for another processor dies by a signal."""
    program = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).dsjax_self_test())"
    try:
        code, said = run_command([sys.executable, "-S", "-E", "-c", program, str(path.absolute())], TRY_SECONDS)
    except subprocess.TimeoutExpired:
        return BuiltLibrary(None, f"the native kernels in {path} did not finish a small case in {TRY_SECONDS} s")
    except OSError as error:
        return BuiltLibrary(None, f"the native kernels in {path} cannot be tried ({error.strerror or error})")
    if code == 0:
        if remember:
            _remember(path)
        return BuiltLibrary(path)
    last = (said.strip().splitlines() or [f"exit status {code}"])[-1]
    return BuiltLibrary(None, f"the native kernels in {path} do not work on this machine ({last[:200]})")


def _remember(path: Path) -> None:
    # In a read-only folder this fails, and the library is tested at each start.
    with contextlib.suppress(OSError):
        path.with_suffix(".tried").write_text(_trial(path))


def _tried(path: Path) -> bool:
    """Whether exactly these bytes passed the test here. Loading a truncated or overwritten library can kill the process."""
    with contextlib.suppress(OSError, ValueError):
        return path.with_suffix(".tried").read_text() == _trial(path)
    return False


def _trial(path: Path) -> str:
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()} {machine()}\n"


def source_version() -> str:
    """Hash sources, flags and the included jaxlib headers. Return 12 hex digits."""
    digest = hashlib.sha256(" ".join((*FLAGS, *LIGHT, *LIGHT_FLAGS, jaxlib.__version__)).encode())
    headers = Path(jax.ffi.include_dir(), "xla", "ffi", "api")
    for source in (*sorted(SOURCES.iterdir()), *sorted(headers.glob("*.h"))):
        if source.is_file():
            digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> str:
    """Hash the machine properties that a library depends on, because machines of several kinds may share a home directory."""
    try:
        cpu = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    return _digest(f"{platform.machine()} {cpu} {' '.join(platform.libc_ver())} {' '.join(_flags('native'))}")


def _compiler_version(command: list[str]) -> str | None:
    """Return a compiler's ``--version`` output; empty if it prints nothing, None if it hangs."""
    try:
        _, said = run_command([*command, "--version"], VERSION_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return said


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
