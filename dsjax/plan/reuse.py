"""What prompts that come back find cached, by the tier that has it, for `--prefix-hit`: on the devices, in host memory, on the disk."""

import math
from dataclasses import dataclass
from typing import Any

from dsjax.plan.candidate import Candidate
from dsjax.plan.figure import Figure, assumed, assumption, spread
from dsjax.texts import filled

_ROOM, _WHY = (0.75, 0.9, 1.0), "answers that nobody asks for again are pages, too"
"""Share of the cache beside requests in flight that pages of prompts have: low, middle, high."""


@dataclass(frozen=True)
class Reuse:
    """device, host, disk: shares of the returning tokens that each tier has; loading: seconds in which a prompt's pages come from the
    host or the disk, of a mean prompt."""

    device: Figure
    host: Figure
    disk: Figure
    loading: Figure

    @property
    def found(self) -> float:
        """Share found in any tier, for `--prefix-hit`."""
        return min(1.0, self.device + self.host + self.disk)

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        tiers = {name: getattr(self, name).to_json() for name in ("device", "host", "disk")}
        return {**tiers, "found": self.found, "loading_s": self.loading.to_json()}

    def __str__(self) -> str:
        return filled("texts", "reuse.txt", reuse=self, hit=min(self.found, 0.99))


def tier_shares(working_set: float, cache: float, held: float, host: float, disk: float) -> tuple[float, float, float]:
    """(device, host memory, disk): shares of a working set, drawn at random, that each tier has; all in tokens.

    The least recently used pages go first, so that a cache of which requests in flight hold `held` has the rest of itself of the set.
    Answers and other prompts take up to a quarter of that. A page lies in the highest tier that has room.
    """
    found = []
    for room in _ROOM:
        device = min(1.0, room * max(0.0, cache - held) / working_set)
        in_host = min(1 - device, host / working_set)
        found.append((device, in_host, min(1 - device - in_host, disk / working_set)))
    places = ("on the devices", "in host memory", "on the disk")
    ends = zip(places, zip(*found, strict=True), strict=True)
    return tuple(assumed(each[1], min(each), max(each), f"found {place}", _WHY) for place, each in ends)


def reuse(candidate: Candidate, working_set: float, host_bytes: float, disk_bytes: float) -> Reuse:
    """What a deployment's tiers find. working_set: tokens of prompts that come back, of the whole service, which sends each prompt to the
    rank that has its beginning. host_bytes, disk_bytes: of each host.
    """
    instance = candidate.decode
    # Each of the batches that stages take in turn has its part of the cache.
    ranks = instance.replicas * candidate.count
    hosts = math.ceil(instance.layout.devices * candidate.count / instance.cluster.devices_per_host)
    size, work = instance.memory.cache_per_token, instance.workload

    def compute() -> tuple[float, float, float, float]:
        cache = ranks * instance.on(instance.cluster, {}).memory.cache_tokens
        beside = (hosts * tier / size for tier in (host_bytes, disk_bytes))
        device, host, disk = tier_shares(working_set, cache, ranks * candidate.batch * work.context, *beside)
        loading = host / assumption("from the host to a device") + disk / assumption("one NVMe disk")
        return device, host, disk, work.input.mean * size * loading

    return Reuse(*spread(compute))
