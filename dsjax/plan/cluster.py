"""`Cluster`: devices, hosts and links, from `configs/clusters/` or a TOML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dsjax.errors import UserError
from dsjax.hardware import Hardware, load_hardware
from dsjax.plan.measured import COLLECTIVES, SEND_RECEIVE, MeasuredNetwork
from dsjax.plan.rules import refuse
from dsjax.toml_files import AboveZero, Count, bundled_names, convert, read_toml

RESOURCES = ("compute", "memory bandwidth", "scale-up", "network", "latency")
_LATENCIES = ("latency", "latency_low", "latency_high")


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected duration of a collective: `latency_us` + bytes that leave a device ÷ `gb_per_s`."""

    latency_us: AboveZero
    gb_per_s: AboveZero


_Expected = dict[Literal[*COLLECTIVES, SEND_RECEIVE], Bounds]


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[acceptance]`: bounds for a measurement of the network (`dsjax bench network`)."""

    warning: float = 1.5  # multiple of a collective's expected duration above which it is a warning
    failing: float = 3.0  # likewise, above which it fails
    inside_host: _Expected = {}  # collective → its expected duration, in place of the one computed from the links
    between_hosts: _Expected = {}  # likewise

    def __post_init__(self):
        if not 1 <= self.warning <= self.failing:
            raise ValueError(
                f"warning is {self.warning:g} and failing {self.failing:g}, expected 1 or more, and the second no less than the first: "
                "they multiply the expected duration"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`hosts` × `devices_per_host` devices of one kind. The network between hosts is one non-blocking switch."""

    name: str
    description: str
    hardware: Hardware  # the device
    hosts: int
    devices_per_host: int
    scale_up_devices: int  # connected by the fast link (NVLink, ICI); a multiple or divisor of `devices_per_host`
    network: str
    network_gbps: float  # of one network card, each way, in gigabits a second
    nics_per_host: int  # network cards that the devices of a host share
    latency: float  # seconds one way; latency_low, latency_high: its range
    latency_low: float
    latency_high: float
    sources: Mapping[str, str]  # field → its source
    storage: float | None = None  # checkpoint bytes per second of each host while all hosts read; None: unknown
    acceptance: Acceptance = Acceptance()
    measured: MeasuredNetwork | None = None  # replaces the figures of the links
    prefill: Cluster | None = None  # hosts of another kind that prefill, while these decode; None: all hosts are alike

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.hosts * self.devices_per_host

    @property
    def domain(self) -> int:
        """Devices of a scale-up domain."""
        return min(self.scale_up_devices, self.num_devices)

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second, each way, of one device's share of its host's network cards."""
        return self.network_gbps * 1e9 / 8 * self.nics_per_host / self.devices_per_host

    def domains_of(self, devices: int) -> int:
        """Return the number of scale-up domains that this many neighbouring devices span."""
        return -(-devices // self.domain)

    def scaled(self, resource: str, factor: float) -> Cluster:
        """Return a cluster with `factor` times as much of one of `RESOURCES` (latency: divided by `factor`)."""
        parts = {name: getattr(self, name) for name in ("prefill", "measured")}
        changed = {name: part.scaled(resource, factor) for name, part in parts.items() if part is not None}
        chip = self.hardware
        if resource == "latency":
            changed |= {name: getattr(self, name) / factor for name in _LATENCIES}
            return dataclasses.replace(self, **changed)
        if resource == "network":
            changed["network_gbps"] = self.network_gbps * factor
        elif resource == "compute":
            changed["hardware"] = chip.scaled(factor)
        else:
            field = {"memory bandwidth": "memory_bandwidth", "scale-up": "scale_up_bandwidth"}[resource]
            changed["hardware"] = dataclasses.replace(chip, **{field: getattr(chip, field) * factor})
        return dataclasses.replace(self, **changed)

    def resized(self, hosts: int) -> Cluster:
        """Return a cluster with another number of hosts."""
        described = self.description if hosts == self.hosts else f"{hosts} hosts, each as in {self.description}"
        return dataclasses.replace(self, description=described, hosts=hosts)


class _Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[prefill]`: hosts of another kind, on the same network."""

    hardware: str
    hosts: Count
    devices_per_host: Count | None = None
    scale_up_devices: Count | None = None
    network_gbps: AboveZero | None = None
    nics_per_host: Count | None = None


class _Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster file."""

    name: str
    description: str
    hardware: str
    hosts: Count
    network: str
    network_gbps: AboveZero
    nics_per_host: Count
    latency_us: AboveZero
    latency_us_range: tuple[AboveZero, AboveZero]
    sources: dict[str, str]
    scale_up_devices: Count | None = None
    devices_per_host: Count | None = None
    storage_gb_per_s: AboveZero | None = None
    acceptance: Acceptance = Acceptance()
    prefill: _Prefill | None = None

    def __post_init__(self):
        low, high = self.latency_us_range
        if not low <= self.latency_us <= high:
            raise ValueError(
                f"latency_us_range is {[low, high]}, expected two numbers around latency_us, {self.latency_us:g}"
            )


def bundled_clusters() -> tuple[str, ...]:
    """Names of the bundled clusters (`configs/clusters`)."""
    return bundled_names("clusters")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a bundled cluster (`h20-32`) or a TOML file with the same fields.

    Raises:
        UserError: unknown cluster, invalid TOML, or a field that is missing, unknown, of the wrong type or out of range.
    """
    where = f"cluster {str(name_or_path)!r}"
    return _made(where, convert(where, read_toml("cluster", "clusters", name_or_path), _Cluster))


def _made(where: str, file: _Cluster) -> Cluster:
    try:
        chip = load_hardware(file.hardware)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    same = ("name", "description", "hosts", "network", "network_gbps", "nics_per_host", "sources")
    cluster = Cluster(
        **{name: getattr(file, name) for name in same},
        **dict(zip(_LATENCIES, (us * 1e-6 for us in (file.latency_us, *file.latency_us_range)), strict=True)),
        hardware=chip,
        devices_per_host=file.devices_per_host or chip.devices_per_host,
        scale_up_devices=file.scale_up_devices or chip.scale_up_devices,
        storage=file.storage_gb_per_s and file.storage_gb_per_s * 1e9,
        acceptance=file.acceptance,
        prefill=file.prefill and _prefill(where, file, file.prefill),
    )
    refuse("domains", where=where, cluster=cluster)
    return cluster


def _prefill(where: str, file: _Cluster, side: _Prefill) -> Cluster:
    """Return the cluster of the prefill hosts. Fields that `[prefill]` does not set are those of the file or of the hardware."""
    reset = {"acceptance": Acceptance(), "prefill": None}
    reset |= {"devices_per_host": None, "scale_up_devices": None, "name": f"{file.name}, prefill"}
    given = {name: value for name, value in msgspec.structs.asdict(side).items() if value is not None}
    cluster = _made(f"{where}, prefill", msgspec.structs.replace(file, **(reset | given)))
    return dataclasses.replace(cluster, description=f"{side.hosts} hosts of {cluster.hardware.name}")
