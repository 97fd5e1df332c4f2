"""Assumptions of a dry run about loops whose trip count depends on the requests or the routing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsjax.dryrun.program.text import Operation
from dsjax.dryrun.program.walk import TripCount
from dsjax.kernels.pallas.cost import expected_tiles
from dsjax.kernels.pallas.experts import ROUND_PAIRS, round_pairs
from dsjax.model.experts import default_capacity, default_tile

TEXT = {
    "attention": "every row attends to its whole context",
    "dispatch": "no exchange needs a second round",
    "experts": "routing is even: every token chooses among the experts with the same chance",
}
"""The assumptions in words, as reports show them."""


@dataclass(frozen=True)
class EvenExperts:
    """The expert product of a device under even routing."""

    platform: str  # selects the implementation
    mean_load: float  # (token, expert) pairs per physical expert
    count: int  # number of physical experts on the device
    kernels: bool = False  # whether the Pallas kernels compute the product

    def turns(self) -> float:
        """Return the trip count of the product's loop: expected tiles in use, or rounds beyond the first."""
        if self.kernels:
            pairs = self.mean_load * self.count
            return max(0, math.ceil(pairs / round_pairs(self.mean_load, self.count, ROUND_PAIRS)) - 1)
        if self.platform == "cpu":
            return self.count * expected_tiles(self.mean_load, default_tile(self.mean_load))
        needed = self.mean_load + 4 * self.mean_load**0.5
        return math.ceil(needed / default_capacity(self.mean_load, self.count)) - 1


def trip_counts(attention: Mapping[str, int], experts: EvenExperts | None = None) -> TripCount:
    """Return the trip counts of the step's loops that XLA cannot determine. The model's name scopes identify the loops.

    attention: as returned by ``AttentionFamily.turns``. experts: None for a model without experts.
    """

    def count(loop: Operation) -> float | None:
        scopes = re.findall(r"\w+", loop.op_name)
        if any(scope.startswith("attend_") for scope in scopes):  # the innermost known scope
            return next((attention[scope] for scope in reversed(scopes) if scope in attention), max(attention.values()))
        if experts and loop.op_name.endswith("/experts/while"):
            return experts.turns()
        return 0 if "/dispatch/" in loop.op_name else None

    return count


def drafting_trip_counts(passes: Mapping[int, TripCount]) -> TripCount:
    """Return the trip counts of the drafting program. passes: tokens per DP rank, as named in the MTP module's scopes → trip counts."""

    def count(loop: Operation) -> float | None:
        named = re.search(r"/mtp_(\d+)/", loop.op_name)
        return passes[int(named[1])](loop) if named else None

    return count
