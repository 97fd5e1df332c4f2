"""What the device can do at most: its vendor's figures, or, on a CPU, a copy and a large product measured in the same run."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dsjax.bench.modules.setting import Setting, free_memory
from dsjax.bench.modules.timing import DROWNED, Budget, PreparedCase, device_loop
from dsjax.errors import UserError
from dsjax.hardware import bundled_hardware, load_hardware
from dsjax.hardware.this_machine import cpu_name, host_memory

_COPY_BYTES = 256 << 20
_SIDE = 2048


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations a second that no module can exceed, and where the figures are from. The fields are those of the JSON."""

    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Device:
    """What was measured: its name, as the planner compares it; JAX's platform; memory; a file of `configs/hardware`, if any.

    The fields are those of the JSON.
    """

    name: str
    platform: str
    memory_bytes: int
    hardware: str | None
    count: int

    @classmethod
    def of(cls, device: jax.Device) -> Device:
        """The device that JAX runs on."""
        name = cpu_name() if device.platform == "cpu" else device.device_kind
        stats = None if device.platform == "cpu" else device.memory_stats()
        memory = int(stats["bytes_limit"]) if stats else host_memory()
        count = 1 if device.platform == "cpu" else len(jax.devices())
        return cls(name, device.platform, memory, hardware_of(name), count)


def hardware_of(name: str) -> str | None:
    """The bundled hardware whose key is a word of a device's name (`NVIDIA H200` → `h200`)."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((key for key in bundled_hardware() if key in words), None)


def find_ceilings(setting: Setting, device: Device, hardware: str | None, budget: Budget) -> Ceilings:
    """Read the ceilings from a file of `configs/hardware`, given or recognised by name; else measure them."""
    key = hardware or device.hardware
    if key is not None:
        chip = load_hardware(key)
        return Ceilings(chip.memory_bandwidth, chip.bf16_flops, f"configs/hardware: {chip.name}, vendor's figures")
    size = min(_COPY_BYTES, free_memory(setting.step.mesh.devices.flat[0]) // 8) // 4
    matrix = setting.random((_SIDE, _SIDE), _SIDE**-0.5)
    copy = _seconds(device_loop(lambda _, i, x: x + 1, None, jnp.zeros(size, jnp.float32)), budget)
    product = _seconds(device_loop(lambda a, i, x: a @ x, matrix, matrix + 0), budget)
    said = f"a copy of {_COPY_BYTES >> 20} MiB, a product of {_SIDE}² {setting.dtype.name} matrices"
    return Ceilings(2 * 4 * size / copy, 2 * _SIDE**3 / product, f"measured in this run: {said}")


def _seconds(prepared: PreparedCase, budget: Budget) -> float:
    prepared.warm_up()
    times = prepared.take(budget)
    if times is None:
        raise UserError(f"the device's ceilings cannot be measured: {DROWNED}, or name its file with --hardware")
    return times.median
