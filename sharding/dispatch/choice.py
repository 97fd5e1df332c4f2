"""The rule for ``method="auto"``, used by the dispatch, the dry run and the planner, which must not import JAX for it."""

from sharding.dispatch.config import default_capacity, even_routing_rows, host_capacity

CPU_GATHER_TOKENS, IN_MEMORY_GATHER_TOKENS = 256, 16
"""Most tokens per rank that ``auto`` gathers between emulated devices: with XLA's collectives, and with copies in memory."""
PADDED_TOKENS = 512
INSIDE_PER_BETWEEN = 4
"""Rows a device sends over its fast link in the time of one row to another host, at least: 200 and 50 GB/s on an H800, 450 and 50 GB/s
on an H200 (``configs/hardware``, ``configs/clusters``)."""


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
    """Return the method that ``dispatch`` uses for a requested ``method``: ``gather``, ``padded``, ``ragged`` or ``hierarchical``.

    A method requested by name is used, except that ``hierarchical`` needs several hosts with several ranks each and otherwise becomes
    ``padded``. ``auto`` decides by the number of tokens, which reflects the phase (prefill or decode).

    tokens: tokens of one rank (per chunk); top_k: experts per token; ranks: ranks over which whole experts are spread; on_host: ranks that
    share each host, 1 if hosts are unknown; overlapped, routed_groups: as in ``DispatchConfig``; in_memory: whether rows are exchanged in
    memory, which ``auto`` does if experts cannot read tokens in place (FP8 wire, split width, no native kernels).

    - ``gather`` if no method could move fewer rows: if ``padded``'s capacity is all of a rank's tokens (few tokens, or so few ranks that a
      token has an expert nearly everywhere). Between hosts, a ring brings each row to a host once, as ``hierarchical`` does.
    - On emulated CPU devices ``gather`` is the fastest at every size: between 32 devices an all-gather takes 1.2 ms, an all-to-all of as
      many rows 3 to 5 ms, because it copies each pair's block separately. But each device then holds every token of the group: above
      ``CPU_GATHER_TOKENS``, ``padded`` needs a third of the memory on 32 ranks. If rows are exchanged in memory, an all-to-all costs no
      more, and fewer rows save time: the threshold is ``IN_MEMORY_GATHER_TOKENS``.
    - On accelerators ``hierarchical`` if several hosts have several ranks each, and two stages take less time.
    - Otherwise ``padded`` for decode, up to ``PADDED_TOKENS``, where latency counts and no sizes should be exchanged first, and ``ragged``
      for prefill, where bytes count. DeepEP's low-latency and normal kernels divide the work the same way; the threshold is not measured.
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
    # Compare the time of a rank's rows, in rows between hosts. Direct rows inside a host travel at the same time, and count as zero.
    in_two = crossing * (hosts - 1) + capacity * (ranks - hosts) / INSIDE_PER_BETWEEN
    return "hierarchical" if in_two < each * (ranks - on_host) else direct
