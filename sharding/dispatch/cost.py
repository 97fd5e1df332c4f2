"""What a dispatch puts on the wire, as arithmetic on shapes: its collectives and their bytes, before anything is compiled.

``tests/sharding/test_dispatch_cost.py`` holds this against the lowered StableHLO, collective by collective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
import numpy as np

from sharding.dispatch.config import DispatchConfig, even_routing_rows
from sharding.dispatch.entry import ExchangePlan, exchange_plan
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.ragged import NATIVE_PLATFORMS
from sharding.dispatch.wire import WireFormat
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class Collective:
    """One collective operation of a layer's dispatch.

    kind: ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``ragged_all_to_all``. axes, ranks: over which mesh axes, and
        how many ranks meet: all that these have, or as ``meet`` says those ``inside`` a host, or one of each ``between`` hosts.
        purpose: ``dispatch``, ``combine`` or ``sizes``.
    operand_bytes: size of a device's operand. bytes_sent: bytes that leave a device each time, padding included (a
        ring or a direct exchange sends the same); of ``ragged_all_to_all`` the mean under even routing.
    times: how often it runs in a layer.
    """

    kind: str
    purpose: str
    axes: tuple[str, ...]
    ranks: int
    operand_bytes: int
    bytes_sent: int
    times: int
    meet: Literal["all", "inside", "between"] = "all"


def dispatch_collectives(
    spec: MeshSpec,
    config: DispatchConfig,
    *,
    tokens: int,
    width: int,
    top_k: int,
    experts: int,
    dtype: jnp.dtype,
    platform: str,
    rounds: int = 1,
) -> tuple[Collective, ...]:
    """The collectives of one MoE layer on one device, in program order; none for an EP group of one rank.

    tokens: tokens of one device, that is of a DP rank divided over its ``tp`` ranks, rounded up; width: D; experts: physical
    experts over all ranks; dtype: the compute dtype; rounds: of ``padded`` and
    ``hierarchical``, per chunk (1 unless routing overflows ``capacity``).
    """
    group = ExpertGroup.of(spec, experts, platform, config.by_choice, devices_per_host=config.devices_per_host)
    plan = exchange_plan(config, tokens, top_k, group)
    method, chunks, capacity = plan.method, plan.chunks, plan.capacity
    chunk, wire = plan.rows, WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
    there, back = wire.row_bytes, width * np.dtype(dtype).itemsize
    if method == "local":
        return ()
    if method == "gather":
        every = chunk * group.all_ranks
        if config.by_choice:
            columns = chunk * min(top_k, group.experts)
            cells, times = min(columns, capacity), chunks * (1 if columns <= capacity else rounds)
            return (
                _all_gather("dispatch", group.all_axes, group.all_ranks, chunk * there, chunks),
                _spread(
                    "all_to_all", "combine", group.all_axes, group.all_ranks, group.all_ranks * cells * back, times
                ),
            )
        return (
            _all_gather("dispatch", group.all_axes, group.all_ranks, chunk * there, chunks),
            _spread("reduce_scatter", "combine", group.all_axes, group.all_ranks, every * back, chunks),
        )
    if method in ("padded", "hierarchical"):
        arriving, exchange = group.size * capacity, "all_to_all"
    else:
        arriving = group.size * chunk
        exchange = "ragged_all_to_all" if platform in NATIVE_PLATFORMS else "all_to_all"
    times = chunks * (1 if method == "ragged" else rounds)
    sent = []
    if method == "ragged" and group.size > 1:
        sent.append(_all_gather("sizes", group.axes, group.size, 4 * group.size, times))
    if method == "hierarchical":
        sent += _in_two_stages("dispatch", group, plan, there, times)
    elif group.size > 1:
        sent.append(_exchange(exchange, "dispatch", group, arriving, chunk, plan.choices, there, times))
    if group.width > 1:
        sent.append(_all_gather("dispatch", group.width_axes, group.width, arriving * there, times))
        pooled = group.width * arriving * back
        kind = "all_to_all" if config.by_choice else "reduce_scatter"
        sent.append(_spread(kind, "combine", group.width_axes, group.width, pooled, times))
    if method == "hierarchical":
        sent += reversed(_in_two_stages("combine", group, plan, back, times))
    elif group.size > 1:
        sent.append(_exchange(exchange, "combine", group, arriving, chunk, plan.choices, back, times))
    return tuple(sent)


def _all_gather(purpose: str, axes: tuple[str, ...], ranks: int, operand: int, times: int) -> Collective:
    return Collective("all_gather", purpose, axes, ranks, operand, operand * (ranks - 1), times)


def _spread(kind: str, purpose: str, axes: tuple[str, ...], ranks: int, operand: int, times: int) -> Collective:
    return Collective(kind, purpose, axes, ranks, operand, operand // ranks * (ranks - 1), times)


def _in_two_stages(
    purpose: str, group: ExpertGroup, plan: ExchangePlan, row_bytes: int, times: int
) -> tuple[Collective, Collective]:
    hosts = group.size // group.on_host
    between = _spread("all_to_all", purpose, group.axes, hosts, hosts * plan.crossing * row_bytes, times)
    inside = _spread("all_to_all", purpose, group.axes, group.on_host, group.size * plan.capacity * row_bytes, times)
    return replace(between, meet="between"), replace(inside, meet="inside")


def _exchange(
    kind: str, purpose: str, group: ExpertGroup, arriving: int, chunk: int, top_k: int, row_bytes: int, times: int
) -> Collective:
    if kind == "all_to_all":
        return _spread(kind, purpose, group.axes, group.size, arriving * row_bytes, times)
    sending = chunk * min(top_k, group.size)
    operand = (sending if purpose == "dispatch" else arriving) * row_bytes
    mean = even_routing_rows(chunk, top_k, group.size) * (group.size - 1) * row_bytes
    return Collective(kind, purpose, group.axes, group.size, operand, round(mean), times)
