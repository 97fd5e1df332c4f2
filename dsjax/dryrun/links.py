"""What a collective puts on a device's links when its algorithm is chosen for them: inside a scale-up domain, and between."""

from __future__ import annotations

from sharding.program import ProgramCollective

INSIDE, BETWEEN = "network inside", "network between"


def carried_bytes(one: ProgramCollective) -> tuple[float, float, int]:
    """``(bytes over a device's scale-up link, bytes through its share of the network, latencies one after another)``.

    Exchanges send every row straight to where it belongs. A gather brings each row to a host once, through one of its cards, and
    on over the fast links; scattered sums go the other way; an all-reduce is one after the other. This is what rings over
    hosts come to (NCCL's algorithms for many ranks), where a direct exchange would send each row to every rank of a host.
    """
    n, h = one.ranks, one.neighbours
    hosts = -(-n // h)
    size = one.operand_bytes
    if one.kind in ("all-gather", "collective-broadcast"):
        return (size * (n - 1) if h > 1 else 0), size * (n - h) / h, hosts - 1
    part = size / n
    if one.kind == "reduce-scatter":
        return (part * (n - 1) if h > 1 else 0), part * (n - h) / h, hosts - 1
    if one.kind == "all-reduce":
        return (2 * part * (n - 1) if h > 1 else 0), 2 * part * (n - h) / h, 2 * (hosts - 1)
    return one.bytes_inside, one.bytes_between, min(hosts - 1, 1) if one.bytes_between else 0
