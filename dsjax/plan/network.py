"""Communication times: expert-parallel exchanges, tensor-parallel all-reduces, and KV cache transfers."""

import math

from dsjax.config import ModelConfig
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumed, assumption, measured
from dsjax.plan.operations import (
    ALL_REDUCE,
    ROW_BYTES,
    all_reduce_curves,
    bundled_device,
    low_latency_fit,
    normal_fit,
    normal_network_share,
)
from dsjax.plan.operator_tables import AICONFIGURATOR, BUNDLED, NORMAL_DEVICE, OperatorTables
from sharding.dispatch import default_capacity, even_routing_rows, host_capacity, hosts_of_a_token

_REFERENCE_LATENCY = 2e-6
"""One-way latency of the network on which the fixed part was measured (InfiniBand)."""


def collective_start(*, between: bool) -> float:
    """Return the seconds of an XLA collective that do not grow with its bytes, over the network or within a scale-up domain."""
    within = "a collective in a scale-up domain, fixed part"
    return assumption("a collective over the network, fixed part" if between else within)


def network_latency(cluster: Cluster) -> float:
    """Return the one-way latency between hosts, in seconds."""
    return assumed(cluster.latency, cluster.latency_low, cluster.latency_high, "network latency", cluster.network, "s")


def torus_hops(cluster: Cluster) -> float:
    """Return the average number of links a row crosses: 1 behind a switch; on a TPU's 2-D torus ¼ (wrapped) to ⅓ of each side."""
    if cluster.hardware.platform != "tpu":
        return 1.0
    wide = 2 ** math.ceil(math.log2(cluster.domain) / 2)
    sides = wide + cluster.domain / wide
    why = f"{wide} × {cluster.domain // wide} chips, wrapped or not"
    return assumed(0.3 * sides, sides / 4, sides / 3, "torus hops", why)


def deepep_exchange(
    cluster: Cluster,
    config: ModelConfig,
    ranks: int,
    tokens: float,
    row_bytes: float,
    slowest: float,
    combine: bool = False,
    low_latency: bool = False,
    operators: OperatorTables = BUNDLED,
    known: dict | None = None,
) -> float:
    """Return the seconds of a DeepEP dispatch or combine. Normal: a row goes once to each host that has one of its experts, then over the
    fast link. Low-latency: one row for each of a token's experts goes directly to its rank.

    tokens: of one device; ranks: neighbouring devices of the EP group; slowest: load of the busiest rank ÷ the mean. known: cache of this
    cluster's link rates; pass the same dict for all steps on it.
    """
    if ranks == 1:
        return 0.0
    hardware = cluster.hardware
    top_k = config.num_experts_per_tok
    domains = cluster.domains_of(ranks)
    tabled = hardware.operators or hardware.key
    curve = operators.deepep(tabled, combine, low_latency)
    # Rows of a token that leave a device, that leave it with the table's 8 ranks, over the fast link, and between domains.
    if low_latency:
        name, timed_on = "low-latency kernels in one host", tabled
        near = min(cluster.domain, ranks)
        shares = (1 - 1 / ranks, 7 / 8, (near - 1) / ranks, 1 - near / ranks)
        rows, usual, inside, away = (top_k * share for share in shares)
    else:
        name, timed_on = "normal kernels in one host", NORMAL_DEVICE
        rows, usual = (n * (1 - (1 - 1 / n) ** top_k) * (1 - 1 / n) for n in (ranks, 8))
        hosts = hosts_of_a_token(top_k, domains, (config.n_group, config.topk_group)) if domains > 1 else 0.0
        inside = rows
        away = hosts * (1 - 1 / domains)
    if curve and domains == 1 and hardware.same_die and hardware.key != "h800" and tabled in operators.devices:
        # From a table of 8 ranks of a host: the fixed part stays, the rest scales with the link.
        faster = hardware.scale_up_bandwidth / operators.device(timed_on).scale_up_bandwidth
        share = row_bytes / ROW_BYTES[combine] * rows / usual / faster
        fixed = curve.seconds[0]
        time = max(0.0, curve(tokens) - fixed) * share * slowest + fixed
        return measured(1.0, 0.93, 1.07, name, AICONFIGURATOR) * time
    known = {} if known is None else known
    if (key := ("links", ranks, low_latency, combine)) not in known:
        fixed, network, link = low_latency_fit(combine) if low_latency else normal_fit()
        rates = link * hardware.scale_up_bandwidth / torus_hops(cluster), network * cluster.network_bandwidth
        known[key] = (*rates, network_latency(cluster), fixed)
    link, network, latency, fixed = known[key]
    sent = tokens * row_bytes * slowest
    if not away:
        return sent * inside / link + fixed
    latency = latency - _REFERENCE_LATENCY if low_latency else latency * 2
    return max(sent * inside / link, sent * away / network) + latency + fixed


def exchanged_rows(method: str, tokens: float, top_k: int, ranks: int, overlapped: bool = False) -> float:
    """Return the rows from a device to each other rank: all its rows (`gather`), those needed (`ragged`), or the default capacity."""
    whole_tokens = max(1, math.ceil(tokens))
    if method == "ragged":
        return even_routing_rows(tokens, top_k, ranks)
    return float(whole_tokens if method == "gather" else default_capacity(whole_tokens, top_k, ranks, overlapped))


def own_exchange(
    cluster: Cluster,
    method: str,
    ranks: int,
    tokens: float,
    top_k: int,
    row_bytes: float,
    slowest: float,
    overlapped: bool = False,
    routed_groups: tuple[int, int] | None = None,
    sharing: int = 1,
    pooled: str = "all_gather",
) -> float:
    """Return the seconds of one direction of dsjax's own dispatch (`docs/dispatch.md`), as XLA's collectives.

    method: one of `StepBasis.own_method`, or `even`: only the rows that even routing needs. sharing: neighbouring ranks that share an
    expert's width and pool their rows, unused capacity included (`ExpertGroup.pool_width`), by a collective of the kind `pooled`; 1 for
    `gather`, which has no such step.
    """
    if ranks * sharing == 1:
        return 0.0
    is_ragged = method == "ragged"
    whole_tokens = max(1, math.ceil(tokens))
    num_devices = ranks * sharing
    rank_bytes = exchanged_rows("ragged" if method == "even" else method, tokens, top_k, ranks, overlapped) * row_bytes
    time = 0.0
    hosts = cluster.domains_of(num_devices)
    if sharing > 1:
        sent = whole_tokens * row_bytes if is_ragged else rank_bytes
        time = xla_collective(cluster, sharing, ranks * sent, kind=pooled)
    if method == "hierarchical" and 1 < hosts < ranks:
        crossing = host_capacity(whole_tokens, top_k, hosts, overlapped, routed_groups) * row_bytes
        near = ranks // hosts
        time += xla_collective(cluster, hosts, crossing, near=1, of=num_devices)
        return time + xla_collective(cluster, near, hosts * rank_bytes, near=near, of=near * sharing)
    if ranks == 1:
        return time
    near = max(1, min(ranks, cluster.domain // sharing))
    if is_ragged:  # sizes are sent before rows
        return time + xla_collective(cluster, ranks, rank_bytes * slowest, 2, "ragged_all_to_all", near, num_devices)
    return time + xla_collective(
        cluster, ranks, rank_bytes, 1, "all_gather" if method == "gather" else "all_to_all", near, num_devices
    )


def _observed(cluster: Cluster, kind: str, ranks: int, sent: float, among: int | None = None) -> float | None:
    """Return the seconds of a collective as measured on this cluster, or None. among: neighbouring devices that contain the ranks."""
    if cluster.measured is None:
        return None
    return cluster.measured.seconds(kind, (among or ranks) > cluster.devices_per_host, ranks, sent)


def xla_collective(
    cluster: Cluster,
    ranks: int,
    rank_bytes: float,
    count: int = 1,
    kind: str = "all_to_all",
    near: int | None = None,
    of: int | None = None,
) -> float:
    """Return the seconds of an XLA collective in which a device sends `rank_bytes` bytes to every other rank, with `count` fixed parts.

    Gathered rows and sums cross to a host once, by one ring through the hosts for each of their devices, as in NCCL. The rows of an
    all-to-all cross one by one.

    kind: a name of `dsjax bench network`, whose times are used if the cluster has them. near: ranks that the scale-up link joins; None: as
    many neighbours as it reaches. of: neighbouring devices that contain the ranks, if the ranks are not neighbours themselves.
    """
    if near is None or of is not None:
        observed = _observed(cluster, kind, ranks, rank_bytes * (ranks - 1), of)
        if observed is not None:
            return observed if count == 1 else observed + _observed(cluster, kind, ranks, 0.0, of) * (count - 1)
    near = min(cluster.domain, ranks) if near is None else near
    crossing = (ranks - near) / (near if kind in ("all_gather", "reduce_scatter") else 1)
    share = assumption("XLA's collectives, share of a link")
    inside = rank_bytes * (ranks - 1 - crossing)
    time = inside * torus_hops(cluster) / (share * cluster.hardware.scale_up_bandwidth)
    time = max(time, rank_bytes * crossing / (share * cluster.network_bandwidth))
    latency = network_latency(cluster) if ranks > near else 0.0
    return time + latency + collective_start(between=ranks > near) * count


def all_reduce(cluster: Cluster, ranks: int, size: float, near: int | None = None) -> float:
    """Return the seconds to all-reduce `size` bytes over `ranks` neighbouring devices, or to reduce-scatter and all-gather them.

    near: ranks that the scale-up link joins; None: as many neighbours as it reaches.
    """
    if ranks == 1:
        return 0.0
    observed = _observed(cluster, "all_reduce", ranks, size * (2 * (ranks - 1) / ranks))
    if observed is not None:
        return observed
    near = near or min(cluster.domain, ranks)
    if ranks <= near and (cluster.hardware.is_hopper or cluster.hardware.is_blackwell):
        return _timed_sum(cluster, ranks, size)
    share = assumption("all-reduce, share of scale-up link")
    time = size * (2 * (near - 1) / near) / (share * cluster.hardware.scale_up_bandwidth)
    domains = -(-ranks // near)
    if domains == 1:
        return time + assumption("all-reduce, fixed part")
    away = size * (2 / near * (domains - 1) / domains) / (normal_network_share() * cluster.network_bandwidth)
    # Several ranks of a host first go through its own link, which is the larger part of the fixed time.
    several = "all-reduce between hosts of several devices"
    fixed = assumption(several if near > 1 else "all-reduce between hosts of one device")
    hops = 2 * math.ceil(math.log2(domains))
    latency = network_latency(cluster) * hops - 2 * _REFERENCE_LATENCY
    return time + away + fixed + latency


def _timed_sum(cluster: Cluster, ranks: int, size: float) -> float:
    """Return the seconds of an all-reduce in a scale-up domain, by a published table of H200 or B200. The fixed part stays; the rest scales
    with the link, and with the share of the bytes that leaves a device if more devices take part than were timed."""
    hardware = cluster.hardware
    timed = min(ranks, 8)
    device = "b200" if hardware.is_blackwell else "h200"
    more = (1 - 1 / ranks) / (1 - 1 / timed) * bundled_device(device).scale_up_bandwidth / hardware.scale_up_bandwidth
    ring, *fused = (
        curve.seconds[0] + (curve(size) - curve.seconds[0]) * more for curve in all_reduce_curves(device, timed)
    )
    value = min([ring, *fused])
    return measured(value, 0.9 * value, max(1.25 * value, ring), "all-reduce within a host", ALL_REDUCE, "s")


def cache_transfer(cluster: Cluster, size: float, sender: Cluster | None = None, is_dsjax: bool = False) -> float:
    """Return the seconds to transfer one request's cache between the most distant hosts. is_dsjax: by one stream of dsjax's transfer.

    sender: where the prompt was computed, if on another kind of hosts; the slower card of both sides then counts.
    """
    bandwidth = cluster.network_bandwidth
    if sender is not None:
        bandwidth = min(bandwidth, sender.network_bandwidth)
    if not is_dsjax:
        return size / (normal_network_share() * bandwidth)
    return size / min(assumption("bytes a second of dsjax's transfer"), bandwidth)


def exposed_transfer() -> float:
    """Return the share of a cache's transfer that is not hidden behind layers still being computed."""
    return assumption("share of the transfer that is exposed")
