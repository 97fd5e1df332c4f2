"""`Hardware`: one kind of accelerator, as `configs/hardware/*.toml` describes it. No JAX; the dry run and the planner share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsjax.errors import UserError, check_fields
from dsjax.toml_files import bundled_names, check_above_zero, check_kind, read_toml

_KINDS = {"str": str, "int": int, "float": float, "Mapping": dict}
"""What a field of a file may be, by its type in `Hardware`."""
UNITS = {4: "fp4_flops", 8: "fp8_flops", 16: "bf16_flops"}
"""Bits of a floating-point number to the field with the rate of the unit that multiplies such numbers."""
_DIES = {"h200": "GH100", "b200": "GB100"}
"""Dies of the devices that operations were measured on."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device's figures, decimal: bytes, bytes a second, operations a second (dense). Figures are the vendors'.

    platform: `cuda` or `tpu`. memory_bytes: as the vendor's datasheet has it; driver_bytes: as the device's driver reports it
    (`nvidia-smi`), None where nobody said. memory_bandwidth: of the device's own memory. fp8_flops: bf16's where there is no FP8 unit.
    scale_up_bandwidth: to devices of the same scale-up domain (NVLink, ICI), each way; scale_up_devices: how many it joins.
    scale_out_gbps: network of one device to other domains, each way, in gigabits a second; a cluster usually says otherwise.
    xla: what the compiler is told of the device (see `dsjax.dryrun.topology`); empty where a file has none, which a plan does not
    need. sources: field → where its figure is from. operators: key of the device whose tables of operations speak of this one;
    empty: its own, if there are any. die: devices of the same die differ in memory and links only. price_per_hour: of one device.
    """

    key: str
    name: str
    platform: str
    memory_bytes: int
    driver_bytes: int | None = None
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float | None = None
    scale_up_bandwidth: float
    scale_up_devices: int
    devices_per_host: int
    scale_out_gbps: float
    xla: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str]
    operators: str = ""
    die: str = ""
    price_per_hour: float | None = None

    @property
    def visible_bytes(self) -> int:
        """Memory as the driver reports it, of which `dsjax plan fit` judges; the datasheet's where that is not known."""
        return self.driver_bytes or self.memory_bytes

    @property
    def peaks(self) -> dict[str, float]:
        """Operations a second of the units of `UNITS` that it has, by field."""
        return {name: getattr(self, name) for name in UNITS.values() if getattr(self, name)}

    def unit(self, bits: int) -> str:
        """The field of `peaks` of the unit that multiplies numbers of so many bits: their own, or the next wider one that there is."""
        return next(name for width, name in UNITS.items() if width >= bits and name in self.peaks)

    def scaled(self, factor: float) -> Hardware:
        """Describe this device with `factor` times as many operations a second."""
        return dataclasses.replace(self, **{name: rate * factor for name, rate in self.peaks.items()})

    @cached_property
    def same_die(self) -> bool:
        """Whether the tables that speak of this device were measured on its own die."""
        return self.operators in ("", self.key) or (self.die != "" and self.die == _DIES.get(self.operators))

    @property
    def is_hopper(self) -> bool:
        """Whether its units are Hopper's, whole (H100, H200, H800) or in part (H20)."""
        return self.die in ("GH100", "GH100, cut down")

    @property
    def is_hopper_cut_down(self) -> bool:
        """Whether it is a Hopper with few operations for each byte (H20)."""
        return self.die == "GH100, cut down"

    @property
    def is_blackwell(self) -> bool:
        """Whether it multiplies FP8 caches as such."""
        return self.die == "GB100"

    @property
    def links_hosts(self) -> bool:
        """Whether NVLink joins the devices of several hosts (GB200 and GB300 in a rack)."""
        return self.platform == "cuda" and self.scale_up_devices > self.devices_per_host


def bundled_hardware() -> tuple[str, ...]:
    """Names that `load_hardware` knows: the files of `configs/hardware`."""
    return bundled_names("hardware")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A bundled name (`h200`), or a TOML file of the same fields.

    Raises:
        UserError: no such hardware; a file that is not TOML; a field that is missing, unknown, of the wrong kind or without a source.
    """
    values, key = read_toml("hardware", "hardware", name_or_path), str(name_or_path)
    return _from_fields(key if key in bundled_hardware() else Path(key).stem, values)


def _from_fields(key: str, values: Mapping[str, Any]) -> Hardware:
    fields = {one.name: one for one in dataclasses.fields(Hardware) if one.name != "key"}
    required = [name for name, one in fields.items() if one.default is one.default_factory is dataclasses.MISSING]
    check_fields(f"hardware {key!r}", values, fields, required)
    for name, value in values.items():
        kind = _KINDS[str(fields[name].type).partition("[")[0].partition(" ")[0]]
        check_kind(f"hardware {key!r}", name, value, kind)
        if kind in (int, float):
            check_above_zero(f"hardware {key!r}", name, value)
    figures = [n for n in values if n not in ("name", "platform", "sources", "operators", "die")]
    unsourced = [n for n in figures if n not in values["sources"]]
    if unsourced:
        raise UserError(f"hardware {key!r}: no source for {', '.join(unsourced)}; give one for each under [sources]")
    if values["platform"] not in ("cuda", "tpu"):
        raise UserError(f"hardware {key!r}: platform {values['platform']!r}, expected cuda or tpu")
    tables = {name: MappingProxyType(dict(values.get(name, {}))) for name in ("xla", "sources")}
    return Hardware(key=key, **{**values, **tables})
