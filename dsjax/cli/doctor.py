"""`dsjax doctor`: check this machine's setup for dsjax, with advice for each problem."""

import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.text import Text

from dsjax.cli.exact import ExactOptions, sweep
from dsjax.cli.options import options_of
from dsjax.cli.output import JsonFile, report_console, write_json
from dsjax.descriptors import FEW, descriptor_limit, least_descriptors
from dsjax.errors import UserError
from dsjax.options import OptionError, check_place
from dsjax.versions import installed_version, mismatches
from sharding.cores import available_cores, most_threads

_STYLES = {"ok": "green", "note": "yellow", "trouble": "bold red"}
_MIN_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Finding:
    """Result of one check. `state` is `ok`, `note` (works, with a caveat) or `trouble`; `advice` is empty for `ok`."""

    subject: str
    state: str
    found: str
    advice: str = ""


@options_of(exact=ExactOptions)
def doctor(exact: ExactOptions, json_file: JsonFile = None) -> None:
    """Check versions, devices, memory, cores, interconnect, folders, open files, compilers and kernels, and suggest fixes.

    Exit status 1: something is broken, so the server cannot start or runs without it. With --exact, exit status 1: a layout's output
    differs from one device's (bitwise with native kernels).
    """
    if exact.exact:
        _compare_layouts(exact, json_file)
        return
    if exact != ExactOptions():
        raise OptionError("--mesh, --model and other options of the comparison need --exact; give it too")
    findings = list(run_checks())
    if json_file is not None:
        write_json(json_file, [asdict(finding) for finding in findings])
    else:
        console = report_console()
        for finding in findings:
            state, subject = (f"{finding.state:<8}", _STYLES[finding.state]), (f"{finding.subject}: ", "bold")
            console.print(Text.assemble(state, subject, finding.found))
            if finding.advice:
                console.print(Text("        → " + finding.advice))
    if any(finding.state == "trouble" for finding in findings):
        raise typer.Exit(1)


def _compare_layouts(options: ExactOptions, json_file: str | None) -> None:
    check_place("--json", json_file)
    console = report_console(stderr=json_file == "-")
    rows = sweep(options, console)
    if json_file is not None:
        write_json(json_file, rows)
    equal = [row for row in rows if row["verdict"] == "equal"]
    num_refused = sum(row["verdict"].startswith("left out") for row in rows)
    console.print(
        f"{len(equal)} of {len(rows) - num_refused} equal to one device, {sum(row['exact'] for row in equal)} of them to the bit; "
        f"{num_refused} left out, because the engine refuses them",
        highlight=False,
    )
    if not 0 < len(equal) == len(rows) - num_refused:
        raise typer.Exit(1)


def run_checks() -> Iterator[Finding]:
    """Yield every finding; checks run before those that depend on them. A check that fails with an exception is a finding too."""
    for check in (
        _versions,
        _settings,
        _devices,
        _memory,
        _cores,
        _caches,
        _temporary_folder,
        _open_files,
        _compilers,
        _native_kernels,
    ):
        try:
            yield from check()
        except Exception as error:  # such as an import that a package's installed version does not have
            subject = check.__name__.strip("_").replace("_", " ")
            yield Finding(subject, "trouble", f"{type(error).__name__}: {' '.join(str(error).split())}", "see above")


def _versions() -> Iterator[Finding]:
    packages = ("dsjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "llguidance")
    installed = {name: installed_version(name) for name in packages}
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    wrong = mismatches()
    for subject, state, is_optional in (("versions", "trouble", False), ("optional packages", "note", True)):
        packages = [package for package in wrong if package.is_optional == is_optional]
        if packages:
            found = ", ".join(f"{package.package} is {package.installed or 'not installed'}" for package in packages)
            requirements = " ".join(f"'{package.wanted}'" for package in packages)
            yield Finding(subject, state, found, f"pip install {requirements}: other versions are not tested")
    if any(not package.is_optional for package in wrong):
        return
    if installed["jax"] != installed["jaxlib"]:
        advice = f"pip install jaxlib=={installed['jax']}: jax and jaxlib should be the same"
        yield Finding("versions", "note", shown, advice)
    else:
        yield Finding("versions", "ok", f"{shown}, Python {platform.python_version()}")


def _settings() -> Iterator[Finding]:
    for name, why in (
        ("JAX_ENABLE_X64", "dsjax does not start with it"),
        ("JAX_DISABLE_JIT", "every operation would run by itself, without compilation"),
    ):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            yield Finding(name, "trouble", "is on", f"unset it: {why}")
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "dump" in flag)
    if flags:
        yield Finding("XLA_FLAGS", "note", flags, "programs are written to disk as they compile, which takes time")


def _devices() -> Iterator[Finding]:
    from sharding.emulation import most_devices
    from sharding.errors import MeshError
    from sharding.mesh import MeshSpec

    try:
        devices = MeshSpec.parse("dp=1").build().devices.flat[0].client.devices()
    except MeshError as error:
        yield Finding("devices", "trouble", str(error), "see above")
        return
    first = devices[0]
    shown = f"{len(devices)} × {first.device_kind} ({first.platform})"
    if first.platform != "cpu":
        yield Finding("devices", "ok", shown)
        yield from _device_memory(devices)
        if first.platform in ("gpu", "cuda") and len(devices) > 1:
            yield _interconnect()
        return
    drivers = [path for path in ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0") if Path(path).exists()]
    if drivers:
        advice = f"{drivers[0]} exists, but JAX uses the CPU: pip install 'jax[cuda13]' or 'jax[tpu]', and look at JAX_PLATFORMS"
        yield Finding("devices", "note", shown, advice)
    else:
        most, why = most_devices()
        yield Finding("devices", "ok", f"{shown}; up to {most:,} can be emulated, because {why}")


def _device_memory(devices: list) -> Iterator[Finding]:
    for device in devices:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        if not limit:
            continue
        shown = f"{used / 1e9:.1f} of {limit / 1e9:.1f} GB in use"
        busy = used > 0.1 * limit
        advice = "another process uses memory of this device; `nvidia-smi` lists it" if busy else ""
        yield Finding(f"memory of device {device.id}", "note" if busy else "ok", shown, advice)


def _interconnect() -> Finding:
    import subprocess

    if shutil.which("nvidia-smi") is None:
        advice = "install the driver's tools to see the links between GPUs"
        return Finding("interconnect", "note", "nvidia-smi is not installed", advice)
    command = ["nvidia-smi", "topo", "-m"]
    if " NV" in subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout:
        return Finding("interconnect", "ok", "GPUs are joined by NVLink")
    advice = "collectives go through the host and will probably dominate the step time; dsjax bench modules --only dispatch measures them"
    return Finding("interconnect", "note", "no NVLink between GPUs", advice)


def _memory() -> Iterator[Finding]:
    from dsjax.engine.device.process import available_bytes

    free = available_bytes()
    if free is None:
        yield Finding("host memory", "note", "unknown on this system", "make sure that the weights fit")
        return
    advice = (
        "the demo takes about 2 GB; end other processes, or raise the container's limit"
        if free < _MIN_MEMORY_BYTES
        else ""
    )
    yield Finding("host memory", "trouble" if advice else "ok", f"{free / 1e9:.1f} GB available", advice)


def _cores() -> Iterator[Finding]:
    cores, machine = available_cores(), os.cpu_count() or 1
    if cores < 1:
        shown = f"{cores:g} of the machine's {machine}, by a quota"
        yield Finding(
            "cores",
            "note",
            shown,
            "even one thread is paused in each period; raise the container's limit",
        )
    else:
        bound = f" of the machine's {machine}, by a quota or this process's affinity" if cores < machine else ""
        yield Finding("cores", "ok", f"{cores:g}{bound}; {most_threads()} threads compute at a time")


def _caches() -> Iterator[Finding]:
    from dsjax.engine.device.process import cache_folder, enable_compile_cache, why_unwritable

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = enable_compile_cache()
    text = "; ".join(str(warning.message) for warning in caught)
    if folder is None and not text:
        yield Finding(
            "compiled programs",
            "note",
            "not cached, because of JAX_ENABLE_COMPILATION_CACHE",
            "each start compiles them again",
        )
    elif text:
        is_broken = folder is None or why_unwritable(cache_folder()) is not None
        advice = "set JAX_COMPILATION_CACHE_DIR to a writable folder of this user"
        yield Finding("compiled programs", "trouble" if is_broken else "note", text, advice)
    else:
        yield _free_space("compiled programs", folder, "set JAX_COMPILATION_CACHE_DIR to a disk with room")
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")).absolute()
    existing = next(path for path in (home, *home.parents) if path.exists())
    if os.access(existing, os.W_OK):
        yield _free_space("downloaded models", home, "set HF_HOME to a disk with room: DeepSeek-V3 takes 690 GB")
    else:
        advice = "set HF_HOME to a writable folder; models in local folders do not need it"
        yield Finding("downloaded models", "note", f"{existing} is not writable", advice)


def _temporary_folder() -> Iterator[Finding]:
    from dsjax.serve.front_ends.engine_server import check_private_listener

    try:
        folder = tempfile.gettempdir()
        check_private_listener()
    except (OSError, UserError) as error:
        yield Finding("temporary folder", "trouble", str(error), "set TMPDIR to a writable folder with a short path")
    else:
        yield Finding("temporary folder", "ok", folder)


def _open_files() -> Iterator[Finding]:
    limit = descriptor_limit()
    if limit is None:
        yield Finding("open files", "ok", "no limit")
        return
    shown = f"{limit:,} files and connections at a time (ulimit -Hn)"
    advice = "raise the limit: each client has a connection" if limit < FEW else ""
    yield Finding(
        "open files", "ok" if not advice else "note" if limit >= least_descriptors(0) else "trouble", shown, advice
    )


def _free_space(subject: str, folder: Path, advice: str) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    state = "ok" if free > 5 * _MIN_MEMORY_BYTES else "note"
    return Finding(subject, state, f"{folder}, {free / 1e9:.0f} GB free", "" if state == "ok" else advice)


def _compilers() -> Iterator[Finding]:
    for name, packages, extra in (
        ("GPU", ("jax-cuda12-plugin", "jax-cuda13-plugin"), "cuda"),
        ("TPU", ("libtpu",), "tpu"),
    ):
        if any(installed_version(package, missing="") for package in packages):
            shown = "is installed: dsjax dryrun --target can use it without such a device"
            yield Finding(f"compiler for {name}s", "ok", shown)
        else:
            advice = f"pip install 'dsjax[{extra}]' for dsjax dryrun --target; nothing else needs it on this machine"
            yield Finding(f"compiler for {name}s", "note", "is not installed", advice)
    from dsjax.kernels.build import compiler

    if compiler() is None:
        yield Finding("C++ compiler", "note", "is not installed", "needed only to build native kernels on this machine")


def _native_kernels() -> Iterator[Finding]:
    import jax
    import numpy as np

    from dsjax.engine.device.process import cache_folder
    from dsjax.kernels.build import kept_libraries
    from dsjax.kernels.table import choose_kernels

    folder = cache_folder()
    if jax.default_backend() != "cpu" or folder is None or not kept_libraries(folder / "native"):
        return  # not used here, or not built yet: the first start builds them
    kernels = choose_kernels("auto", "cpu", np.dtype(np.float32), devices=1, cache=folder / "native")
    if kernels.native is None:
        yield Finding("native kernels", "trouble", kernels.note, "the plain forms run, several times slower")
    else:
        yield Finding("native kernels", "ok", str(kernels.native.path))
