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
_ROOM = 2 << 30


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
        raise OptionError("--mesh, --model and the like say what --exact compares; give --exact too")
    findings = list(look())
    if json_file is not None:
        write_json(json_file, [asdict(one) for one in findings])
    else:
        console = report_console()
        for one in findings:
            console.print(
                Text.assemble((f"{one.state:<8}", _STYLES[one.state]), (f"{one.subject}: ", "bold"), one.found)
            )
            if one.advice:
                console.print(Text("        → " + one.advice))
    if any(one.state == "trouble" for one in findings):
        raise typer.Exit(1)


def _compare_layouts(options: ExactOptions, json_file: str | None) -> None:
    check_place("--json", json_file)
    console = report_console(stderr=json_file == "-")
    rows = sweep(options, console)
    if json_file is not None:
        write_json(json_file, rows)
    equal = [row for row in rows if row["verdict"] == "equal"]
    left_out = sum(row["verdict"].startswith("left out") for row in rows)
    console.print(
        f"{len(equal)} of {len(rows) - left_out} equal to one device, {sum(row['exact'] for row in equal)} of them to the bit; "
        f"{left_out} left out, because the engine refuses them",
        highlight=False,
    )
    if not 0 < len(equal) == len(rows) - left_out:
        raise typer.Exit(1)


def look() -> Iterator[Finding]:
    """Yield every finding; checks run before those that depend on them. A check that fails with an exception is a finding too."""
    for part in (
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
            yield from part()
        except Exception as error:  # such as an import that a package's installed version does not have
            subject = part.__name__.strip("_").replace("_", " ")
            yield Finding(subject, "trouble", f"{type(error).__name__}: {' '.join(str(error).split())}", "see above")


def _versions() -> Iterator[Finding]:
    packages = ("dsjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "llguidance")
    installed = {name: installed_version(name) for name in packages}
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    wrong = mismatches()
    for optional in (False, True):
        these = [one for one in wrong if one.is_optional == optional]
        if these:
            told = ", ".join(f"{one.package} is {one.installed or 'not installed'}" for one in these)
            advice = "pip install " + " ".join(f"'{one.wanted}'" for one in these) + ": other versions are not tested"
            yield Finding(
                "optional packages" if optional else "versions", "note" if optional else "trouble", told, advice
            )
    if any(not one.is_optional for one in wrong):
        return
    if installed["jax"] != installed["jaxlib"]:
        advice = f"pip install jaxlib=={installed['jax']}: jax and jaxlib should be the same"
        yield Finding("versions", "note", shown, advice)
    else:
        yield Finding("versions", "ok", f"{shown}, Python {platform.python_version()}")


def _settings() -> Iterator[Finding]:
    for name, why in (
        ("JAX_ENABLE_X64", "dsjax computes in float32 and less, and refuses to start"),
        ("JAX_DISABLE_JIT", "every operation would be started by itself"),
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
        advice = f"{drivers[0]} is there, and JAX uses the processor: pip install 'jax[cuda13]' or 'jax[tpu]', and look at JAX_PLATFORMS"
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
        advice = "another process of this user holds memory here; `nvidia-smi` names it" if busy else ""
        yield Finding(f"memory of device {device.id}", "note" if busy else "ok", shown, advice)


def _interconnect() -> Finding:
    import subprocess

    if shutil.which("nvidia-smi") is None:
        advice = "install the driver's tools to see the links between GPUs"
        return Finding("interconnect", "note", "nvidia-smi is not here", advice)
    command = ["nvidia-smi", "topo", "-m"]
    if " NV" in subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout:
        return Finding("interconnect", "ok", "GPUs are joined by NVLink")
    advice = "exchanges between ranks go through the host: expect them to bound the step; dsjax bench modules --only dispatch times them"
    return Finding("interconnect", "note", "no NVLink between GPUs", advice)


def _memory() -> Iterator[Finding]:
    from dsjax.engine.device.process import available_bytes

    free = available_bytes()
    if free is None:
        yield Finding("host memory", "note", "unknown on this system", "make sure that the weights fit")
        return
    advice = "the demo takes about 2 GB; end other processes, or raise the container's limit" if free < _ROOM else ""
    yield Finding("host memory", "trouble" if advice else "ok", f"{free / 1e9:.1f} GB available", advice)


def _cores() -> Iterator[Finding]:
    cores, machine = available_cores(), os.cpu_count() or 1
    if cores < 1:
        shown = f"{cores:g} of the machine's {machine}, by a quota"
        yield Finding(
            "cores",
            "note",
            shown,
            "even one thread stands still for a part of each period; raise the container's limit",
        )
    else:
        bound = f" of the machine's {machine}, by a quota or this process's affinity" if cores < machine else ""
        yield Finding("cores", "ok", f"{cores:g}{bound}; {most_threads()} threads compute at a time")


def _caches() -> Iterator[Finding]:
    from dsjax.engine.device.process import cache_folder, enable_compile_cache, why_unwritable

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder = enable_compile_cache()
    told = "; ".join(str(one.message) for one in said)
    if folder is None and not told:
        yield Finding(
            "compiled programs", "note", "are not kept, as JAX_ENABLE_COMPILATION_CACHE says", "each start compiles"
        )
    elif told:
        kept_in = cache_folder()
        broken = folder is None or why_unwritable(kept_in) is not None
        advice = "set JAX_COMPILATION_CACHE_DIR to a folder of this user's that can be written"
        yield Finding("compiled programs", "trouble" if broken else "note", told, advice)
    else:
        yield _room("compiled programs", folder, "set JAX_COMPILATION_CACHE_DIR to a disk with room")
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")).absolute()
    there = next(path for path in (home, *home.parents) if path.exists())
    if os.access(there, os.W_OK):
        yield _room("downloaded models", home, "set HF_HOME to a disk with room: DeepSeek-V3 takes 690 GB")
    else:
        advice = "set HF_HOME to a folder that can be written; a model that lies in a folder needs none"
        yield Finding("downloaded models", "note", f"{there} cannot be written", advice)


def _temporary_folder() -> Iterator[Finding]:
    from dsjax.serve.front_ends.engine_server import check_private_listener

    try:
        folder = tempfile.gettempdir()
        check_private_listener()
    except (OSError, UserError) as error:
        yield Finding(
            "temporary folder", "trouble", str(error), "set TMPDIR to a folder that can be written, with a short path"
        )
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


def _room(subject: str, folder: Path, advice: str) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    state = "ok" if free > 5 * _ROOM else "note"
    return Finding(subject, state, f"{folder}, {free / 1e9:.0f} GB free", "" if state == "ok" else advice)


def _compilers() -> Iterator[Finding]:
    for name, packages, extra in (
        ("GPU", ("jax-cuda12-plugin", "jax-cuda13-plugin"), "cuda"),
        ("TPU", ("libtpu",), "tpu"),
    ):
        if any(map(_is_installed, packages)):
            shown = "is here: dsjax dryrun --target can use it, without such a device"
            yield Finding(f"compiler for {name}s", "ok", shown)
        else:
            advice = f"pip install 'dsjax[{extra}]' for dsjax dryrun --target; nothing else needs it on this machine"
            yield Finding(f"compiler for {name}s", "note", "is not installed", advice)
    from dsjax.kernels.build import compiler

    if compiler() is None:
        yield Finding("C++ compiler", "note", "is not here", "only kernels that are built on this machine need one")


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


def _is_installed(package: str) -> bool:
    return bool(installed_version(package, missing=""))
