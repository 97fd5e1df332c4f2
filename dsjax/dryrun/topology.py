"""Devices to compile for: emulated CPU devices, or descriptions of accelerators that this machine does not have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from dsjax.errors import UserError
from dsjax.hardware import Hardware
from sharding import MeshError
from sharding.mesh import advice_on_emulation

# Equal for Hopper and Blackwell (CUDA programming guide, compute capabilities 9.0 and 10.0).
_CUDA_LIMITS = """threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64"""
_DEFAULTS = {
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "threads_per_core_limit": 2048,
}
"""Optional fields of a hardware file's [xla] section; the defaults are for Hopper and Blackwell and differ on other GPUs."""
_REQUIRED = {
    "cuda": ("device_name", "core_count", "clock_rate_ghz", "l2_cache_bytes", "compute_capability"),
    "tpu": ("generation",),
}
"""Required fields of a hardware file's [xla] section, by platform."""


def target_devices(hardware: Hardware | None, count: int) -> Sequence[jax.Device]:
    """Return at least ``count`` devices to build a mesh from. hardware: None for the host's own CPU devices.

    Raises:
        UserError: the target's compiler is not installed or rejects the description, or the hardware file has no description.
        MeshError: too few CPU devices were emulated before JAX started.
    """
    if hardware is None:
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise MeshError(
                f"a dry run for {count} devices found {len(devices)} emulated ones; {advice_on_emulation(count)}"
            )
        return devices
    extra = hardware.platform
    try:
        if hardware.platform == "cuda":
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name=hardware.key,
                target_config=cuda_target(hardware),
                topology="x".join(map(str, cuda_shape(hardware, count))),
            ).devices
        # No device is used, so libtpu's lock file, which keeps a second process from a TPU, can be ignored.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        generation = xla_section(hardware)["generation"]
        shape = torus(count)
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{generation}:{'x'.join(map(str, shape))}"
        ).devices
    except (NotImplementedError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--target {hardware.key}: XLA cannot describe these devices here ({reason}); install the compiler with "
            f"pip install 'dsjax[{extra}]' (no {extra.upper()} device or driver is needed), or use --target cpu"
        ) from error


def cuda_shape(hardware: Hardware, count: int) -> tuple[int, int, int]:
    """Return the smallest (scale-up domains, hosts per domain, devices per host) that holds ``count`` devices."""
    if count <= hardware.devices_per_host:
        return 1, 1, count
    hosts = -(-count // hardware.devices_per_host)
    hosts_per_domain = max(1, hardware.scale_up_devices // hardware.devices_per_host)
    if hosts <= hosts_per_domain:
        return 1, hosts, hardware.devices_per_host
    return -(-hosts // hosts_per_domain), hosts_per_domain, hardware.devices_per_host


def torus(count: int) -> tuple[int, int]:
    """Return the squarest 2-D slice of a TPU pod (powers of two, up to 16 × 16) that holds ``count`` chips."""
    side = 0
    while 1 << side < count:
        side += 1
    return 1 << (side // 2), 1 << (side - side // 2)


def xla_section(hardware: Hardware) -> Mapping[str, Any]:
    """Return the [xla] section of a hardware file.

    Raises:
        UserError: a field that this platform's compiler requires is missing.
    """
    missing = [name for name in _REQUIRED[hardware.platform] if name not in hardware.xla]
    if missing:
        lacks = f"no {', '.join(missing)} in its [xla] section" if hardware.xla else "no [xla] section"
        example = {"cuda": "h200", "tpu": "tpu-v6e"}[hardware.platform]
        raise UserError(
            f"hardware {hardware.key!r} has {lacks}, which a dry run compiles by; see configs/hardware/{example}.toml"
        )
    return hardware.xla


def cuda_target(hardware: Hardware) -> str:
    """Return XLA's ``GpuTargetConfigProto`` as text: the inputs of its cost model and of its kernels' tiling."""
    xla = xla_section(hardware)
    major, dot, minor = (capability := str(xla["compute_capability"])).partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise UserError(
            f'hardware {hardware.key!r}: compute_capability in [xla] is {capability!r}, expected text such as "9.0"'
        )
    own = " ".join(f"{name}: {xla.get(name, usual)}" for name, usual in _DEFAULTS.items())
    return f"""gpu_device_info {{ {_CUDA_LIMITS} {own}
  core_count: {xla["core_count"]} clock_rate_ghz: {xla["clock_rate_ghz"]} l2_cache_size: {xla["l2_cache_bytes"]}
  memory_bandwidth: {int(hardware.memory_bandwidth)} device_memory_size: {hardware.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }} name: "{xla["device_name"]}" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}"""
