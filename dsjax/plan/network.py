"""Times on the links: the exchanges of expert parallelism, the sums of tensor parallelism, the transfer of a cache."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from dsjax.config import ModelConfig
from dsjax.plan.cluster import Cluster
from dsjax.plan.curves import Curve
from dsjax.plan.figure import assumed, measured
from dsjax.plan.operations import (
    ALL_REDUCE,
    COMBINE_ROW_BYTES,
    DISPATCH_ROW_BYTES,
    all_reduce_curves,
    low_latency_fit,
    normal_shares,
)
from dsjax.plan.operator_tables import AICONFIGURATOR, BUNDLED, NORMAL_DEVICE, OperatorTables, as_filed
from sharding.dispatch import choose_method, default_capacity, even_routing_rows, host_capacity
from sharding.dispatch import hosts_of_a_token as mean_hosts
from sharding.mesh import MeshSpec

_REFERENCE_LATENCY = 2e-6
"""Latency of the network on which the fixed part was measured: InfiniBand, one way."""
NCCL_TESTS = (
    "all_reduce_perf of nccl-tests, up to 16 KB between two hosts of one device each: 31 µs over ConnectX-7 "
    "(NVIDIA/dgx-spark-playbooks pull request 103), 19 µs of one A100 a host over HDR (NVIDIA/nccl-tests issue 150)"
)
NCCL_TESTS_HOSTS = (
    "all_reduce_perf of nccl-tests, small sizes over hosts of 8 H100: 75 µs out of place, 62 in place (NVIDIA/nccl issue 1453); low "
    "end: that of hosts with one device each"
)

COLLECTIVES_INSIDE = (
    "NCCL's own model of a gather over 8 devices of NVLink is 10.8 µs: 6.6, and 0.6 for each device passed (src/graph/tuning.cc, "
    "NVIDIA/nccl issue 1334); low end: 3.7 µs of a message between H800s in a CUDA graph (NVIDIA/nccl issue 1984); high end: gathers and "
    "scattered sums of 2 to 64 KB over 8 H800, most of them 25 to 34 µs without a graph (SGLang, benchmark_symm_mem)"
)
COLLECTIVES_BETWEEN = (
    "NCCL's own model of a gather over two to four hosts of 8 devices is 24 to 45 µs (src/graph/tuning.cc, NVIDIA/nccl issue 1334); "
    "the ends hold sums: 19 and 31 µs between two hosts of one device each, 62 to 75 over hosts of 8 (NVIDIA/nccl-tests issue 150, "
    "NVIDIA/dgx-spark-playbooks pull request 103, NVIDIA/nccl issue 1453)"
)


def collective_start(cluster: Cluster, *, between: bool) -> float:
    """Seconds of a collective of XLA's that do not grow with its bytes: over the network, or within a scale-up domain."""
    alike = (
        None
        if cluster.hardware.platform == "cuda"
        else "as of NCCL: no times of small messages were found for such links"
    )
    if between:
        name, why = "a collective over the network, fixed part", alike or COLLECTIVES_BETWEEN
        return assumed(30e-6, 15e-6, 80e-6, name, why, "s")
    return assumed(
        10e-6, 4e-6, 30e-6, "a collective in a scale-up domain, fixed part", alike or COLLECTIVES_INSIDE, "s"
    )


def network_latency(cluster: Cluster) -> float:
    """Seconds one way between hosts."""
    return assumed(cluster.latency, cluster.latency_low, cluster.latency_high, "network latency", cluster.network, "s")


def torus_hops(cluster: Cluster) -> float:
    """Links that a row crosses on average: 1 behind a switch; on a TPU's 2-D torus a quarter (wrapped) to a third of each side."""
    if cluster.hardware.platform != "tpu":
        return 1.0
    wide = 2 ** math.ceil(math.log2(cluster.domain) / 2)
    sides = wide + cluster.domain / wide
    return assumed(
        0.3 * sides, sides / 4, sides / 3, "torus hops", f"{wide} × {cluster.domain // wide} chips, wrapped or not"
    )


def _timed_inside(
    cluster: Cluster,
    ranks: int,
    share: float,
    curve: Curve | None,
    tokens: float,
    slowest: float,
    name: str,
    operators: OperatorTables,
    timed_on: str,
) -> float | None:
    """Seconds within one scale-up domain by a table of 8 ranks of a host; None where there is none for such a device.

    share: bytes that leave a device ÷ those that did when the table was made. The fixed part stays; the rest goes with the link.
    timed_on: key of the device that the table was made on.
    """
    hardware = cluster.hardware
    tabled = (hardware.operators or hardware.key) in operators.devices
    if curve is None or ranks > cluster.domain or not (tabled and hardware.same_die) or hardware.key == "h800":
        return None
    there = operators.device(timed_on).scale_up_bandwidth
    fixed = curve.seconds[0]
    moving = max(0.0, curve(tokens) - fixed) * share * there / hardware.scale_up_bandwidth
    return measured(1.0, 0.93, 1.07, name, AICONFIGURATOR) * (moving * slowest + fixed)


def low_latency_exchange(
    cluster: Cluster,
    ranks: int,
    tokens: float,
    top_k: int,
    row_bytes: float,
    slowest: float,
    combine: bool,
    operators: OperatorTables = BUNDLED,
    known: dict | None = None,
) -> float:
    """One way of DeepEP's low-latency kernels: a row for each of a token's `top_k` experts, straight to its rank.

    tokens: of one device; ranks: neighbouring devices of the EP group; slowest: load of the busiest rank ÷ the mean. known: keeps what
    the links of this cluster come to; give the same dict to all steps on it.
    """
    if ranks == 1:
        return 0.0
    usual = COMBINE_ROW_BYTES if combine else DISPATCH_ROW_BYTES
    share = row_bytes / usual * (ranks - 1) / ranks / (7 / 8)
    timed_on = cluster.hardware.operators or cluster.hardware.key
    curve, name = operators.low_latency(timed_on, combine), "low-latency kernels in one host"
    timed = _timed_inside(cluster, ranks, share, curve, tokens, slowest, name, operators, timed_on)
    if timed:
        return timed
    known = {} if known is None else known
    if (key := ("low-latency links", ranks, combine)) not in known:
        known[key] = _Links.of(cluster.between(ranks), ranks, *low_latency_fit(combine))
    links: _Links = known[key]
    near = links.near
    payload = tokens * top_k * row_bytes
    sent = payload * (near - 1) / ranks
    time = sent * slowest * links.hops / links.inside
    if ranks > near:
        away = (payload * (1 - near / ranks)) * slowest
        time = max(time, away / links.between)
        time = time + links.latency - _REFERENCE_LATENCY
    return time + links.fixed


class _Links(NamedTuple):
    """What an exchange over a group of ranks meets, whatever its size: neighbours that the scale-up link joins, links that a row crosses
    there, bytes a second that its kernels reach on that link and between hosts, the network's latency, and their fixed part."""

    near: int
    hops: float
    inside: float
    between: float
    latency: float
    fixed: float

    @classmethod
    def of(cls, cluster: Cluster, ranks: int, fixed: float, network: float, link: float) -> _Links:
        """network, link: shares of the two that the kernels reach; cluster: as such a group meets it (`Cluster.between`)."""
        inside, between = link * cluster.hardware.scale_up_bandwidth, network * cluster.network_bandwidth
        near = min(cluster.domain, ranks)
        return cls(near, torus_hops(cluster), inside, between, network_latency(cluster), fixed)


def normal_exchange(
    cluster: Cluster,
    config: ModelConfig,
    ranks: int,
    tokens: float,
    row_bytes: float,
    slowest: float,
    combine: bool = False,
    operators: OperatorTables = BUNDLED,
    known: dict | None = None,
) -> float:
    """One way of DeepEP's normal kernels: a row once to each host that has one of its experts, then over the fast link.

    known: as of `low_latency_exchange`.
    """
    if ranks == 1:
        return 0.0
    domains = cluster.domains_of(ranks)
    top_k = config.num_experts_per_tok
    spread = ranks * (1 - (1 - 1 / ranks) ** top_k) * (ranks - 1) / ranks
    usual = (COMBINE_ROW_BYTES if combine else DISPATCH_ROW_BYTES) * 8 * (1 - (7 / 8) ** top_k) * 7 / 8
    timed = _timed_inside(
        cluster,
        ranks,
        row_bytes * spread / usual,
        operators.normal(combine),
        tokens,
        slowest,
        "normal kernels in one host",
        operators,
        NORMAL_DEVICE,
    )
    if timed:
        return timed
    known = {} if known is None else known
    if (key := ("normal links", ranks)) not in known:
        fixed = assumed(40e-6, 20e-6, 80e-6, "normal kernels, fixed part", "layout exchange and synchronisation", "s")
        known[key] = _Links.of(cluster.between(ranks), ranks, fixed, *normal_shares())
    links: _Links = known[key]
    inside = (tokens * row_bytes * spread) * slowest
    time = inside * links.hops / links.inside
    if domains > 1:
        rows = hosts_of_a_token(config, domains) * (domains - 1) / domains
        away = (tokens * row_bytes * rows) * slowest
        time = max(time, away / links.between) + links.latency * 2
    return time + links.fixed


def own_method(
    dispatch: str,
    mesh: MeshSpec,
    domain: int,
    tokens: float,
    top_k: int,
    overlapped: bool = False,
    routed_groups: tuple[int, int] | None = None,
) -> str:
    """The method that dsjax's own dispatch takes for so many tokens of a device on an accelerator, as the engine resolves it.

    domain: neighbouring devices that fast links join. overlapped, routed_groups: as of `DispatchConfig`, here and below; with the
    former the tokens are a half batch.
    """
    whole, on_host = max(1, math.ceil(tokens)), _ranks_on_host(mesh, domain)
    about = {"overlapped": overlapped, "on_host": on_host, "routed_groups": routed_groups}
    return choose_method(dispatch, whole, top_k, mesh.ep_size, "gpu", **about)


@lru_cache(maxsize=4096)
def _ranks_on_host(mesh: MeshSpec, domain: int) -> int:
    return mesh.expert_ranks_on_host(domain)


def exchanged_rows(method: str, tokens: float, top_k: int, ranks: int, overlapped: bool = False) -> float:
    """Rows of a device to each other rank: all of its (`gather`), those needed (`ragged`), or the default capacity."""
    whole = max(1, math.ceil(tokens))
    if method == "ragged":
        return even_routing_rows(tokens, top_k, ranks)
    return float(whole if method == "gather" else default_capacity(whole, top_k, ranks, overlapped))


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
) -> float:
    """One way of dsjax's own dispatch (`docs/dispatch.md`) as XLA's collectives.

    method: as `own_method` gives it.
    """
    if ranks == 1:
        return 0.0
    if method == "hierarchical":
        hosts = cluster.domains_of(ranks)
        if 1 < hosts < ranks:
            crossing = host_capacity(max(1, math.ceil(tokens)), top_k, hosts, overlapped, routed_groups) * row_bytes
            inside = hosts * exchanged_rows(method, tokens, top_k, ranks, overlapped) * row_bytes
            return xla_collective(cluster, hosts, crossing, near=1, of=ranks) + xla_collective(
                cluster, ranks // hosts, inside
            )
        method = "padded"
    each = exchanged_rows(method, tokens, top_k, ranks, overlapped)
    each = (each * slowest if method == "ragged" else each) * row_bytes
    kind = {"gather": "all_gather", "padded": "all_to_all", "ragged": "ragged_all_to_all"}[method]
    return xla_collective(cluster, ranks, each, 2 if method == "ragged" else 1, kind)  # sizes go before rows


def spans_hosts(cluster: Cluster, ranks: int) -> bool:
    """Whether so many neighbouring ranks are on more than one host."""
    return ranks > cluster.devices_per_host


def xla_collective(
    cluster: Cluster,
    ranks: int,
    each: float,
    count: int = 1,
    kind: str = "all_to_all",
    near: int | None = None,
    of: int | None = None,
) -> float:
    """Seconds of a collective of XLA's in which a device sends `each` bytes to every other rank; `count` fixed parts.

    What all ranks of a host get alike, or what is summed, crosses to a host once: by a ring through the hosts for each of their devices,
    as NCCL gathers and scatters sums. Rows that differ cross one by one.

    kind: as `dsjax bench network` names it, whose times are taken where the cluster has them. near: ranks that the scale-up link
    joins; default: neighbouring ones. of: neighbouring devices that the ranks are among, where they are not neighbours themselves.
    """
    if cluster.measured is not None and (near is None or of is not None):
        sent = each * (ranks - 1)
        apart = spans_hosts(cluster, of or ranks)
        measured = cluster.measured.seconds(kind, apart, ranks, sent)
        if measured is not None:
            first = cluster.measured.seconds(kind, apart, ranks, 0.0)
            return measured if count == 1 else measured + first * (count - 1)
    near = min(cluster.domain, ranks) if near is None else near
    cluster = cluster.between(of or ranks)
    share = assumed(0.6, 0.35, 0.8, "XLA's collectives, share of a link", "not measured here")
    if kind in ("all_gather", "reduce_scatter"):
        crossing = (ranks - near) / near
        inside = ranks - 1 - crossing
    else:
        crossing, inside = ranks - near, near - 1
    rows = each * inside
    time = rows * torus_hops(cluster) / (share * cluster.hardware.scale_up_bandwidth)
    if ranks > near:
        away = each * crossing
        time = max(time, away / (share * cluster.network_bandwidth)) + network_latency(cluster)
    return time + collective_start(cluster, between=ranks > near) * count


def moved_bytes(cluster: Cluster, ranks: int, size: float) -> float:
    """Seconds in which each of so many neighbouring ranks receives `size` bytes of weights, from any of the others."""
    if cluster.measured is not None:
        measured = cluster.measured.seconds("ragged_all_to_all", spans_hosts(cluster, ranks), ranks, size)
        if measured is not None:
            return measured
    share = assumed(0.6, 0.35, 0.8, "XLA's collectives, share of a link", "not measured here")
    away = 1 - min(cluster.domain, ranks) / ranks
    cluster = cluster.between(ranks)
    time = size * torus_hops(cluster) / (share * cluster.hardware.scale_up_bandwidth)
    return max(time, size * away / (share * cluster.network_bandwidth)) if away else time


def hosts_of_a_token(config: ModelConfig, hosts: int) -> float:
    """Mean number of hosts that hold one of a token's experts, its own among them, whole groups of the router's lying on a host."""
    return mean_hosts(config.num_experts_per_tok, hosts, (config.n_group, config.topk_group))


def all_reduce(cluster: Cluster, ranks: int, size: float, near: int | None = None) -> float:
    """Sum `size` bytes over `ranks` neighbouring devices (or scatter the sum and gather it again).

    near: ranks that the scale-up link joins; default: neighbouring ones.
    """
    if ranks == 1:
        return 0.0
    if cluster.measured is not None and near is None:
        sent = size * (2 * (ranks - 1) / ranks)
        observed = cluster.measured.seconds("all_reduce", spans_hosts(cluster, ranks), ranks, sent)
        if observed is not None:
            return observed
    near = min(cluster.domain, ranks) if near is None else near
    if ranks <= near and (cluster.hardware.is_hopper or cluster.hardware.is_blackwell):
        return _timed_sum(cluster, ranks, size)
    cluster = cluster.between(ranks, ring=True)
    share = assumed(0.7, 0.5, 0.85, "all-reduce, share of scale-up link", "ring or multicast over NVLink or ICI")
    summed = size * (2 * (near - 1) / near)
    time = summed / (share * cluster.hardware.scale_up_bandwidth)
    domains = -(-ranks // near)
    if domains == 1:
        return time + assumed(8e-6, 4e-6, 15e-6, "all-reduce, fixed part", "small all-reduces within a host", "s")
    away = size * (2 / near * (domains - 1) / domains) / (normal_shares()[0] * cluster.network_bandwidth)
    # Ranks of a host that has several go first through its own link, which is the larger part of the fixed time.
    fixed, source = ((68e-6, 31e-6, 75e-6), NCCL_TESTS_HOSTS) if near > 1 else ((31e-6, 19e-6, 75e-6), NCCL_TESTS)
    time = time + away + measured(*fixed, "all-reduce between hosts, fixed part", source, "s")
    hops = 2 * math.ceil(math.log2(domains))
    time = time + network_latency(cluster) * hops - 2 * _REFERENCE_LATENCY
    return time


def _timed_sum(cluster: Cluster, ranks: int, size: float) -> float:
    """A sum over devices that the scale-up link joins, by a published table of H200 or B200.

    The part that does not grow with the bytes stays; the rest goes with the link, and with the share of the bytes that leaves a device
    where more devices take part than were timed.
    """
    hardware, timed = cluster.hardware, min(ranks, 8)
    device = "b200" if hardware.is_blackwell else "h200"
    more = (1 - 1 / ranks) / (1 - 1 / timed) * as_filed(device).scale_up_bandwidth / hardware.scale_up_bandwidth

    def seconds(curve: Curve) -> float:
        fixed = curve.seconds[0]
        return fixed + (curve(size) - fixed) * more

    plain, fused = all_reduce_curves(device, timed)
    ring = seconds(plain)
    value = min(ring, seconds(fused)) if fused else ring
    return measured(value, 0.9 * value, max(1.25 * value, ring), "all-reduce within a host", ALL_REDUCE, "s")


def cache_transfer(cluster: Cluster, size: float, sender: Cluster | None = None, own: bool = False) -> float:
    """Seconds in which one request's cache travels. own: by dsjax's transfer, at the rate of one stream.

    sender: where the prompt was computed, if on another kind of hosts: the thinner of both sides' cards counts. With tiers the two are
    taken to be as far apart as hosts of the cluster can be.
    """
    far = cluster.between(cluster.num_devices)
    bandwidth = far.network_bandwidth
    if sender is not None:
        bandwidth = min(bandwidth, sender.network_bandwidth)
    if own:
        why = (
            "18.3 MB in 23.2 ms by JAX's transfer server, in 11.2 by NIXL, on two shared cores (docs/disaggregation.md)"
        )
        stream = assumed(0.79e9, 0.4e9, 1.63e9, "bytes a second of dsjax's transfer", why, "B/s")
        return size / min(stream, bandwidth)
    return size / (normal_shares()[0] * bandwidth)


def exposed_transfer() -> float:
    """Share of a cache's transfer that is not hidden behind the layers still being computed."""
    return assumed(0.3, 1 / 61, 1.0, "share of the transfer that is exposed", "layer by layer, or after the last layer")
