"""`Hardware`: one kind of accelerator, as `configs/hardware/*.toml` describes it. No JAX; the dry run and the planner share it."""

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
"""Bits of a floating-point number to the field with the rate of the unit that multiplies such numbers."""
_DIES = {"h200": "GH100", "b200": "GB100"}
"""Dies of the devices that operations were measured on."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device's figures, decimal: bytes, bytes a second, operations a second (dense). Figures are the vendors'.

    scale_out_gbps: network of one device to other domains, each way, in gigabits a second; a cluster usually says otherwise. xla: what the
    compiler is told of the device (see `dsjax.dryrun.topology`); empty where a file has none, which a plan does not need. operators: key of
    the device whose tables of operations speak of this one; empty: its own, if there are any.
    """

    key: str
    name: str
    platform: Literal["cuda", "tpu"]  # `cuda` or `tpu`
    memory_bytes: Count  # as the vendor's datasheet has it
    driver_bytes: Count | None = None  # as the device's driver reports it (`nvidia-smi`), None where nobody said
    memory_bandwidth: AboveZero  # of the device's own memory
    bf16_flops: AboveZero
    fp8_flops: AboveZero  # bf16's where there is no FP8 unit
    fp4_flops: AboveZero | None = None
    scale_up_bandwidth: AboveZero  # to devices of the same scale-up domain (NVLink, ICI), each way
    scale_up_devices: Count  # how many it joins
    devices_per_host: Count
    scale_out_gbps: AboveZero
    xla: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str]  # field → where its figure is from
    operators: str = ""
    die: str = ""  # devices of the same die differ in memory and links only
    price_per_hour: AboveZero | None = None  # of one device

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
    made = convert(f"hardware {key!r}", {**values, "key": key}, Hardware)
    figures = [n for n in values if n not in ("name", "platform", "sources", "operators", "die")]
    unsourced = [n for n in figures if n not in values["sources"]]
    if unsourced:
        raise UserError(f"hardware {key!r}: no source for {', '.join(unsourced)}; give one for each under [sources]")
    return dataclasses.replace(made, xla=MappingProxyType(dict(made.xla)), sources=MappingProxyType(dict(made.sources)))
