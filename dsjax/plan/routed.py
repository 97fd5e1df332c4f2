"""The routed experts of a step: their products on the busiest rank, and the way there and back."""

from __future__ import annotations

import math
from functools import partial

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumed
from dsjax.plan.network import (
    all_reduce,
    exchanged_rows,
    low_latency_exchange,
    normal_exchange,
    own_exchange,
    xla_collective,
)
from dsjax.plan.precision import BF16
from dsjax.plan.program import exchange_run, exchanges, nearest
from dsjax.plan.step_basis import StepBasis
from sharding.dispatch import host_capacity


def routed_experts(
    step: StepBasis, tokens: float, decode: bool, layers: int, busy: float, halved: bool = False
) -> dict[str, float]:
    """The routed experts, the way there and the way back, of so many layers.

    They hang on the tokens of a device and the size of the EP group: with published kernels and whole experts `dp=32` is as `dp=16,tp=2`
    with twice the batch. halved: the tokens are one of two half batches.
    """
    config, mesh, chip = step.config, step.layout.mesh, step.chip
    width, hidden, top_k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    rank_tokens, devices = tokens / mesh.tp_size, mesh.num_devices // mesh.expert_copies
    split = mesh.expert_width_shards
    balanced = step.places_by_load
    fused = step.layout.fused
    places = step.expert_slots
    key = (
        "experts",
        rank_tokens,
        devices,
        places,
        split,
        balanced,
        decode,
        layers,
        busy,
        fused,
        halved,
        step.sums_experts,
        step.gathers,
        mesh.tp_size if split > 1 or step.dispatch != "deepep" else 1,
    )
    if key in step.shared and not step.dry_runs:
        return step.shared[key]
    slots = places.physical // mesh.ep_size
    rows = rank_tokens * busy * top_k * mesh.expert_width_shards
    slowest = step.skew.slowest(places, config.n_routed_experts, rows, balanced)
    arriving = rows * slowest
    everyone = rank_tokens * busy * devices
    touched = step.skew.touched(everyone, top_k, config.n_routed_experts)
    used = step.skew.most_touched(everyone, top_k, config.n_routed_experts, slots, mesh.ep_size)
    inner = hidden // mesh.expert_width_shards
    timed = None
    if mesh.splits_expert_width and (width, hidden, top_k) == (7168, 2048, 8):
        # Only V3's own widths were timed.
        timed = chip.fused_experts(
            everyone,
            partial(step.skew.touched, top_k=top_k, experts=config.n_routed_experts),
            step.skew,
            mesh.expert_width_shards,
            mesh.ep_size,
        )
    least, all_timed, of_rank = timed, timed is not None, touched
    if (
        step.dispatch == "deepep"
        and not mesh.splits_expert_width
        and mesh.ep_size > 1
        and (width, hidden, top_k, slots * mesh.ep_size) == (7168, 2048, 8, 256)
    ):

        def more(tokens: float) -> float:
            each = tokens * top_k / mesh.ep_size
            return step.skew.slowest(places, config.n_routed_experts, each, balanced)

        spread = chip.spread_experts(
            everyone,
            partial(
                step.skew.most_touched, top_k=top_k, experts=config.n_routed_experts, slots=slots, ranks=mesh.ep_size
            ),
            (step.skew, places.physical),
            mesh.ep_size,
            None if decode else more,
        )
        if spread is not None:
            (least, all_timed), of_rank = spread, used
    if least is not None and fused:
        bound = 1 + max(1 / of_rank, 1 / top_k)
        least = least * assumed(
            1 + 1 / of_rank, 1.0, bound, "the shared expert in the same product",
            "one expert's weights more, or where rows take the time one in top-k of them",
        )  # fmt: skip
    products = least
    # With few tokens the B200's table is faster than its memory reads the weights; in decode the slower of both counts. With more tokens
    # than were timed the least is what the most of them took.
    if least is None or not all_timed or (timed is not None and decode and chip.hardware.is_blackwell):
        received = everyone * (1 - (1 - mesh.ep_size**-1) ** top_k) if mesh.ep_size > 1 else everyone
        if fused:  # one expert more in the same product, with every token of the ranks that share its width
            pooled = rank_tokens * busy * mesh.expert_width_shards
            used, arriving, slots = used + 1, arriving + pooled, slots + 1
        products = chip.experts(used, arriving, received * slowest, slots, width, inner, decode)
        if least is not None and least > products:
            products = least
    there, back = _exchanges(step, rank_tokens, decode, slowest, halved)
    if mesh.splits_expert_width and mesh.ep_size > 1 and "etp" not in mesh.axes and step.dispatch == "deepep":
        size = rank_tokens * split * top_k * width * BF16
        back = back + all_reduce(step.cluster, split, size)
    parts = {"experts": products * layers, "dispatch": there * layers, "combine": back * layers}
    if not step.dry_runs:
        step.shared[key] = parts
    return parts


def _exchanges(step: StepBasis, rank_tokens: float, decode: bool, slowest: float, halved: bool) -> tuple[float, float]:
    config, cluster, mesh = step.config, step.cluster, step.layout.mesh
    ranks = mesh.num_devices // mesh.expert_copies
    width, top_k = config.hidden_size, config.num_experts_per_tok
    if step.sums_experts:
        return 0.0, 0.0
    if step.gathers and mesh.dp_size > 1 and step.dispatch == "deepep":
        # A gather and scattered sums send half of a sum each.
        size = rank_tokens * mesh.num_devices * width * BF16 * (0.5 if decode else 1.0)
        each = all_reduce(cluster, mesh.num_devices, size)
        return each, each
    there, back = width * step.precision.wire, width * BF16
    if step.dispatch != "deepep":
        return _own(step, rank_tokens, decode, slowest, halved, ranks)
    if "etp" in mesh.axes:
        rows = {"all_gather": there + 6 * top_k + 4, "reduce_scatter": back}
        return tuple(_pooled_exchange(step, rank_tokens, row, kind) for kind, row in rows.items())
    ranks = ranks if mesh.ep_size > 1 else 1  # else the sums over tp are the exchange
    ways = ((there, False), (back, True))
    normal = [
        normal_exchange(cluster, config, ranks, rank_tokens, row, slowest, combine, step.operators, step.shared)
        for row, combine in ways
    ]
    low_latency = [
        low_latency_exchange(cluster, ranks, rank_tokens, top_k, row, slowest, combine, step.operators, step.shared)
        for row, combine in ways
    ]
    # Decode takes the faster of DeepEP's two kinds of kernels. Capturing the normal ones in a CUDA graph is not priced.
    faster = decode and sum(low_latency) <= sum(normal)
    return tuple(low_latency if faster else normal)


def _own(
    step: StepBasis, rank_tokens: float, decode: bool, slowest: float, halved: bool, ranks: int
) -> tuple[float, float]:
    """Both ways of dsjax's own dispatch, and the gather behind it of a replica's tokens, which ``tp`` ranks have in parts until then.

    Where experts are cut alone and a dry run was given, its collectives are among the sums over ``tp`` (`tensor_parallel_sums`).
    """
    config, cluster, mesh = step.config, step.cluster, step.layout.mesh
    width, top_k, method = config.hidden_size, config.num_experts_per_tok, step.own_method(rank_tokens, halved)
    compiled = nearest(step.dry_runs, decode, rank_tokens) is not None
    if mesh.ep_size == 1 and compiled:
        return 0.0, 0.0
    run = exchange_run(step.dry_runs, decode, method, rank_tokens) if ranks > 1 else None
    # Float32 weights, 16-bit ids, a spare word: sharding/dispatch/wire.py.
    rows = (width * step.precision.wire + 6 * top_k + 4, width * BF16)
    if run:
        there, back = exchanges(cluster, run, config.num_moe_layers, top_k, ranks, rank_tokens, slowest)
    elif mesh.ep_size == 1 and ranks == mesh.tp_size > 1:
        there, back = (_half_a_sum(cluster, ranks, rank_tokens * row) for row in rows)
    elif mesh.splits_expert_width and method != "gather" and ranks > 1:
        ways = zip(rows, ("all_gather", "reduce_scatter"), strict=True)
        there, back = (_in_width(step, method, rank_tokens, *way, slowest, halved) for way in ways)
    else:
        there, back = (
            own_exchange(cluster, method, ranks, rank_tokens, top_k, row, slowest, halved, step.routed_groups)
            for row in rows
        )
    if mesh.tp_size > 1 and not compiled:
        back = back + _half_a_sum(cluster, mesh.tp_size, rank_tokens * width * BF16)
    return there, back


def _half_a_sum(cluster: Cluster, ranks: int, each: float) -> float:
    """Seconds of a gather over ``tp``, or of scattered sums: those of a sum that sends as much (as of `tensor_parallel_sums`)."""
    return all_reduce(cluster, ranks, each * ranks / 2)


def _in_width(
    step: StepBasis, method: str, rank_tokens: float, row_bytes: float, kind: str, slowest: float, halved: bool
) -> float:
    """One way of dsjax's own dispatch where ranks share an expert's width: between ranks of one place in it, and among these.

    Rows that have come are pooled as they lie, with the room that was kept for others (`ExpertGroup.pool_width`). ``gather`` has no such
    step: its two collectives are over all ranks.
    """
    cluster, mesh, top_k = step.cluster, step.layout.mesh, step.config.num_experts_per_tok
    ranks, sharing = mesh.ep_size, mesh.expert_width_shards
    whole, each = max(1, math.ceil(rank_tokens)), exchanged_rows(method, rank_tokens, top_k, ranks, halved)
    near = max(1, min(ranks, cluster.domain // sharing))
    room = whole if method == "ragged" else each
    time = xla_collective(cluster, sharing, ranks * room * row_bytes, kind=kind)
    if method == "hierarchical":
        hosts = ranks // near
        crossing = host_capacity(whole, top_k, hosts, halved, step.routed_groups) * row_bytes
        time = time + xla_collective(cluster, hosts, crossing, near=1, of=ranks * sharing)
        time = time + xla_collective(cluster, near, hosts * each * row_bytes, near=near, of=near * sharing)
    elif ranks > 1:
        sent, ragged = each * row_bytes, method == "ragged"
        sent = sent * slowest if ragged else sent
        exchange = "ragged_all_to_all" if ragged else "all_to_all"  # sizes go before rows
        time = time + xla_collective(cluster, ranks, sent, 2 if ragged else 1, exchange, near=near, of=ranks * sharing)
    return time


def _pooled_exchange(step: StepBasis, rank_tokens: float, row_bytes: float, kind: str) -> float:
    """One way of tokens whose experts' widths DP ranks share: to one of the ranks that share an expert, then to all of them.

    Ranks that share a width are neighbours, so that those with other experts are ``etp`` devices apart.
    """
    cluster, mesh, top_k = step.cluster, step.layout.mesh, step.config.num_experts_per_tok
    ranks, sharing = mesh.ep_size, mesh.etp_size
    arriving = rank_tokens * ranks * (1 - (1 - 1 / ranks) ** top_k) if ranks > 1 else rank_tokens
    time = xla_collective(cluster, sharing, arriving * row_bytes, kind=kind)
    if ranks > 1:
        near = max(1, min(ranks, cluster.domain // sharing))
        each = (arriving / ranks) * row_bytes
        time = time + xla_collective(cluster, ranks, each, near=near, of=ranks * sharing)
    return time
