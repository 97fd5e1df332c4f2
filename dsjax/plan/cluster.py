"""`Cluster`: devices, hosts and the links between them, from `configs/clusters/` or a file of the user's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dsjax.errors import UserError
from dsjax.hardware import Hardware, load_hardware
from dsjax.plan.measured import COLLECTIVES, SEND_RECEIVE, MeasuredNetwork
from dsjax.toml_files import AboveZero, Count, bundled_names, convert, read_toml

RESOURCES = ("compute", "memory bandwidth", "scale-up", "network", "latency")


_LATENCIES = ("latency", "latency_low", "latency_high")


class _Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One-way latency in a cluster file, and its range: microseconds."""

    latency_us: AboveZero
    latency_us_range: tuple[AboveZero, AboveZero] | None = None

    def __post_init__(self):
        low, high = self.latency_us_range or (self.latency_us, self.latency_us)
        if not low <= self.latency_us <= high:
            raise ValueError(
                f"latency_us_range is {[low, high]}, expected two numbers around latency_us, {self.latency_us:g}"
            )

    def seconds(self) -> dict[str, float]:
        """The latency and its range as fields of `Cluster`."""
        ends = (self.latency_us, *(self.latency_us_range or (self.latency_us, self.latency_us)))
        return dict(zip(_LATENCIES, (one * 1e-6 for one in ends), strict=True))


class Tier(_Latency, frozen=True):
    """A level of switches: how many neighbouring hosts it joins; what its hosts could send to others of it ÷ what the links above those
    of the tier below carry (1: all of it at once); latency between hosts that meet here."""

    hosts: Count
    name: str = "tier"
    oversubscription: Annotated[float, msgspec.Meta(ge=1)] = 1.0

    def sooner(self, factor: float) -> Tier:
        """Make a tier with latencies `factor` times shorter."""
        ends = self.latency_us_range and tuple(end / factor for end in self.latency_us_range)
        return msgspec.structs.replace(self, latency_us=self.latency_us / factor, latency_us_range=ends)


@dataclass(frozen=True)
class Wiring:
    """How hosts are joined. tiers: from the hosts up; direct: each host has as many links to every other host, without a switch."""

    tiers: tuple[Tier, ...] = ()
    direct: bool = False

    def __bool__(self) -> bool:
        return bool(self.tiers) or self.direct

    def highest(self, hosts: int) -> Tier | None:
        """The tier at which so many neighbouring hosts meet."""
        if hosts < 2 or not self.tiers:
            return None
        return next((tier for tier in self.tiers if tier.hosts >= hosts), self.tiers[-1])

    def share(self, hosts: int, of: int, *, ring: bool = False) -> float:
        """Bandwidth that `hosts` neighbouring hosts of `of` have for what each sends to all others alike ÷ all cards of a host.

        Of what leaves a host, the part that also leaves its group of a tier passes links that are so many times thinner. ring: of a sum,
        in which neighbours send to each other, so that of each group one host at a time passes them.
        """
        if hosts < 2:
            return 1.0
        if self.direct:
            return min(1.0, (2 if ring and hosts > 2 else hosts - 1) / (of - 1))
        worst, below, thinner = 1.0, 1, 1.0
        for tier in self.tiers:
            if below >= hosts:
                break
            thinner *= tier.oversubscription
            leaving = (1 - below / hosts) / (1 - 1 / hosts)  # of what leaves a host, what leaves its group
            worst = max(worst, thinner / below if ring else thinner * leaving)
            below = tier.hosts
        return 1 / worst


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected duration of a collective: latency, and the rate of the bytes that leave a device."""

    latency_us: AboveZero
    gb_per_s: AboveZero


_Expected = dict[Literal[*COLLECTIVES, SEND_RECEIVE], Bounds]


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[acceptance]`: what a measurement of the network is held against (`dsjax bench network`).

    warning, failing: how many times the expected duration of a collective is a warning, and a failure. inside_host, between_hosts:
    collective → bounds in place of what is reckoned from the links.
    """

    warning: float = 1.5
    failing: float = 3.0
    inside_host: _Expected = {}
    between_hosts: _Expected = {}

    def __post_init__(self):
        if not 1 <= self.warning <= self.failing:
            raise ValueError(
                f"warning is {self.warning:g} and failing {self.failing:g}, expected 1 or more, and the second no less than the first: "
                "they multiply the expected duration"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`hosts` × `devices_per_host` devices of one kind.

    scale_up_devices: how many devices its fast link (NVLink, ICI) joins; a multiple or a divisor of `devices_per_host` or of all devices.
    storage: bytes a second at which each host reads a checkpoint while all do, or None where nobody said. wiring: tiers of switches, or
    direct links, where the network is not one switch of full bandwidth. prefill: hosts of another kind that compute prompts, while these
    decode; None where all are alike.
    """

    name: str
    description: str
    hardware: Hardware  # the device
    hosts: int
    devices_per_host: int
    scale_up_devices: int
    network: str
    network_gbps: float  # of one network card, each way, in gigabits a second
    nics_per_host: int  # cards that a host's devices share
    latency: float  # seconds of the network one way, with latency_low, latency_high its range
    latency_low: float
    latency_high: float
    sources: Mapping[str, str]  # field → where it is from
    storage: float | None = None
    acceptance: Acceptance = Acceptance()  # for a measurement of the network
    measured: MeasuredNetwork | None = None  # such a measurement, in place of the links' figures
    wiring: Wiring = Wiring()
    prefill: Cluster | None = None
    experts: Cluster | None = None  # hosts of another kind for the routed experts, while these have attention

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
        latency = tier.seconds() if tier else {}
        return dataclasses.replace(self, network_gbps=self.network_gbps * share, wiring=Wiring(), **latency)

    def scaled(self, resource: str, factor: float) -> Cluster:
        """Make a cluster with `factor` times as much of one of `RESOURCES` (latency: so many times shorter)."""
        parts = {name: getattr(self, name) for name in ("prefill", "experts", "measured")}
        changed = {name: part.scaled(resource, factor) for name, part in parts.items() if part is not None}
        chip = self.hardware
        if resource == "latency":
            tiers = tuple(tier.sooner(factor) for tier in self.wiring.tiers)
            changed["wiring"] = dataclasses.replace(self.wiring, tiers=tiers)
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
            wiring = dataclasses.replace(wiring, tiers=(*below, msgspec.structs.replace(top, hosts=hosts)))
        described = self.description if hosts == self.hosts else f"{hosts} hosts, each as in {self.description}"
        return dataclasses.replace(self, description=described, hosts=hosts, wiring=wiring)


class _Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[prefill]`: hosts of another kind, on the same network."""

    hardware: str
    hosts: Count
    devices_per_host: Count | None = None
    scale_up_devices: Count | None = None
    network_gbps: AboveZero | None = None
    nics_per_host: Count | None = None


class _Cluster(_Latency, frozen=True):
    """A cluster file."""

    name: str
    description: str
    hardware: str
    hosts: Count
    network: str
    network_gbps: AboveZero
    nics_per_host: Count
    latency_us_range: tuple[AboveZero, AboveZero]
    sources: dict[str, str]
    scale_up_devices: Count | None = None
    devices_per_host: Count | None = None
    storage_gb_per_s: AboveZero | None = None
    acceptance: Acceptance = Acceptance()
    tiers: tuple[Tier, ...] = ()
    direct: bool = False
    prefill: _Prefill | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.tiers and self.direct:
            raise ValueError("tiers are of switches, and direct is without any; give one of them")
        others = self.hosts - 1
        if self.direct and others and self.nics_per_host % others:
            raise ValueError(
                f"direct links join every pair of hosts alike, and {self.nics_per_host} of a host do not divide over {others} others; "
                f"expected nics_per_host to be a multiple of {others}"
            )
        for number, (below, tier) in enumerate(itertools.pairwise(self.tiers), 2):
            if tier.hosts <= below.hosts or tier.hosts % below.hosts:
                raise ValueError(
                    f"tier {number} joins {tier.hosts} hosts and the one below {below.hosts}; expected a multiple of it"
                )
        if self.tiers and self.tiers[-1].hosts < self.hosts:
            raise ValueError(
                f"the highest tier joins {self.tiers[-1].hosts} of {self.hosts} hosts; expected all of them"
            )


def bundled_clusters() -> tuple[str, ...]:
    """Names that `load_cluster` knows: the files of `configs/clusters`."""
    return bundled_names("clusters")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A bundled name (`h20-32`) or a TOML file of the same fields.

    Raises:
        UserError: no such cluster; not TOML; a field that is missing, unknown, of the wrong kind or out of range.
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
        **file.seconds(),
        hardware=chip,
        devices_per_host=file.devices_per_host or chip.devices_per_host,
        scale_up_devices=file.scale_up_devices or chip.scale_up_devices,
        storage=file.storage_gb_per_s and file.storage_gb_per_s * 1e9,
        acceptance=file.acceptance,
        wiring=Wiring(file.tiers, file.direct),
        prefill=file.prefill and _prefill(where, file, file.prefill),
    )
    if cluster.domain % cluster.devices_per_host and cluster.devices_per_host % cluster.domain:
        raise UserError(
            f"{where}: a scale-up domain of {cluster.domain} devices and hosts of {cluster.devices_per_host} cut each other; "
            "expected one to be a multiple of the other"
        )
    return cluster


def _prefill(where: str, file: _Cluster, side: _Prefill) -> Cluster:
    chip = load_hardware(side.hardware)
    alone = {"acceptance": Acceptance(), "tiers": (), "direct": False, "prefill": None}
    alone |= {"devices_per_host": None, "scale_up_devices": None, "name": f"{file.name}, prefill"}
    own = {name: value for name, value in msgspec.structs.asdict(side).items() if value is not None}
    file = msgspec.structs.replace(file, **(alone | own), description=f"{side.hosts} hosts of {chip.name}")
    return _made(f"{where}, prefill", file)
