"""Tiers of a network: hosts joined in racks, racks by a spine with less than full bandwidth, or hosts joined pairwise without a switch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError


@dataclass(frozen=True)
class Tier:
    """A level of switches: how many neighbouring hosts it joins; what its hosts could send to others of it ÷ what the links above those
    of the tier below carry (1: all of it at once); one-way latency in seconds between hosts that meet here, and its range."""

    name: str
    hosts: int
    oversubscription: float
    latency: float
    latency_low: float
    latency_high: float


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


def read_wiring(key: str, values: Mapping[str, Any], hosts: int, cards: int) -> Wiring:
    """`[[tiers]]` and `direct` of a cluster file.

    Raises:
        UserError: a field that is missing, unknown or out of range; tiers that do not grow or do not hold all hosts; links that cannot
            join every pair of hosts.
    """
    tiers, direct, cluster = values.get("tiers", []), bool(values.get("direct", False)), f"cluster {key!r}"
    if tiers and direct:
        raise UserError(f"{cluster}: tiers are of switches, and direct is without any; give one of them")
    if direct and hosts > 1 and cards % (hosts - 1):
        raise UserError(
            f"{cluster}: direct links join every pair of hosts alike, and {cards} of a host do not divide over {hosts - 1} others; "
            f"expected nics_per_host to be a multiple of {hosts - 1}"
        )
    made = tuple(_tier(f"{cluster}: tier {number}", tier) for number, tier in enumerate(tiers, 1))
    for number, (below, tier) in enumerate(itertools.pairwise(made), 2):
        if tier.hosts <= below.hosts or tier.hosts % below.hosts:
            raise UserError(
                f"{cluster}: tier {number} joins {tier.hosts} hosts and the one below {below.hosts}; expected a multiple of it"
            )
    if made and made[-1].hosts < hosts:
        raise UserError(f"{cluster}: the highest tier joins {made[-1].hosts} of {hosts} hosts; expected all of them")
    return Wiring(made, direct)


def _tier(where: str, given: Any) -> Tier:
    known, needed = ("name", "hosts", "oversubscription", "latency_us", "latency_us_range"), {"hosts", "latency_us"}
    if not isinstance(given, Mapping) or not needed <= set(given) <= set(known):
        raise UserError(
            f"{where} is {given!r}, expected a table of {', '.join(known)}, of which hosts and latency_us are needed"
        )
    hosts, thinner, latency = given["hosts"], given.get("oversubscription", 1.0), given["latency_us"]
    ends = given.get("latency_us_range", [latency, latency])
    if not isinstance(ends, list) or len(ends) != 2:
        raise UserError(f"{where}: latency_us_range is {ends!r}, expected two numbers around latency_us")
    named = {"hosts": hosts, "oversubscription": thinner, "latency_us": latency, "low": ends[0], "high": ends[1]}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"{where}: {name} is {value!r}, expected a number above 0")
    if not isinstance(hosts, int) or thinner < 1 or not ends[0] <= latency <= ends[1]:
        raise UserError(
            f"{where}: expected a whole number of hosts, an oversubscription of 1 or more, and a range around latency_us"
        )
    seconds = (microseconds * 1e-6 for microseconds in (latency, *ends))
    return Tier(str(given.get("name", "tier")), hosts, float(thinner), *seconds)
