"""`Cluster`: devices, hosts and the links between them, from `configs/clusters/` or a file of the user's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsjax.errors import UserError, check_fields
from dsjax.hardware import Hardware, load_hardware
from dsjax.plan.measured_network import COLLECTIVES, SEND_RECEIVE, MeasuredNetwork
from dsjax.plan.tiers import Wiring, read_wiring
from dsjax.toml_files import bundled_names, check_above_zero, check_kind, read_toml

RESOURCES = ("compute", "memory bandwidth", "scale-up", "network", "latency")


@dataclass(frozen=True)
class Acceptance:
    """What a measurement of the network is held against (`dsjax bench network`).

    warning, failing: how many times the expected duration of a collective is a warning, and a failure. expected: (`inside_host` or
    `between_hosts`, collective) → (seconds, bytes a second that leave a device) in place of what is reckoned from the links.
    """

    warning: float = 1.5
    failing: float = 3.0
    expected: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`hosts` × `devices_per_host` devices of one kind.

    hardware: the device. scale_up_devices: how many devices its fast link (NVLink, ICI) joins; a multiple or a divisor of
    `devices_per_host` or of all devices. network_gbps: of one network card, each way, in gigabits a second; nics_per_host:
    cards that a host's devices share; latency: seconds of the network one way, with latency_low, latency_high its range.
    storage: bytes a second at which each host reads a checkpoint while all do, or None where nobody said. acceptance: for a measurement
    of the network; measured: such a measurement, in place of the links' figures. sources: field → where it is from. wiring: tiers of
    switches, or direct links, where the network is not one switch of full bandwidth. prefill: hosts of another kind that compute
    prompts, while these decode; None where all are alike. experts: hosts of another kind for the routed experts,
    while these have attention.
    """

    name: str
    description: str
    hardware: Hardware
    hosts: int
    devices_per_host: int
    scale_up_devices: int
    network: str
    network_gbps: float
    nics_per_host: int
    latency: float
    latency_low: float
    latency_high: float
    sources: Mapping[str, str]
    storage: float | None = None
    acceptance: Acceptance = Acceptance()
    measured: MeasuredNetwork | None = None
    wiring: Wiring = Wiring()
    prefill: Cluster | None = None
    experts: Cluster | None = None

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.hosts * self.devices_per_host

    @property
    def domain(self) -> int:
        """Devices that reach each other without the network."""
        return min(self.scale_up_devices, self.num_devices)

    @property
    def network_bandwidth(self) -> float:
        """Bytes a second, each way, of one device's share of its host's cards."""
        return self.network_gbps * 1e9 / 8 * self.nics_per_host / self.devices_per_host

    def domains_of(self, devices: int) -> int:
        """Scale-up domains that so many neighbouring devices touch."""
        return -(-devices // self.domain)

    def between(self, ranks: int, *, ring: bool = False) -> Cluster:
        """The cluster as an exchange among so many neighbouring devices meets it: bandwidth and latency of the tiers that it crosses.

        ring: of a sum over them, in which neighbours send to each other.
        """
        hosts = -(-ranks // self.devices_per_host)
        if not self.wiring or hosts < 2:
            return self
        share, tier = self.wiring.share(hosts, self.hosts, ring=ring), self.wiring.highest(hosts)
        latency = {name: getattr(tier, name) for name in _LATENCIES} if tier else {}
        return dataclasses.replace(self, network_gbps=self.network_gbps * share, wiring=Wiring(), **latency)

    def scaled(self, resource: str, factor: float) -> Cluster:
        """Make a cluster with `factor` times as much of one of `RESOURCES` (latency: so many times shorter)."""
        parts = {name: getattr(self, name) for name in ("prefill", "experts", "measured")}
        changed = {name: part.scaled(resource, factor) for name, part in parts.items() if part is not None}
        chip = self.hardware
        if resource == "latency":
            tiers = tuple(_sooner(tier, factor) for tier in self.wiring.tiers)
            changed["wiring"] = dataclasses.replace(self.wiring, tiers=tiers)
            return dataclasses.replace(_sooner(self, factor), **changed)
        if resource == "network":
            changed["network_gbps"] = self.network_gbps * factor
        elif resource == "compute":
            changed["hardware"] = chip.scaled(factor)
        else:
            field = {"memory bandwidth": "memory_bandwidth", "scale-up": "scale_up_bandwidth"}[resource]
            changed["hardware"] = dataclasses.replace(chip, **{field: getattr(chip, field) * factor})
        return dataclasses.replace(self, **changed)

    def with_experts_on(self, hardware: Hardware, hosts: int) -> Cluster:
        """Make a cluster with so many hosts of another device beside it for the routed experts, with cards and network as these have."""
        alone = dataclasses.replace(self, wiring=Wiring(), prefill=None, experts=None, measured=None)
        beside = dataclasses.replace(
            alone,
            name=f"{self.name}, experts",
            description=f"{hosts} hosts of {hardware.name}",
            hardware=hardware,
            hosts=hosts,
            devices_per_host=hardware.devices_per_host,
            scale_up_devices=hardware.scale_up_devices,
        )
        return dataclasses.replace(self, experts=beside)

    def resized(self, hosts: int) -> Cluster:
        """Make a cluster with another number of hosts; the highest tier joins as many as there are."""
        wiring = self.wiring
        if wiring.tiers and hosts > wiring.tiers[-1].hosts:
            *below, top = wiring.tiers
            wiring = dataclasses.replace(wiring, tiers=(*below, dataclasses.replace(top, hosts=hosts)))
        described = self.description if hosts == self.hosts else f"{hosts} hosts, each as in {self.description}"
        return dataclasses.replace(self, description=described, hosts=hosts, wiring=wiring)


def _sooner(of: Any, factor: float) -> Any:
    """A cluster or a tier with latencies `factor` times shorter."""
    return dataclasses.replace(of, **{name: getattr(of, name) / factor for name in _LATENCIES})


_LATENCIES = ("latency", "latency_low", "latency_high")
_COUNTS = ("hosts", "devices_per_host", "nics_per_host", "scale_up_devices")
_OPTIONAL = {
    "scale_up_devices": int,
    "devices_per_host": int,
    "storage_gb_per_s": float,
    "acceptance": dict,
    "tiers": list,
    "direct": bool,
    "prefill": dict,
}
_REQUIRED = {
    "name": str,
    "description": str,
    "hardware": str,
    "hosts": int,
    "network": str,
    "network_gbps": float,
    "nics_per_host": int,
    "latency_us": float,
    "latency_us_range": list,
    "sources": dict,
}
_OF_PREFILL = ("hardware", "hosts", "devices_per_host", "scale_up_devices", "network_gbps", "nics_per_host")
_PLACES = ("inside_host", "between_hosts")


def bundled_clusters() -> tuple[str, ...]:
    """Names that `load_cluster` knows: the files of `configs/clusters`."""
    return bundled_names("clusters")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A bundled name (`h20-32`) or a TOML file of the same fields.

    Raises:
        UserError: no such cluster; not TOML; a field that is missing, unknown, of the wrong kind or out of range.
    """
    return _from_fields(str(name_or_path), read_toml("cluster", "clusters", name_or_path))


def _from_fields(key: str, values: Mapping[str, Any]) -> Cluster:
    known = _REQUIRED | _OPTIONAL
    check_fields(f"cluster {key!r}", values, known, _REQUIRED)
    for name, value in values.items():
        kind = known[name]
        check_kind(f"cluster {key!r}", name, value, kind)
        if name in _COUNTS and value < 1:
            raise UserError(f"cluster {key!r}: {name} is {value}, expected at least 1")
        if kind is float:
            check_above_zero(f"cluster {key!r}", name, value)
    try:
        chip = load_hardware(values["hardware"])
    except UserError as error:
        raise UserError(f"cluster {key!r}: {error}") from error
    middle, ends = values["latency_us"], values["latency_us_range"]
    numbers = len(ends) == 2 and all(isinstance(e, int | float) and not isinstance(e, bool) for e in ends)
    if not numbers or not 0 < ends[0] <= middle <= ends[1] < math.inf:
        raise UserError(
            f"cluster {key!r}: latency_us_range is {ends!r}, expected two numbers around latency_us, which is {middle}"
        )
    same = ("name", "description", "hosts", "network", "network_gbps", "nics_per_host")
    cluster = Cluster(
        **{name: values[name] for name in same},
        **{name: value * 1e-6 for name, value in zip(_LATENCIES, (middle, *ends), strict=True)},
        hardware=chip,
        devices_per_host=values.get("devices_per_host", chip.devices_per_host),
        scale_up_devices=values.get("scale_up_devices", chip.scale_up_devices),
        sources=dict(values["sources"]),
        storage=values["storage_gb_per_s"] * 1e9 if "storage_gb_per_s" in values else None,
        acceptance=_acceptance(key, values.get("acceptance", {})),
        wiring=read_wiring(key, values, values["hosts"], values["nics_per_host"]),
        prefill=_prefill(key, values) if "prefill" in values else None,
    )
    if cluster.domain % cluster.devices_per_host and cluster.devices_per_host % cluster.domain:
        raise UserError(
            f"cluster {key!r}: a scale-up domain of {cluster.domain} devices and hosts of {cluster.devices_per_host} cut each other; "
            "expected one to be a multiple of the other"
        )
    return cluster


def _prefill(key: str, values: Mapping[str, Any]) -> Cluster:
    """The table `[prefill]`: hosts of another kind, on the same network."""
    side = values["prefill"]
    if set(side) - set(_OF_PREFILL) or {"hardware", "hosts"} - set(side):
        raise UserError(
            f"cluster {key!r}: prefill has {', '.join(sorted(side)) or 'nothing'}; expected hardware and hosts, and where they differ "
            f"{', '.join(_OF_PREFILL[2:])}"
        )
    others = {name: values[name] for name in (*_REQUIRED, "storage_gb_per_s") if name in values}
    chip = load_hardware(side["hardware"]).name if isinstance(side["hardware"], str) else side["hardware"]
    described = {"name": f"{values['name']}, prefill", "description": f"{side['hosts']} hosts of {chip}"}
    return _from_fields(f"{key}, prefill", {**others, **described, **side})


def _table(key: str, name: str, table: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    unknown = table.keys() - set(known) if isinstance(table, Mapping) else [repr(table)]
    if unknown:
        raise UserError(
            f"cluster {key!r}: {name} has {', '.join(sorted(unknown))}, expected some of {', '.join(known)}"
        )
    return table


def _acceptance(key: str, values: Mapping[str, Any]) -> Acceptance:
    """The table `[acceptance]`: `warning`, `failing`, and tables such as `[acceptance.inside_host.all_gather]`: own expectations."""
    _table(key, "acceptance", values, ("warning", "failing", *_PLACES))
    expected, where = {}, f"cluster {key!r}"
    for place in _PLACES:
        known = (*COLLECTIVES, SEND_RECEIVE)
        for collective, bounds in _table(key, f"acceptance.{place}", values.get(place, {}), known).items():
            name = f"acceptance.{place}.{collective}"
            if len(_table(key, name, bounds, ("latency_us", "gb_per_s"))) < 2:
                raise UserError(f"cluster {key!r}: {name} needs both latency_us and gb_per_s")
            seconds, rate = (
                check_above_zero(where, f"{name}.{one}", bounds[one]) for one in ("latency_us", "gb_per_s")
            )
            expected[place, collective] = seconds * 1e-6, rate * 1e9
    given = [name for name in ("warning", "failing") if name in values]
    ends = {name: check_above_zero(where, f"acceptance.{name}", values[name]) for name in given}
    found = Acceptance(**ends, expected=expected)
    if not 1 <= found.warning <= found.failing:
        raise UserError(
            f"cluster {key!r}: acceptance.warning is {found.warning:g} and acceptance.failing {found.failing:g}, expected 1 or more, "
            "and the second no less than the first: they multiply the expected duration"
        )
    return found
