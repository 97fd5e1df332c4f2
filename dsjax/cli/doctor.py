"""`dsjax doctor`: what this machine has for dsjax, and what to do about what it lacks."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.text import Text

from dsjax.cli.output import JsonFile, report_console, write_json
from dsjax.versions import installed_version

_STYLES = {"ok": "green", "note": "yellow", "trouble": "bold red"}
_MINIMUM_JAX, _BEYOND_JAX = (0, 10, 2), (0, 12)
_ROOM = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `state` is `ok`, `note` (it works, but) or `trouble`; `advice` is empty where it is well."""

    subject: str
    state: str
    found: str
    advice: str = ""


def doctor(
    json_file: JsonFile = None,
) -> None:
    """Look at versions, devices, memory, interconnect, caches and compilers, and say what to do about each.

    Ends with 1 where something is in the way of serving.
    """
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


def look() -> Iterator[Finding]:
    """Every finding, in the order in which one depends on the other."""
    yield from _versions()
    yield from _settings()
    yield from _devices()
    yield from _memory()
    yield from _caches()
    yield from _compilers()


def _versions() -> Iterator[Finding]:
    packages = ("dsjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "llguidance")
    installed = {name: installed_version(name) for name in packages}
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    missing = [name for name in packages[1:] if not _is_installed(name)]
    if missing:
        yield Finding("versions", "trouble", shown, f"pip install {' '.join(missing)}")
        return
    numbers = tuple(int(part) for part in installed["jax"].split(".")[:3] if part.isdigit())
    if not numbers >= _MINIMUM_JAX or not numbers < _BEYOND_JAX:
        yield Finding("versions", "trouble", shown, "pip install 'jax>=0.10.2,<0.12': other versions are not tested")
    elif installed["jax"] != installed["jaxlib"]:
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
    shown = f"{free / 1e9:.1f} GB available, {os.cpu_count()} cores"
    yield Finding("host memory", "trouble" if advice else "ok", shown, advice)


def _caches() -> Iterator[Finding]:
    from dsjax.engine.device.process import enable_compile_cache

    folder = enable_compile_cache()
    if folder is None:
        advice = "set JAX_COMPILATION_CACHE_DIR to a folder that can be written"
        yield Finding("compiled programs", "note", "are not kept", advice)
    else:
        yield _room("compiled programs", folder, "set JAX_COMPILATION_CACHE_DIR to a disk with room")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    yield _room("downloaded models", home, "set HF_HOME to a disk with room: DeepSeek-V3 takes 690 GB")


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
    if shutil.which("c++") is None and shutil.which("g++") is None:
        yield Finding("C++ compiler", "note", "is not here", "only kernels that are built on this machine need one")


def _is_installed(package: str) -> bool:
    return bool(installed_version(package, missing=""))
