"""The rule of ``method="auto"``, for the dispatch itself, the dry run and the planner, which must not import JAX for it."""

from __future__ import annotations

from sharding.dispatch.config import default_capacity, even_routing_rows, host_capacity

CPU_GATHER_TOKENS, IN_MEMORY_GATHER_TOKENS = 256, 16
"""Most tokens of a rank that ``auto`` gathers between emulated devices: by XLA's collectives, and by copies in memory."""
PADDED_TOKENS = 512
INSIDE_PER_BETWEEN = 4
"""Rows that a device sends over its fast link in the time of one to another host, at the least: 200 and 50 GB/s of an H800, 450 and 50 of
an H200 (``configs/hardware``, ``configs/clusters``)."""


def choose_method(
    method: str,
    tokens: int,
    top_k: int,
    ranks: int,
    platform: str,
    *,
    overlapped: bool = False,
    on_host: int = 1,
    routed_groups: tuple[int, int] | None = None,
    in_memory: bool = False,
) -> str:
    """``gather``, ``padded``, ``ragged`` or ``hierarchical``: the one that ``dispatch`` takes where ``method`` was asked for.

    What is asked for by name is taken, but that ``hierarchical`` needs several hosts with several of the ranks each, and is ``padded``
    without. For ``auto`` the number of tokens decides, in which the phase shows.

    tokens: tokens of one rank (per chunk); top_k: experts a token uses; ranks: over which whole experts
    are spread (1 where only their width is split: then ``gather`` is all there is to do); overlapped, routed_groups: as in
    ``DispatchConfig``; in_memory: whether rows pass so, as there, which ``auto`` comes to for an FP8 wire, a width that is split and
    experts without native kernels, since others read tokens where they lie; on_host: how many of the ranks share each host, 1 where
    nothing is known of hosts.

    - ``gather`` where no method could move fewer rows: when ``padded``'s capacity is all of a rank's tokens (few tokens, or
      few ranks, so that a token has an expert nearly everywhere). Two collectives, no queues. Between hosts a ring brings each row to a
      host once, as ``hierarchical`` does.
    - On emulated CPU devices ``gather`` was the fastest at every size measured: between 32 of them an all-gather takes 1.2 ms, and an
      all-to-all of as many rows, which copies each pair's block by itself, 3 to 5; ``ragged`` is emulated by padding. But each device
      then holds every token of the group, in one memory: past ``CPU_GATHER_TOKENS`` tokens ``padded``, whose buffers are smaller (a
      third, on 32 ranks). Where rows pass in memory an all-to-all costs no more than other exchanges, and every row that is not copied
      is time saved: there past ``IN_MEMORY_GATHER_TOKENS``.
    - On accelerators ``hierarchical`` where the ranks are on several hosts, several on each, and what is sent between hosts and
      inside them takes less time so (``crosses_cheaper``). Many hosts have hardly two experts of a token on one of them.
    - Else on accelerators ``padded`` for decode, up to ``PADDED_TOKENS``, where latency counts and nothing should be
      negotiated; ``ragged`` for prefill, where bytes count. This is how DeepEP's low-latency and normal kernels divide
      the work; the threshold is not measured here.
    """
    in_two_stages = on_host not in (1, ranks)
    if method != "auto":
        return "padded" if method == "hierarchical" and not in_two_stages else method
    if default_capacity(tokens, top_k, ranks, overlapped) >= tokens:
        return "gather"
    if platform == "cpu":
        return "gather" if tokens <= (IN_MEMORY_GATHER_TOKENS if in_memory else CPU_GATHER_TOKENS) else "padded"
    direct = "padded" if overlapped or tokens <= PADDED_TOKENS else "ragged"
    if not in_two_stages:
        return direct
    hosts, capacity = ranks // on_host, default_capacity(tokens, top_k, ranks, overlapped)
    crossing = host_capacity(tokens, top_k, hosts, overlapped, routed_groups)
    each = capacity if direct == "padded" else even_routing_rows(tokens, top_k, ranks)
    return "hierarchical" if crosses_cheaper(crossing, capacity, each, ranks, on_host) else direct


def crosses_cheaper(crossing: int, capacity: int, each: float, ranks: int, on_host: int) -> bool:
    """Whether the rows of a rank take less time by way of one rank on each host than straight to the ranks of other hosts.

    A row inside a host counts as ``1 / INSIDE_PER_BETWEEN`` of one between hosts; rows that go straight to neighbours travel beside
    those, and count nothing.

    crossing, capacity: rows for a host and, inside it, for a rank, as of ``ExchangePlan``. each: rows that go straight to a rank.
    """
    hosts = ranks // on_host
    in_two = crossing * (hosts - 1) + capacity * (ranks - hosts) / INSIDE_PER_BETWEEN
    return in_two < each * (ranks - on_host)
