"""`Hardware`: description of an accelerator from `configs/hardware/*.toml`, shared by the dry run and the planner. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dsjax.errors import UserError
from dsjax.toml_files import AboveZero, Count, bundled_names, convert, read_toml

UNITS = {4: "fp4_flops", 8: "fp8_flops", 16: "bf16_flops"}
"""Maps bits per floating-point number to the field with the peak rate for that width."""
_DIES = {"h200": "GH100", "b200": "GB100"}
"""Dies of the devices with measured operator tables."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Vendor figures of one device, in decimal units: bytes, bytes per second, dense operations per second."""

    key: str
    name: str
    platform: Literal["cuda", "tpu"]  # `cuda` or `tpu`
    memory_bytes: Count  # from the vendor's datasheet
    driver_bytes: Count | None = None  # as the driver reports it (`nvidia-smi`); None if unknown
    memory_bandwidth: AboveZero  # of the device's own memory
    bf16_flops: AboveZero
    fp8_flops: AboveZero  # equals bf16_flops without an FP8 unit
    fp4_flops: AboveZero | None = None
    scale_up_bandwidth: AboveZero  # to devices of the same scale-up domain (NVLink, ICI), per direction
    scale_up_devices: Count  # devices in a scale-up domain
    devices_per_host: Count
    # network bandwidth of one device to other domains, per direction, in Gbit/s; a cluster usually overrides it
    scale_out_gbps: AboveZero
    # target description for the compiler (see `dsjax.dryrun.topology`); may be empty, because plans do not need it
    xla: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str]  # field → source of its figure
    operators: str = ""  # key of the device whose operator tables apply to this one; empty: its own, if any
    die: str = ""  # devices of the same die differ in memory and links only
    price_per_hour: AboveZero | None = None  # of one device

    @property
    def visible_bytes(self) -> int:
        """Memory as the driver reports it, which `dsjax plan fit` uses; the datasheet's value if unknown."""
        return self.driver_bytes or self.memory_bytes

    @property
    def peaks(self) -> dict[str, float]:
        """Operations per second of the `UNITS` of this device, by field."""
        return {name: getattr(self, name) for name in UNITS.values() if getattr(self, name)}

    def unit(self, bits: int) -> str:
        """Return the field of `peaks` for numbers with this many bits: their own unit, or the next wider one the device has."""
        return next(name for width, name in UNITS.items() if width >= bits and name in self.peaks)

    def scaled(self, factor: float) -> Hardware:
        """Return this device with `factor` times as many operations per second."""
        return dataclasses.replace(self, **{name: rate * factor for name, rate in self.peaks.items()})

    @cached_property
    def same_die(self) -> bool:
        """Whether this device's operator tables were measured on its own die."""
        return self.operators in ("", self.key) or (self.die != "" and self.die == _DIES.get(self.operators))

    @property
    def is_hopper(self) -> bool:
        """Whether this is a full (H100, H200, H800) or cut-down (H20) Hopper."""
        return self.die in ("GH100", "GH100, cut down")

    @property
    def is_hopper_cut_down(self) -> bool:
        """Whether this is a Hopper with a low ratio of compute to memory bandwidth (H20)."""
        return self.die == "GH100, cut down"

    @property
    def is_blackwell(self) -> bool:
        """Whether this is a Blackwell, which multiplies FP8 caches without conversion."""
        return self.die == "GB100"

    @property
    def links_hosts(self) -> bool:
        """Whether NVLink connects devices of several hosts (GB200 and GB300 racks)."""
        return self.platform == "cuda" and self.scale_up_devices > self.devices_per_host


def bundled_hardware() -> tuple[str, ...]:
    """Return the names that `load_hardware` accepts: the files of `configs/hardware`."""
    return bundled_names("hardware")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Load hardware by bundled name (`h200`) or from a TOML file with the same fields.

    Raises:
        UserError: the hardware is unknown, the file is not TOML, or a field is missing, unknown, of the wrong type or without a source.
    """
    values, key = read_toml("hardware", "hardware", name_or_path), str(name_or_path)
    return _from_fields(key if key in bundled_hardware() else Path(key).stem, values)


def _from_fields(key: str, values: Mapping[str, Any]) -> Hardware:
    made = convert(f"hardware {key!r}", {**values, "key": key}, Hardware)
    figures = [n for n in values if n not in ("name", "platform", "sources", "operators", "die")]
    unsourced = [n for n in figures if n not in values["sources"]]
    if unsourced:
        raise UserError(f"hardware {key!r}: no source for {', '.join(unsourced)}; give one for each under [sources]")
    return dataclasses.replace(made, xla=MappingProxyType(dict(made.xla)), sources=MappingProxyType(dict(made.sources)))
