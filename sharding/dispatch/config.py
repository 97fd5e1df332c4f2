"""``DispatchConfig``: how tokens are sent to their experts, and how large the buffers are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sharding.errors import MeshError

if TYPE_CHECKING:  # the planner reads this file without JAX
    from sharding.dispatch.group import InMemory
    from sharding.dispatch.transit import Method

METHODS = ("auto", "gather", "padded", "ragged", "hierarchical")
WIRES = ("compute", "fp8")


@dataclass(frozen=True)
class DispatchConfig:
    """How rows are exchanged inside an EP group. Every setting gives the same result; they differ in cost.

    method: ``gather``, ``padded``, ``ragged``, ``hierarchical``, ``auto`` (``sharding.dispatch.choice`` has the rule), or your own
        class (``sharding.dispatch.Method``).
    capacity: rows that one rank may send to another in one round of ``padded``, of ``hierarchical`` or of the emulated ``ragged``;
        None applies ``default_capacity``. Tokens over capacity go in further rounds.
    devices_per_host: neighbours in the mesh that share a host; None: hosts are unknown. Without several ranks of an EP group on each of
        several hosts, ``hierarchical`` is ``padded``. Its ``capacity`` is the rows for a rank; a host has room for those of all its ranks.
    routed_groups: (router groups, groups that contain a token's experts), if a host holds whole groups or a group spans whole hosts:
        ``hierarchical`` then sizes its buffers for the hosts that a token can reach. None: any expert may be chosen.
    wire: ``compute`` sends rows in their own dtype; ``fp8`` sends e4m3 with a float32 scale per 128 values. Combine
        always uses the compute dtype.
    chunk_tokens: most tokens per rank in one exchange; larger inputs go through a ``lax.scan``. None: no limit.
    report: whether ``dispatch`` also returns counts (tokens per expert, rows, rounds).
    overlapped: whether something else is computed while rows travel. ``auto`` then never chooses ``ragged``, which XLA's GPU scheduler
        does not overlap with anything, and the default capacity is a multiple of 4 instead of 8, because each half batch has its own.
    by_choice: whether the results of a token's experts return separately and are added on the token's rank, in the order of its choices.
        A token's sum then has the same bits for any method, mesh and placement of experts (``docs/exactness.md``). Otherwise a rank adds
        up the results of its experts before it returns them, which moves fewer rows.
    in_memory: carries rows between devices of one process; None: XLA's collectives do. It requires ``by_choice`` and sequential exchanges
        (not ``overlapped``). With it, ``auto`` sends nothing if experts can read tokens in place (``sharding/dispatch/methods.py``).
    """

    method: Literal["auto", "gather", "padded", "ragged", "hierarchical"] | type[Method] = "auto"
    capacity: int | None = None
    wire: Literal["compute", "fp8"] = "compute"
    chunk_tokens: int | None = None
    report: bool = False
    by_choice: bool = False
    overlapped: bool = False
    in_memory: InMemory | None = None
    devices_per_host: int | None = None
    routed_groups: tuple[int, int] | None = None

    @property
    def reads_in_memory(self) -> bool:
        """Whether experts read tokens in place. This needs the ``compute`` wire: tokens read in place are not rounded to FP8."""
        could = self.in_memory is not None and self.in_memory.experts_read_tokens
        return could and (self.method, self.wire) == ("auto", "compute")

    def __post_init__(self):
        if self.method not in METHODS and not hasattr(self.method, "check_members"):
            raise MeshError(
                f"dispatch method {self.method!r}; expected one of {METHODS}, or a class that inherits sharding.dispatch.Method"
            )
        if self.method not in METHODS:
            self.method.check_members()
        if self.wire not in WIRES:
            raise MeshError(f"dispatch wire {self.wire!r}; expected one of {WIRES}")
        if self.in_memory is not None and (self.overlapped or not self.by_choice):
            raise MeshError("rows pass in memory where terms come back by choice and exchanges are one after the other")
        for name in ("capacity", "chunk_tokens", "devices_per_host"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MeshError(f"dispatch {name}={value}; expected at least 1, or None")


def default_capacity(tokens: int, top_k: int, ranks: int, overlapped: bool = False) -> int:
    """Return the rows that a rank may send to one other rank per round, if no capacity is configured.

    tokens: tokens of the sending rank; ranks: size of the EP group. With even routing, a token has an expert on a given rank with
    probability ``p = 1 - (1 - 1/ranks)^top_k``. The result is the mean ``tokens * p`` plus four standard deviations, rounded up to a
    multiple of 8 (4 if ``overlapped``), at most ``tokens``. A further round is then rare, except if few rows go to each of many ranks: with
    64 choices on each of 32 ranks, some pair exceeds its 8 rows in one of six layers.
    """
    return _with_margin(tokens, 1.0 - (1.0 - 1.0 / ranks) ** top_k, overlapped)


def even_routing_rows(tokens: float, top_k: int, ranks: int) -> float:
    """Return the mean rows from one rank to another if all experts are equally likely: ``T (1 - (1 - 1/G)^K)``."""
    return tokens * (1.0 - (1.0 - 1.0 / ranks) ** top_k)


def host_capacity(
    tokens: int, top_k: int, hosts: int, overlapped: bool = False, routed_groups: tuple[int, int] | None = None
) -> int:
    """Return the rows a rank may send to another host per round of ``hierarchical``: ``default_capacity`` with hosts for ranks."""
    return _with_margin(tokens, hosts_of_a_token(top_k, hosts, routed_groups) / hosts, overlapped)


def hosts_of_a_token(top_k: int, hosts: int, routed_groups: tuple[int, int] | None = None) -> float:
    """Return the mean number of hosts with an expert of a token, its own host included, if allowed experts are equally likely.

    routed_groups: as in ``DispatchConfig``. If hosts hold whole groups, a token's groups are on few hosts. If a group spans several
    hosts, its share of the token's experts is spread over these hosts.
    """
    groups, chosen = routed_groups or (1, 1)
    if chosen >= groups:
        return hosts * (1 - (1 - 1 / hosts) ** top_k)
    if hosts <= groups:
        whole = round(groups / hosts)
        missed = math.comb(groups - whole, chosen) / math.comb(groups, chosen) if groups - whole >= chosen else 0.0
        return hosts * (1 - missed)
    span = hosts / groups
    return min(chosen * span * (1 - (1 - 1 / span) ** (top_k / chosen)), float(top_k))


def _with_margin(tokens: int, p: float, overlapped: bool) -> int:
    """Return the mean rows of ``tokens`` tokens sent with probability ``p``, plus four standard deviations, rounded up."""
    wanted = tokens * p + 4.0 * (tokens * p * (1.0 - p)) ** 0.5
    multiple = 4 if overlapped else 8
    return max(1, min(tokens, multiple * -(-int(wanted + 0.999) // multiple)))
